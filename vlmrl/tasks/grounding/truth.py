"""Truth of the task grounding: a box, the coordinate plane of its numbers, and the size of the image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.boxes.planes import Box, Plane
from vlmrl.tasks.boxes import truth as boxes
from vlmrl.tasks.boxes.doubts import space_doubts
from vlmrl.types import Size


def make_truth(box: list[float], space: str, size: Size, asks: str | None = None) -> dict[str, Any]:
    """Return the truth of a row. `asks`: kind of the expression of a drawn row."""
    return {"box": box, "space": space, "width": size[0], "height": size[1], "asks": asks}


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    try:
        plane, box = true_box(truth)
    except RewardError as error:
        return [error.message]
    return boxes.outside_problems("box", [box], plane)


def notes_on(truths: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return a note for the data doctor if the boxes look as if they were in another space; else {}."""
    read = [(true_box(truth), boxes.size_of(truth)) for truth in truths]
    return space_doubts([(plane, size, box) for (plane, box), size in read])


def true_box(truth: Mapping[str, Any]) -> tuple[Plane, Box]:
    """Return the plane of a row's truth, and its box in this plane.

    Raises: RewardError for a row without them, or with a box that has no area.
    """
    return boxes.truth_plane(truth), boxes.true_box(truth.get("box"))
