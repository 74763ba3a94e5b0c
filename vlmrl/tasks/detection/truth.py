"""Truth of the task detection: the boxes of all objects of a category, the plane of their numbers, the image's size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import quoted
from vlmrl.rewards.boxes.planes import Box, Plane
from vlmrl.tasks.boxes.doubts import space_doubts
from vlmrl.tasks.boxes.truth import outside_problems, size_of, true_box, truth_plane

MOST_TRUE_BOXES = 300
MOST_CATEGORY_CHARS = 100


def make_truth(boxes: list[list[float]], space: str, width: int, height: int, category: str) -> dict[str, Any]:
    """Return the truth of a row. Evaluations also give the accuracy for each `category` and each `count` of objects."""
    return {
        "boxes": boxes,
        "space": space,
        "width": width,
        "height": height,
        "category": category,
        "count": len(boxes),
    }


def truth_problems(truth: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a truth, in words."""
    try:
        plane, boxes = true_boxes(truth)
    except RewardError as error:
        return [error.message]
    problems = outside_problems("boxes", boxes, plane)
    category = truth.get("category")
    if not isinstance(category, str) or not 0 < len(category) <= MOST_CATEGORY_CHARS:
        problems.append(f"`category` is {quoted(category, 60)}, not a text of 1 to {MOST_CATEGORY_CHARS} characters")
    return problems


def notes_on(truths: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return a note for the data doctor if the boxes look as if they were in another space; else {}."""
    read = [(true_boxes(truth), size_of(truth)) for truth in truths]
    return space_doubts([(plane, size, box) for (plane, boxes), size in read for box in boxes])


def true_boxes(truth: Mapping[str, Any]) -> tuple[Plane, tuple[Box, ...]]:
    """Return the plane of a row's truth, and its boxes in this plane; no box = the image shows no such object.

    Raises: RewardError for a row without them, or with a box that has no area.
    """
    plane, boxes = truth_plane(truth), truth.get("boxes")
    if not isinstance(boxes, (list, tuple)) or len(boxes) > MOST_TRUE_BOXES:
        raise RewardError(f"the row's `boxes` are {quoted(boxes, 60)}, not a list of at most {MOST_TRUE_BOXES} boxes")
    return plane, tuple(map(true_box, boxes))
