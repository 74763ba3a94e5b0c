"""Counting reward that RLLaVA published, with identical results and with its flaws. Use it only to reproduce its runs.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/r1v.py:compute_score`, and the grader that it calls
    (`mathruler.grader.grade_answer`, version 0.1.0); rewards/math/mathruler.py lists how this one differs.

The flaws that are kept: a well-formed response without any answer earns half of the score; the first answer counts, so
that a second one does no harm; without a tag, the whole response is the answer; units, currencies and percent signs are
removed, so that "4 feet" is 4. tests/unit/tasks/test_counting_published.py names each.
"""

from __future__ import annotations

import re
from typing import Any

from vlmrl.rewards.answer_form import format_weights
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.counting.reward import UNIT, true_count
from vlmrl.types import RewardInput

OPEN, CLOSE = "<answer>", "</answer>"
BEGIN = "<think>"
BETWEEN = re.compile(r"</think>\s*<answer>")
MOST_DETAIL = 200


def rllava_count(*, format_weight: float = 0.5) -> RewardSpec:
    """Return the published reward: accuracy and format, each 0 or 1.

    Args:
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest.
    """
    weights = format_weights(format_weight)
    return RewardSpec(
        "rllava_count", score, {"accuracy": UNIT, "format": UNIT}, weights, pure=True, accuracy="accuracy"
    )


def score(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    from vlmrl.rewards.math.mathruler import same_answer

    answer = first_answer(x.response)
    return {
        "accuracy": float(same_answer(answer, str(true_count(x)))),
        "format": float(has_form(x.response)),
        "detail": {"answer": answer[:MOST_DETAIL]},
    }


def first_answer(response: str) -> str:
    """Return the text of the first answer; the whole response if there is none."""
    start = response.find(OPEN)
    end = response.find(CLOSE, start + len(OPEN)) if start >= 0 else -1
    return (response[start + len(OPEN) : end] if end >= 0 else response).strip()


def has_form(response: str) -> bool:
    """Return whether the response is a thought, white space, and something between answer tags."""
    if not response.startswith(BEGIN) or not response.endswith(CLOSE):
        return False
    middle = BETWEEN.search(response, len(BEGIN))
    return middle is not None and middle.end() <= len(response) - len(CLOSE)
