"""Environments of episodes: tools that the policy calls, and the texts in which it calls them.

`tools` turns typed Python functions into tools, `calls` reads the calls in a model's text. Begin with `tools`.
"""
