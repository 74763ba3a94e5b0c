"""Grading of mathematical answers: the last box is read, compared with the gold answer, and the reason is kept.

`rules.py` declares the policy and the rewards. `latex.py` finds and tidies the answer, `reading.py` reads its shape and
units, `grader.py` compares two readings. Only `expressions.py` and `maye.py` import math-verify; they run in workers.
`rllava.py` is another published rule. Text of a model is parsed by grammars and regular expressions: it never reaches
`eval` or `sympify`.
"""
