"""Environments of episodes: tools that the policy calls between its turns, each episode in a process of its own.

`base` is what a user's environment gets and returns. `tools` turns typed Python into tools, `calls` reads the calls in
a model's text, `worker` runs them, and `processes` owns the processes. Begin with `base`.
"""
