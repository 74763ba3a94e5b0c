"""Settings of other trainers, read as data and written as a recipe: TRL, verl, EasyR1, RLLaVA.

`read.py` parses YAML, JSON and scripts without running them; each trainer has a file, and `draft.py` collects the keys
with what is lost. Begin with `run.py`.
"""
