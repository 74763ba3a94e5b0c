"""Evaluation: rows answered and graded, metrics with intervals, and comparison of runs.

`eval.py` does `vlmrl eval` by the plan of `eval_plan.py`; `run.py` answers and grades one set; `metrics.py` and
`estimates.py` compute, `paired.py` compares row by row. `generate.py` and `trial.py` are two more commands. Begin with
`eval.py`.
"""
