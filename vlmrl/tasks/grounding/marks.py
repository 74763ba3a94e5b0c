"""Boxes of the task grounding over its images: of a response in any coordinate space, and of a saved score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import SPACES, Box, Plane, Space, check_space, convert, plane_of
from vlmrl.tasks.grounding.published import NAME as PUBLISHED
from vlmrl.tasks.grounding.reward import Settings, read_answer
from vlmrl.tasks.grounding.truth import size_of, true_box, truth_problems
from vlmrl.tasks.overlay import SHARES, Mark, Positions, shares_of
from vlmrl.types import RewardInput


def settings_as(settings: Settings, spec: RewardSpec | None) -> Settings:
    """Return the settings by which a reward reads a box: its own if it is `box_iou`, else those of the task."""
    args = spec.args if spec is not None and spec.name == "box_iou" else {}
    space, order, place = (str(args.get(name, getattr(settings, name))) for name in ("space", "order", "place"))
    return replace(settings, space=space, order=order, place=place)


def positions_as(settings: Settings, spec: RewardSpec | None) -> Positions:
    """Return the reading of boxes as a reward does it."""
    settings = settings_as(settings, spec)
    return Positions(check_space(settings.space), SPACES, partial(response_marks, settings))


def response_marks(settings: Settings, x: RewardInput, space: Space) -> Sequence[Mark]:
    """Return the true box, and the box of a response, read in a space. Raises: RewardError without a true box."""
    seen = x.seen_sizes or (size_of(x.truth),)
    answer = read_answer(replace(x, seen_sizes=seen), replace(settings, space=space))
    truth = Mark("truth", convert(answer.truth, answer.plane, SHARES))
    return [truth, *([Mark("answer", convert(answer.box, answer.plane, SHARES))] if answer.box is not None else [])]


def saved_marks(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true box of a row, and the boxes that rewards read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`. The published reward states its box in 0 to 1000, `box_iou` in pixels.
    """
    if truth_problems(truth):
        return ()
    plane, box = true_box(truth)
    marks = [Mark("truth", convert(box, plane, SHARES))]
    for name, value in (detail or {}).items():
        answer_plane: Plane = plane_of("thousand" if name == PUBLISHED else "pixels", size_of(truth))
        numbers = value.get("box") if isinstance(value, Mapping) else None
        answer: Box | None = shares_of(numbers, answer_plane)
        marks += [Mark("answer", answer)] if answer is not None else []
    return marks
