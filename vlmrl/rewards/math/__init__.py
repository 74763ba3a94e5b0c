"""Grading of mathematical answers: the last box is read, compared with the gold answer, and the reason is kept.

`rules.py` declares the policy and the rewards. `answer_text.py` finds the answer in a response, `latex.py` tidies it,
`numbers.py` and `units.py` read its pieces, `reading.py` its shape. `verdict.py` compares two readings. Only
`expressions.py` and `maye.py` import math-verify; they run in workers. `rllava.py` is another published rule, with
the grader in `mathruler.py`. Text of a model is parsed by grammars and regular expressions: it never reaches `eval` or
`sympify`.
"""
