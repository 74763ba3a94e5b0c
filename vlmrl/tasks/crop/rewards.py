"""Rewards of the task crop: the right answer, and the reward that RLLaVA published for DeepEyes, flaws included.

Use the published one only to repeat RLLaVA's run. Source: TinyLoopX/RLLaVA at 4753d4a,
`examples/reward_function/deepeyes_visual.py`, written from a description. Flaws that are kept: `tool` is the number of
calls that a tool has answered. It has no bound and no condition, so a wrong answer with four calls earns 4.8, and a
right one without a call 0.8. Difference: no judge is asked. The published code compares texts, as here, where it
reaches no judge.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.metric import SHARE
from vlmrl.redaction.redact import excerpt, quoted
from vlmrl.rewards import Builtin
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.text_parsing import REQUIRED, check_thought, final_answer, form_problem, untagged
from vlmrl.rewards.text_rewards import answered_calls
from vlmrl.types import RewardInput

CROP, RLLAVA_CROP = "crop", "rllava_crop"
LETTER = re.compile(r"\(?([a-z])\)?[.:]?")
"""Letter of an option, as answers write it."""
MOST_CHARS = 1000
"""Length from which the published reward takes no answer."""


def true_answer(truth: Mapping[str, Any]) -> str:
    """Return the right answer of a row as it is compared. Raises: RewardError for a row without one."""
    answer = truth.get("answer")
    if not isinstance(answer, str) or not (text := _plain(untagged(answer))):
        raise RewardError(f"the row's `answer` is {quoted(answer, 60)}, not a text")
    return text


def _plain(text: str) -> str:
    words = " ".join(text.split()).casefold()
    letter = LETTER.fullmatch(words)
    return letter[1] if letter else words.rstrip(".")


def crop(*, thought: str = REQUIRED) -> RewardSpec:
    """Return a reward. Part `accuracy`: 1 for the right answer in the last turn, ignoring case and white space.

    Of an option, the letter is the answer. `format`: 1 for a last turn in the form that the prompt asks for, right or
    wrong. The use of tools is the business of `tool_use`, behind a gate.

    Args:
        thought: whether the form needs a `<think>` thought before the answer: "required" or "optional".
    """
    check_thought(thought)
    score = partial(score_crop, thought=thought)
    ranges = {"accuracy": SHARE, "format": SHARE}
    return RewardSpec(CROP, score, ranges, {"accuracy": 0.9, "format": 0.1}, pure=True, accuracy="accuracy")


def score_crop(x: RewardInput, *, thought: str = REQUIRED) -> dict[str, Any]:
    """Return the parts of a response; see `crop`."""
    truth = true_answer(x.truth)
    answer, problem = final_answer(x.answer)
    problem = problem or form_problem(replace(x, response=x.answer), thought)
    return {
        "accuracy": float(answer is not None and _plain(answer) == truth),
        "format": float(not problem),
        "note": problem,
        "detail": {"answer": answer and excerpt(answer, 200)},
    }


def rllava_crop() -> RewardSpec:
    """Return the published reward: 0.8 x accuracy + 0.2 x format (-1 or 0) + 1.2 x number of calls."""
    ranges = {"accuracy": SHARE, "format": (-1.0, 0.0), "tool": (0.0, math.inf)}
    weights = {"accuracy": 0.8, "format": 0.2, "tool": 1.2}
    return RewardSpec(RLLAVA_CROP, score_crop_as_published, ranges, weights, pure=True, accuracy="accuracy")


def score_crop_as_published(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    text, truth = x.response, str(x.truth.get("answer"))
    is_balanced = all(text.count(f"<{tag}>") == text.count(f"</{tag}>") for tag in ("think", "answer"))
    answer = text.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    right = "<answer>" in text and len(answer) < MOST_CHARS and answer.casefold() == truth.strip().casefold()
    has_form = is_balanced and ("<answer>" in text or "<tool_call>" in text)
    return {"accuracy": float(right), "format": float(has_form) - 1.0, "tool": float(answered_calls(x))}


REWARDS: Mapping[str, Builtin] = {
    CROP: Builtin(crop, "crop: the right answer in the last turn, and its form", version=2),
    RLLAVA_CROP: Builtin(
        rllava_crop,
        "crop: the reward that RLLaVA published, to repeat its run: it pays calls without a bound",
        version=1,
    ),
}
