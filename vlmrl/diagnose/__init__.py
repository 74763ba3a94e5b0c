"""Diagnosis of a run that does not learn (`vlmrl diagnose`), and the warnings of each step.

`run.py` ranks the causes, which the files `*_causes.py` look for in the facts that `run_facts.py` reads. `signs.py`
finds warnings in a step's metrics while the run goes on; `thresholds.py` has every limit. Begin with `run.py`.
"""
