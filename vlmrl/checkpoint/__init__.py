"""Checkpoints of a run: saved, loaded, proved equal, and merged into a folder in Hugging Face's format.

`io.py` writes and reads one, `load.py` makes a model of one, and `proof.py` compares log-probs before and after.
`merge.py` is `vlmrl merge`; `merge_weights.py` folds adapters into weights. Begin with `io.py`.
"""
