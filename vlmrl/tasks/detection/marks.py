"""Boxes of the task detection over its images, of a saved score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.tasks.boxes.marks import true_marks
from vlmrl.tasks.detection.reward import NAME as REWARD
from vlmrl.tasks.detection.truth import true_boxes, truth_problems
from vlmrl.tasks.overlay import Mark, shares_of


def saved_marks(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true boxes of a row, and those that `box_list` read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`; its boxes are in the plane of the truth.
    """
    if truth_problems(truth):
        return ()
    plane, boxes = true_boxes(truth)
    marks = true_marks(boxes, plane)
    saved = (detail or {}).get(REWARD)
    lists = [saved.get(name) for name in ("boxes", "confidences")] if isinstance(saved, Mapping) else [None, None]
    if not all(isinstance(one, (list, tuple)) for one in lists):
        return marks
    for numbers, confidence in zip(*lists, strict=False):
        box = shares_of(numbers, plane)
        label = f"{confidence:.2f}" if isinstance(confidence, (int, float)) else ""
        marks += [Mark("answer", box, label)] if box is not None else []
    return marks
