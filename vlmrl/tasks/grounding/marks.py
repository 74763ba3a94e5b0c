"""Boxes of the task grounding over its images, of a saved score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vlmrl.rewards.boxes.planes import plane_of
from vlmrl.tasks.boxes.marks import true_marks
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.grounding.published import NAME as PUBLISHED
from vlmrl.tasks.grounding.truth import true_box, truth_problems
from vlmrl.tasks.overlay import Mark, shares_of


def saved_marks(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true box of a row, and the boxes that rewards read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`. The published reward states its box in 0 to 1000, `box_iou` in pixels.
    """
    if truth_problems(truth):
        return ()
    plane, box = true_box(truth)
    marks = true_marks([box], plane)
    for name, value in (detail or {}).items():
        answer_plane = plane_of("thousand" if name == PUBLISHED else "pixels", size_of(truth))
        numbers = value.get("box") if isinstance(value, Mapping) else None
        answer = shares_of(numbers, answer_plane)
        marks += [Mark("answer", answer)] if answer is not None else []
    return marks
