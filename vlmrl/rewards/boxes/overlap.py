"""Overlap of boxes, and the best assignment of one set of boxes to another.

Boxes must be finite and have x1 <= x2 and y1 <= y2, as `read_boxes` returns them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vlmrl.rewards.boxes.planes import Box, Point


def area(box: Box) -> float:
    return (box.x2 - box.x1) * (box.y2 - box.y1)


def shared_area(one: Box, other: Box) -> float:
    """Return the area that two boxes share; 0 if they only touch."""
    width = min(one.x2, other.x2) - max(one.x1, other.x1)
    height = min(one.y2, other.y2) - max(one.y1, other.y1)
    return width * height if width > 0 and height > 0 else 0.0


def iou(one: Box, other: Box) -> float:
    """Return intersection over union, in [0, 1]; 0 for two boxes without area.

    Example: (0, 0, 2, 2) and (1, 0, 3, 2) share 2 of 6 -> 1/3.
    """
    shared = shared_area(one, other)
    union = area(one) + area(other) - shared
    return min(1.0, shared / union) if union > 0 else 0.0


def centre(box: Box) -> Point:
    return Point((box.x1 + box.x2) / 2, (box.y1 + box.y2) / 2)


def is_inside(point: Point, box: Box) -> bool:
    """Return whether a point is in a box, the edges included."""
    return box.x1 <= point.x <= box.x2 and box.y1 <= point.y <= box.y2


class Match(NamedTuple):
    """Pair of an answered box and a true box, by their positions, with their IoU."""

    answer: int
    truth: int
    iou: float


def match_boxes(answers: Sequence[Box], truths: Sequence[Box], least: float = 0.0) -> list[Match]:
    """Return the assignment of answers to truths with the largest sum of IoU; no box is used twice.

    Args:
        least: pairs of an IoU below this do not count, and neither do pairs without overlap.
    Returns: the pairs in the order of the answers.
    Source: Hungarian algorithm, as scipy.optimize.linear_sum_assignment computes it.
    """
    if not answers or not truths:
        return []
    import numpy as np
    from scipy.optimize import linear_sum_assignment

    overlaps = np.array([[iou(answer, truth) for truth in truths] for answer in answers])
    overlaps[overlaps < max(least, 0.0)] = 0.0  # else a pair below the limit could take a box from one above it
    rows, columns = linear_sum_assignment(overlaps, maximize=True)
    pairs = [Match(int(i), int(j), float(overlaps[i, j])) for i, j in zip(rows, columns, strict=True)]
    return [pair for pair in pairs if pair.iou > 0]
