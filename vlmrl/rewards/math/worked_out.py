r"""Final forms of an answer: `1776` is one, `37\cdot 48` is not. A question must not be its own answer."""

from __future__ import annotations

import re

from vlmrl.rewards.math.numbers import DECIMAL

_NUMBER = rf"(?:{DECIMAL}|\\frac\{{{DECIMAL}\}}\{{{DECIMAL}\}})"
_START = r"(?:(?<![0-9A-Za-z.)}\]^!\s])|(?<=[-+*/=,]\s))"
"""Place before a number that is not multiplied with something on its left."""
_END = r"(?=\s*(?:$|[-+)\]}=,]))"
"""Place behind a number that is not multiplied with something on its right."""
OPERATION = re.compile(
    rf"{_START}{_NUMBER}\s*[-+]\s*{_NUMBER}{_END}"
    rf"|{_NUMBER}\s*(?:\\cdot|\\times|\\ast|\*)\s*(?!10\^)\(?-?{_NUMBER}(?![0-9.]|\^\{{?(?:\\frac|[0-9]+/|0?\.))"
)
"""Sum, difference, product or quotient of two numbers; `2\\cdot 10^{3}` and a part of `1+2\\sqrt{3}` are none."""


def is_worked_out(answer: str, gold: str) -> bool:
    r"""Return whether no sum, difference, product or quotient of two numbers is left in an answer.

    Powers, roots and functions are final forms, and so is everything where the gold answer has such an operation, too.

    Args:
        answer, gold: tidy texts without units; neither has variables.
    """
    return OPERATION.search(answer) is None or OPERATION.search(gold) is not None
