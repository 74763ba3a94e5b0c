"""Sandbox for Python code that a model wrote. It needs no privileges and no daemon.

`box.py` is the caller's side, `zygote.py` the sandboxed side, `confine.py` and `calls.py` what the kernel refuses
there. The tool `python` of environments uses it. Begin with `box.py`.
"""
