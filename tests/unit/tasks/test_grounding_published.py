"""RLLaVA's grounding reward: equal to its published code, flaws included; the reward `box_iou` has none of them.

tests/golden/rllava/grounding.json holds what `examples/reward_function/grounding.py:compute_score` of TinyLoopX/RLLaVA
at 4753d4a computed: [response, true box in 0 to 1000, overall, accuracy, format].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import RewardError
from vlmrl.rewards.base import combine
from vlmrl.tasks.perception.reward import box_iou
from vlmrl.tasks.perception.rewards import rllava_box
from vlmrl.types import RewardInput

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rllava" / "grounding.json").read_text("utf-8"))
PUBLISHED, FIXED = rllava_box(), box_iou(space="thousand")
TRUTH = [100, 200, 400, 600]


def given(response: str, box: Any = TRUTH, space: str = "thousand") -> RewardInput:
    return RewardInput(response, {"box": box, "space": space, "width": 640, "height": 480})


def earned(spec: Any, response: str) -> float:
    return combine(spec(given(response)), spec.weights)[0]


def test_scores_are_those_of_the_published_code_to_the_digit() -> None:
    assert len(GOLDEN) > 400 and sum(case[3] > 0 for case in GOLDEN) > 100
    for response, box, overall, accuracy, form in GOLDEN:
        parts = PUBLISHED(given(response, box))
        assert (parts["accuracy"], parts["format"]) == (accuracy, form), response
        assert combine(parts, PUBLISHED.weights)[0] == overall


# (flaw, response, what the published reward earns, what `box_iou` earns); the true box is [100, 200, 400, 600]
FLAWS = [
    ("a single bracket has the format", "<", 0.5, 0.0),
    ("anything after a bracket", "> no idea", 0.5, 0.0),
    ("a right box in 0 to 1000, without tokens", "<think>a</think><answer>[100, 200, 400, 600]</answer>", 0.5, 1.0),
    (
        "the box of the thought counts",
        "<think>[0.1, 0.2, 0.4, 0.6]</think><answer>[900, 900, 990, 990]</answer>",
        1.0,
        0.1,
    ),
    ("the first of two boxes counts", "<answer>[0.1, 0.2, 0.4, 0.6] [0.9, 0.9, 1, 1]</answer>", 1.0, 0.0),
]


@pytest.mark.parametrize(("response", "published", "fixed"), [flaw[1:] for flaw in FLAWS])
def test_flaws_are_kept_by_the_published_reward_alone(response: str, published: float, fixed: float) -> None:
    assert earned(PUBLISHED, response) == pytest.approx(published)
    assert earned(FIXED, response) == pytest.approx(fixed)


def test_what_raised_an_exception_in_the_published_code_is_0() -> None:
    for response in ("<|box_start|>[400, 600, 100, 200]", f"[{'9' * 400}, 0, 1, 1]", "[0, 0, 0, 0]"):
        assert PUBLISHED(given(response))["accuracy"] == 0.0


def test_a_truth_in_pixels_is_rounded_to_thousandths() -> None:
    # 63 of 640 pixels are 98.4 thousandths, 97 of 480 are 202.1
    parts = PUBLISHED(given("[0.098, 0.202, 0.4, 0.6]", [63, 97, 256, 288], "pixels"))
    assert parts["accuracy"] == 1.0
    with pytest.raises(RewardError, match="format_weight"):
        rllava_box(format_weight=-1)
