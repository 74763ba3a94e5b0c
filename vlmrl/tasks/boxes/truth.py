"""True boxes of a row: the coordinate plane of their numbers, and the size of the image."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.boxes.planes import Box, Plane, Space, check_space, plane_of
from vlmrl.types import Size

TRUTH_SPACES: tuple[Space, ...] = ("pixels", "thousand", "unit")
"""Spaces in which a true box may be given; the others depend on a model."""
MOST_PIXELS = 1_000_000


def size_of(truth: Mapping[str, Any]) -> Size:
    """Return the size of a row's image in pixels. Raises: RewardError for a row without it."""
    width, height = truth.get("width"), truth.get("height")
    if type(width) is not int or type(height) is not int or not (0 < width < MOST_PIXELS and 0 < height < MOST_PIXELS):
        raise RewardError(f"the row's `width` and `height` are {quoted(width)} and {quoted(height)}, not pixels")
    return width, height


def truth_plane(truth: Mapping[str, Any]) -> Plane:
    """Return the plane of a row's truth. Raises: RewardError for a row without `space`, `width` and `height`."""
    size, space = size_of(truth), check_space(str(truth.get("space")))
    if space not in TRUTH_SPACES:
        raise RewardError(f"the row's boxes are in the space `{space}`", hint=f"one of: {', '.join(TRUTH_SPACES)}")
    return plane_of(space, size)


def true_box(numbers: Any) -> Box:
    """Return a box of a truth. Raises: RewardError unless it is four numbers, with an area."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) != 4 or not all(map(_is_number, numbers)):
        raise RewardError(f"the row's `box` is {quoted(numbers, 60)}, not four numbers")
    box = Box(*(float(number) for number in numbers))
    if not (box.x1 < box.x2 and box.y1 < box.y2):
        raise RewardError(f"the row's `box` is {list(numbers)}, which has no area")
    return box


def outside_problems(name: str, boxes: Iterable[Box], plane: Plane) -> list[str]:
    """Return a problem, in words, for each box that reaches beyond the image. `name`: the field of the truth."""
    return [
        f"`{name}` has {list(box)}, no box within {plane.width:g} x {plane.height:g}"
        for box in boxes
        if not (box.x1 >= 0 and box.y1 >= 0 and box.x2 <= plane.width and box.y2 <= plane.height)
    ]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < MOST_PIXELS
