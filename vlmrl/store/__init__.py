"""The run store: folders with a manifest, metrics, rollouts, checkpoints and evaluations. No torch.

`layout.py` has the names, `runs.py` creates and opens a run, `verify.py` checks one; each kind of record has a file. A
run folder is untrusted input: files are opened by `untrusted.py` and checked by one model each. Begin with `runs.py`.
"""
