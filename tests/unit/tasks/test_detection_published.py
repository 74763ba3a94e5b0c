"""RLLaVA's detection reward: equal to its description, flaws included; the reward `box_list` has none of them.

tests/golden/rllava/detection.json holds the scores of a second implementation of the same description (see
record_detection.py beside it): [response, true boxes in 0 to 1000, overall, iou, confidence, format].
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vlmrl.rewards.base import combine
from vlmrl.tasks.perception.reward import box_list
from vlmrl.tasks.perception.rewards import rllava_boxes
from vlmrl.types import RewardInput

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "rllava" / "detection.json").read_text("utf-8"))
PUBLISHED, FIXED = rllava_boxes(), box_list(space="thousand")
TRUTH = [100, 200, 400, 600]
THOUGHT = "<think>a</think><answer>{}</answer>"


def given(response: str, boxes: Any = (TRUTH,), space: str = "thousand") -> RewardInput:
    return RewardInput(response, {"boxes": list(boxes), "space": space, "width": 640, "height": 480, "category": "cat"})


def earned(spec: Any, response: str) -> float:
    return combine(spec(given(response)), spec.weights)[0]


def test_scores_are_those_of_the_description_to_the_digit() -> None:
    assert len(GOLDEN) > 1200 and sum(case[2] != "crash" and case[3] > 0 for case in GOLDEN) > 300
    for response, boxes, overall, *parts in GOLDEN:
        mine = PUBLISHED(given(response, boxes))
        if overall == "crash":
            assert (mine["iou"], mine["confidence"]) == (0.0, 0.0), response
            continue
        assert [mine["iou"], mine["confidence"], mine["format"]] == parts, response
        assert combine(mine, PUBLISHED.weights)[0] == pytest.approx(overall, abs=1e-15)


RIGHT = "[{'Position': [100, 200, 400, 600], 'Confidence': 0.9}]"
AT_70 = "[{'Position': [100, 200, 310, 600], 'Confidence': 1.0}]"  # 210 of 300 wide: IoU 0.7
WRONG = "[{{'Position': [900, 900, 950, 950], 'Confidence': {}}}]"
# (flaw, answer, what the published reward earns, what `box_list` earns)
FLAWS = [
    ("a wrong box of confidence 0", WRONG.format(0), 0.67, 0.1),  # box_list: as much as no box
    ("a wrong box of confidence -50", WRONG.format(-50), 0.67, 0.0),
    ("a wrong box of confidence 1", WRONG.format(1), 0.34, 0.0),
    # a box at an IoU of 0.7: 0.33 * 0.7 + 0.33 + 0.34; 0.8 * 0.7 + 0.2
    ("a real box earns hardly more", AT_70, 0.901, 0.76),
    ("a line break takes everything", f"\n{RIGHT}\n", 0.34, 0.999),  # 0.8 + 0.2 * (1 - 0.1^2 / 2)
    ("no answer has the form", "there", 0.34, 0.0),
    ("a position that is a number", "[{'Position': 5, 'Confidence': 1}]", 0.34, 0.0),
    ("null as a coordinate", "[{'Position': [1, null, 3, 4], 'Confidence': 1}]", 0.34, 0.0),
    ("entries that are texts", "['Position', 'Confidence']", 0.34, 0.0),
]


@pytest.mark.parametrize(("answer", "published", "fixed"), [flaw[1:] for flaw in FLAWS])
def test_flaws_are_kept_by_the_published_reward_alone(answer: str, published: float, fixed: float) -> None:
    assert earned(PUBLISHED, THOUGHT.format(answer)) == pytest.approx(published)
    assert earned(FIXED, THOUGHT.format(answer)) == pytest.approx(fixed)


@pytest.mark.parametrize(
    ("answer", "iou", "confidence"),
    [
        ("[{'position': [100, 200, 400, 600], 'Prob': '0.75'}, {'no Position, Confidence': 1}]", 0.5, 0.875),
        ("[{'Position': null, 'bbox': [100, 200, 400, 600], 'Confidence': null, 'score': 0.5}]", 1.0, 0.5),
        ("[{'Position': [100, 200, 400, 600], 'Confidence': 'high'}]", 1.0, 0.0),
        ("[{'Confidence': 0.25}, 'Position']", 0.0, 0.75),  # both are at 0, 0, 0, 0: the first one counts
        ("[{'Position': [100, 200, 400], 'Confidence': 0.25}]", 0.0, 0.75),
        ("[{'Position': ['100', 200, 400, 600], 'Confidence': 0.25}]", 0.0, 0.75),
        (RIGHT.replace("100", "1e200"), 0.0, 0.1),
        (RIGHT.replace("100", "-" + "9" * 400), 0.0, 0.1),
    ],
)
def test_other_names_count_and_what_is_missing_is_zero(answer: str, iou: float, confidence: float) -> None:
    parts = PUBLISHED(given(THOUGHT.format(answer)))
    assert (parts["iou"], parts["confidence"]) == (iou, pytest.approx(confidence)) and parts["format"] == 1


def test_what_has_no_published_score_is_0() -> None:
    for answer in (RIGHT.replace("0.9", "NaN"), RIGHT.replace("100", "1" * 5000), RIGHT + " " * 100_000,
                   "[{'Position': [100, 200, 400, 600], 'Confidence': 1}, 5]",
                   RIGHT.replace("100", "-1.5").replace("400", "9" * 400)):  # fmt: skip
        parts = PUBLISHED(given(THOUGHT.format(answer)))
        assert (parts["confidence"], parts["format"]) == (0.0, 1.0)
    assert PUBLISHED(given(THOUGHT.format(RIGHT), []))["iou"] == 0.0


def test_a_truth_in_pixels_is_rounded_to_thousandths() -> None:
    # 63 of 640 pixels are 98.4 thousandths, 97 of 480 are 202.1
    answer = "[{'Position': [98, 202, 400, 600], 'Confidence': 1}]"
    assert PUBLISHED(given(THOUGHT.format(answer), [[63, 97, 256, 288]], "pixels"))["iou"] == 1.0


def test_long_hostile_responses_are_scored_at_once() -> None:
    for piece in ("<answer>", "<think></think><answer>", "</think>", "</think> ", "{'Position':[", "},"):
        assert PUBLISHED(given(f"<think>{piece * 40_000}"))["iou"] == 0.0
