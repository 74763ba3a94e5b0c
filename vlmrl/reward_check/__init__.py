"""`vlmrl reward-check`: saved responses scored again, compared, and the reward attacked.

`responses.py` and `response_tables.py` read the responses, `scoring.py` scores them, `probe.py` tries the tricks of
`tricks.py` and of the task. Begin with `run.py`.
"""
