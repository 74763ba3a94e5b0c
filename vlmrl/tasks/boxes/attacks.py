"""Kind of rows with true boxes, and boxes for the tricks against their rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlmrl.data.dataset_visit import RowLabels
from vlmrl.rewards.boxes.planes import Box
from vlmrl.tasks.attack import Play, Stage
from vlmrl.tasks.overlay import Mark
from vlmrl.tasks.truth_kinds import RowKind, Truth
from vlmrl.types import Row

GUESSES: Mapping[str, Box] = {
    "the whole image": Box(0, 0, 1, 1),
    "the middle": Box(0.25, 0.25, 0.75, 0.75),
    "the left half": Box(0, 0, 0.5, 1),
    "the upper half": Box(0, 0, 1, 0.5),
}
"""Name -> box as shares of the image."""
_STEPS = [number / 12 for number in range(12)]
GRID = tuple(Box(left, top, left + 1 / 12, top + 1 / 12) for top in _STEPS for left in _STEPS)
"""Boxes that cover the image, as shares of it."""
FAR = 0.02
"""Width of a wrong box, as a share of the image: it lies where no true box is."""
BROKEN: Mapping[str, Callable[[Sequence[float]], Any]] = {
    "no area": lambda box: [box[0], box[1], box[0], box[3]],
    "a text": str,
    "three numbers": lambda box: box[:3],
}
"""Name -> function that changes a true box into one that no reward should score."""
Marks = Callable[[Truth, Mapping[str, Any] | None], Sequence[Mark]]


def box_kind(field: str, play: Callable[[Stage], Play], marks: Marks) -> RowKind:
    """Return the kind of the rows whose truth has true boxes in this field; see `RowKind` for the other arguments."""
    return RowKind(partial(_has_boxes, field), play=play, labels=_labels, specificity=1, marks=marks)


def _has_boxes(field: str, truth: Truth) -> bool:
    return field in truth and "space" in truth


def _labels(row: Row) -> RowLabels:
    return RowLabels(None, None, "", ())


def moved(box: Box, width: float, share: float) -> Box:
    """Return a box, shifted by a share of its width to the side where an image of this width has more room."""
    move = share * (box.x2 - box.x1) * (1 if box.x1 + box.x2 < width else -1)
    return Box(box.x1 + move, box.y1, box.x2 + move, box.y2)
