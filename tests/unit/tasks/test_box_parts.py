"""Parts of all tasks that answer with boxes, by hand."""

from __future__ import annotations

from vlmrl.rewards.boxes.planes import Box, Plane
from vlmrl.tasks.perception.probe_responses import GRID, moved
from vlmrl.tasks.perception.reward import GroundingSettings
from vlmrl.tasks.perception.truth import BoxSettings, variant_of
from vlmrl.types import RewardInput


def test_the_numbers_of_a_box_stand_in_the_declared_order() -> None:
    box = Box(1, 2, 3, 5)
    orders = {order: tuple(BoxSettings("unit", order).ordered(box)) for order in ("xyxy", "yxyx", "xywh")}
    assert orders == {"xyxy": (1, 2, 3, 5), "yxyx": (2, 1, 5, 3), "xywh": (1, 2, 2, 3)}


def test_a_box_moves_to_the_side_with_more_room() -> None:
    assert moved(Box(0, 1, 10, 2), 100, 0.5) == (5, 1, 15, 2)
    assert moved(Box(80, 1, 100, 2), 100, 0.5) == (70, 1, 90, 2)


def test_the_grid_covers_the_image_once() -> None:
    assert len(GRID) == 144 and {round(12 * box.x1) for box in GRID} == set(range(12))
    assert abs(sum((box.x2 - box.x1) * (box.y2 - box.y1) for box in GRID) - 1) < 1e-9


def test_a_variant_is_a_space_and_says_whether_a_thought_is_needed() -> None:
    assert variant_of(None) == ("thousand", "thousand", "required", "think.jinja")
    assert variant_of("seen_direct") == ("seen_direct", "seen", "optional", "direct.jinja")
    assert variant_of("unit_direct").args == {"space": "unit", "thought": "optional"}


def test_responses_in_the_form_of_the_settings() -> None:
    assert BoxSettings("unit").form("a", thought="b") == "<think>b</think><answer>a</answer>"
    assert BoxSettings("unit", thought="optional").form("a") == "<answer>a</answer>"
    assert GroundingSettings("unit", place="response").form("a") == "<think>I look.</think>a"


def test_an_image_of_unknown_seen_size_counts_as_not_resized() -> None:
    truth = {"width": 640, "height": 480}
    assert BoxSettings("seen").plane(RewardInput("", truth)) == Plane("seen", 640, 480)
    assert BoxSettings("seen").plane(RewardInput("", truth, seen_sizes=((320, 240),))) == Plane("seen", 320, 240)
