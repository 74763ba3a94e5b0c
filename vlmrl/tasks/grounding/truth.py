"""Truth of the task grounding: a box, the coordinate plane of its numbers, and the size of the image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.boxes.planes import Box, Plane, Space, check_space, plane_of
from vlmrl.types import Size

TRUTH_SPACES: tuple[Space, ...] = ("pixels", "thousand", "unit")
"""Spaces in which a true box may be given; the others depend on a model."""
MOST_PIXELS = 1_000_000


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    try:
        plane, box = true_box(truth)
    except RewardError as error:
        return [error.message]
    inside = 0 <= box.x1 < box.x2 <= plane.width and 0 <= box.y1 < box.y2 <= plane.height
    return [] if inside else [f"`box` is {list(box)}, no box within {plane.width:g} x {plane.height:g}"]


def true_box(truth: Mapping[str, Any]) -> tuple[Plane, Box]:
    """Return the plane of a row's truth, and its box in this plane.

    Raises: RewardError for a row without them, or with a box that has no area.
    """
    numbers, size = truth.get("box"), size_of(truth)
    space = check_space(str(truth.get("space")))
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 4 or not all(map(_is_number, numbers)):
        raise RewardError(f"the row's `box` is {numbers!r:.60}, not four numbers")
    box = Box(*(float(number) for number in numbers))
    if space not in TRUTH_SPACES:
        raise RewardError(f"the row's box is in the space `{space}`", hint=f"one of: {', '.join(TRUTH_SPACES)}")
    if not (box.x1 < box.x2 and box.y1 < box.y2):
        raise RewardError(f"the row's `box` is {list(numbers)}, which has no area")
    return plane_of(space, size), box


def size_of(truth: Mapping[str, Any]) -> Size:
    """Return the size of a row's image in pixels. Raises: RewardError for a row without it."""
    width, height = truth.get("width"), truth.get("height")
    if type(width) is not int or type(height) is not int or not (0 < width < MOST_PIXELS and 0 < height < MOST_PIXELS):
        raise RewardError(f"the row's `width` and `height` are {width!r:.40} and {height!r:.40}, not pixels")
    return width, height


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST_PIXELS
