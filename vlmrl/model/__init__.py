"""Models: files, loading, attention over packed rows, log-probs of tokens, memory.

`load.py` loads a model, `packing.py` makes packed rows, `policy.py` runs one and returns what the losses need. The
package depends on torch, transformers and `algo` alone. Begin with `policy.py`.
"""
