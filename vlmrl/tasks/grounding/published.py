"""Grounding reward that RLLaVA published, with identical results and with its flaws. Use it only to reproduce its runs.

Source: TinyLoopX/RLLaVA at 4753d4a, `examples/reward_function/grounding.py:compute_score` with
    `rllava/model/modules/rm/grounding.py`.

The flaws that are kept: almost any response that begins with `<` or `>` has the format; the first box anywhere counts,
also one within the thought; without the token `<|box_start|>` all numbers are multiplied by 1000. Engines keep this
token in the text of a response.

Differences to the published code: a union of 0, and numbers too large for a float, give 0 where the original raises an
exception; a truth is a list of numbers, never code. The true box is in 0 to 1000, rounded if the dataset has pixels.
"""

from __future__ import annotations

import re
from typing import Any

from vlmrl.metric import SHARE
from vlmrl.rewards.answer_form import format_weights
from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import convert, plane_of
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.grounding.truth import true_box
from vlmrl.types import RewardInput

NAME = "rllava_box"
BEGINNINGS = ("<", ">", "object_ref_start", "object_ref_end", "box_start", "box_end", "im_end")
"""Beginnings of a response that the published pattern accepts, because its `|` are not escaped."""
END_OF_TEXT, BOX_TOKEN = "<|endoftext|>", "<|box_start|>"
_N = r"(-?\d+(?:\.\d+)?)"
PATTERNS = (
    re.compile(rf"\[\s*{_N},\s*{_N},\s*{_N},\s*{_N}\s*\]"),
    re.compile(rf"\(\s*{_N},\s*{_N},\s*{_N},\s*{_N}\s*\)"),
    re.compile(rf"\(\s*{_N},\s*{_N}\),\s*\(\s*{_N},\s*{_N}\)"),
)


def rllava_box(*, format_weight: float = 0.5) -> RewardSpec:
    """Return the published reward: accuracy (the squared IoU) and format.

    Args:
        format_weight: weight of the format, in [0, 1]; the accuracy has the rest.
    """
    weights = format_weights(format_weight)
    return RewardSpec(NAME, score, {"accuracy": SHARE, "format": SHARE}, weights, pure=True)


def score(x: RewardInput) -> dict[str, Any]:
    """Return the published parts of a response."""
    plane, truth = true_box(x.truth)
    if plane.space != "thousand":
        truth = type(truth)(*map(round, convert(truth, plane, plane_of("thousand", size_of(x.truth)))))
    response = x.response.replace(END_OF_TEXT, "")
    box = first_box(response)
    return {
        "accuracy": overlap(box, truth) ** 2,
        "format": float(response.startswith(BEGINNINGS)),
        "detail": {"box": list(box)},
    }


def first_box(response: str) -> tuple[float, ...]:
    """Return the first four numbers in a form that the published code knows; zeros if there are none."""
    for pattern in PATTERNS:
        match = pattern.search(response)
        if match is None:
            continue
        numbers = tuple(float(number) for number in match.groups())
        if any(abs(number) > 1e300 for number in numbers):
            return (0.0, 0.0, 0.0, 0.0)
        if BOX_TOKEN in response:
            return numbers
        return tuple(float(int(number * 1000)) for number in numbers)
    return (0.0, 0.0, 0.0, 0.0)


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """Return the published IoU, in [0, 1]; corners in reverse order are not mended."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    shared = max(0.0, width) * max(0.0, height)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    union = areas[0] + areas[1] - shared
    return shared / union if shared > 0 and union > 0 else 0.0
