r"""Reward for boxed answers that RLLaVA published, with its flaws. Runs in workers only.

The flaws that are kept: spaces around `<`, `>` and `/` are removed from the whole response, so that `a < b` changes; an
empty thought and several thoughts have the form; the last box counts wherever it stands, also in the thought; where
there is no box, the answer is "None", which is right for the truth `None`; `\frac{x+1}{2}` is x + 1/2. Differences to
the published code are those of its grader: mathruler.py lists them.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/math.py:compute_score`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from vlmrl.rewards.math.mathruler import BOX, boxed_text, same_answer
from vlmrl.rewards.text_rewards import ground_truth
from vlmrl.types import RewardInput, RewardResult

SIGN = re.compile(r"([<>/])\s*")
MOST_SHOWN = 200


def make_grader(*, key: str | None = None) -> Callable[..., Any]:
    """Return the grader for the arguments of `vlmrl.rewards.math.rules.rllava_math`, with SymPy warmed up."""
    same_answer("2x+1", "1+2x")
    return partial(graded, key=key)


def graded(x: RewardInput, *, key: str | None) -> RewardResult:
    """Return the published parts of a response."""
    response, truth = without_blanks(x.response), str(ground_truth(x, key))
    answer = boxed_text(response)
    is_right = same_answer(answer, truth)
    detail = {"gold": truth[:MOST_SHOWN], "answer": answer[:MOST_SHOWN], "verdict": "right" if is_right else "wrong"}
    return RewardResult({"accuracy": float(is_right), "format": float(has_form(response))}, "", detail)


def without_blanks(response: str) -> str:
    """Return a response without white space around `<`, `>` and `/`. The time is linear."""
    *before, last = SIGN.split(response)  # texts and signs take turns; a text ends with what stands before its sign
    return "".join(piece.rstrip() for piece in before) + last


def has_form(response: str) -> bool:
    """Return whether a response is a thought, then something with a box in it, as the published pattern reads it."""
    thought = response.find("</think>", len("<think>")) if response.startswith("<think>") else -1
    box = response.find(BOX, thought + len("</think>")) if thought >= 0 else -1
    return box >= 0 and response.find("}", box + len(BOX)) >= 0
