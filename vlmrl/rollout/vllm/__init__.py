"""vLLM as an engine: in the trainer's process, or in processes of its own.

`engine.py` runs in process; `hosted_engine.py` talks to `host.py` by the messages of `wire.py`; `weight_loading.py` is
the engine's side of a sync. Only three files import vLLM. Begin with `engine.py`.
"""
