"""Kit of limited processes for code that may hang, crash or attack: rewards, SVG, templates, loggers.

`pool.py` is the parent's side, `serve.py` the child's, `frames.py` their messages; `keeper.py` ends all that a worker
started. Begin with `pool.py`.
"""
