"""The mathematics of the GRPO family, on plain numbers and tensors: no model, no data, no files.

`algorithms.py` has the table of algorithms, `algo_keys.py` what each of their keys means. `credit.py` turns the scores
of a step into advantages (estimators: `advantages.py`); `losses.py` is the only file with torch. Begin with
`credit.py`.
"""
