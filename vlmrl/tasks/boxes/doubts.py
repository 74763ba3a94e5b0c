"""True boxes that fit the declared space and still look as if they were in another one.

Each row alone is possible: [0.1, 0.2, 0.5, 0.6] is a box in pixels, too. All rows together are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmrl.rewards.boxes.planes import Box, Plane, Space
from vlmrl.types import Size

LEAST_UNIT, LEAST_OTHER = 4, 20
"""Least number of boxes from which they are doubted: boxes in units are plain, the others may be chance."""
NEAR = 0.9
"""Share of the image, or of 0 to 1000, that the outermost box must reach: then this edge is what bounds the boxes."""
CLEARLY_LARGER = 1.25
"""Least ratio of an image's side to 1000 (or the reverse) at which the two can be told apart."""


def space_doubts(boxes: Sequence[tuple[Plane, Size, Box]]) -> dict[str, tuple[Any, str]]:
    """Return a note for the data doctor on boxes whose space is probably another one than declared; else {}.

    Args:
        boxes: plane of the truth, size of the image in pixels, box; of all rows.
    """
    numbers = [(size, box) for plane, size, box in boxes if plane.space != "unit"]
    if not numbers:
        return {}
    space = boxes[0][0].space
    if len(numbers) >= LEAST_UNIT and all(max(box.x2, box.y2) <= 1 for _, box in numbers):
        return _note(space, "unit", f"all {len(numbers):,} boxes lie within 1 x 1")
    if space == "thousand":
        small = [(size, box) for size, box in numbers if max(size) * CLEARLY_LARGER <= 1000]
        within = all(box.x2 <= size[0] and box.y2 <= size[1] for size, box in small)
        reach = max((max(box.x2 / size[0], box.y2 / size[1]) for size, box in small), default=0.0)
        if len(small) >= LEAST_OTHER and within and reach >= NEAR:
            return _note(space, "pixels", f"no box of {len(small):,} reaches beyond the width or height of its image")
    if space == "pixels":
        large = [(size, box) for size, box in numbers if min(size) >= 1000 * CLEARLY_LARGER]
        reach = max((max(box.x2, box.y2) for _, box in large), default=0.0)
        if len(large) >= LEAST_OTHER and 1000 * NEAR <= reach <= 1000:
            return _note(space, "thousand", f"no coordinate of {len(large):,} boxes in larger images is above 1000")
    return {}


def _note(declared: Space, probable: Space, finding: str) -> dict[str, tuple[Any, str]]:
    advice = f"declared: {declared}. Are they in the space {probable} (--truth-space {probable})?"
    return {"space of the boxes": ("bad", f"{finding}; {advice}")}
