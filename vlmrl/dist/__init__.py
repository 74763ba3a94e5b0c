"""The ranks of a run: how they meet, exchange values and share a model.

`world.py` has the ranks and their collectives, `fsdp.py` a model in shards, `engine_isolation.py` keeps vLLM and the
trainer's process groups apart. Nothing that a socket brings is unpickled. Begin with `world.py`.
"""
