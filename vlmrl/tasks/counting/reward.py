"""Reward of the task counting: the right whole number, in the only answer of the response."""

from __future__ import annotations

from functools import partial
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.answer_form import REQUIRED, check_thought, final_answer, form_problem
from vlmrl.rewards.base import RewardSpec
from vlmrl.tasks.counting.reading import stated_number
from vlmrl.types import RewardInput

LARGEST_COUNT = 1_000_000
UNIT = (0.0, 1.0)
RANGES = {"accuracy": UNIT, "format": UNIT, "nearness": UNIT}
WEIGHTS = {"accuracy": 0.9, "format": 0.1}
"""Weights of the parts. `nearness` counts only where the recipe gives it a weight: a middle number earns some of it."""


def count(*, thought: str = REQUIRED) -> RewardSpec:
    """Return a reward with three parts. `accuracy`: 1 if the only `<answer>` states the right number (reading.py).

    Text behind the tag costs the `format` alone, even if it takes the answer back.

    `format`: 1 for a whole response in the form that the prompt asks for, with a number as its answer, right or wrong.
    `nearness`: 1 for the right number, falling linearly to 0 at a distance of the number itself (at least 1); it has no
    weight by default.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: "required" or "optional".
    """
    check_thought(thought)
    return RewardSpec("count", partial(score_count, thought=thought), RANGES, WEIGHTS, pure=True, accuracy="accuracy")


def read_count(response: str) -> tuple[int | None, str]:
    """Return (the number in the only `<answer>` of a response, ""), or (None, the reason)."""
    answer, problem = final_answer(response)
    if answer is None:
        return None, problem
    number = stated_number(answer)
    if number is None:
        return None, "the answer is not one number"
    if number != int(number) or not 0 <= number <= LARGEST_COUNT:
        return None, f"the answer is no whole number from 0 to {LARGEST_COUNT:,}"
    return int(number), ""


def true_count(x: RewardInput) -> int:
    """Return the right number of a row. Raises: RewardError for a row without one."""
    value = x.truth.get("answer")
    if type(value) is not int or value < 0:
        raise RewardError(f"the row's `answer` is {quoted(value, 60)}, not a whole number >= 0")
    return value


def score_count(x: RewardInput, *, thought: str = REQUIRED) -> dict[str, Any]:
    """Return the parts of a response; see `count`."""
    truth = true_count(x)
    answer, problem = read_count(x.response)
    problem = problem or form_problem(x, thought)
    distance = abs(answer - truth) if answer is not None else None
    return {
        "accuracy": float(distance == 0),
        "format": float(not problem),
        "nearness": max(0.0, 1 - distance / max(1, truth)) if distance is not None else 0.0,
        "note": problem,
        "detail": {"answer": answer},
    }
