"""Boxes of the task detection over its images: of a response in any coordinate space, and of a saved score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.planes import SPACES, Space, check_space, convert
from vlmrl.tasks.detection.answer import Settings, read_answer
from vlmrl.tasks.detection.reward import NAME as REWARD
from vlmrl.tasks.detection.truth import true_boxes, truth_problems
from vlmrl.tasks.grounding.truth import size_of
from vlmrl.tasks.overlay import SHARES, Mark, Positions, shares_of
from vlmrl.types import RewardInput


def settings_as(settings: Settings, spec: RewardSpec | None) -> Settings:
    """Return the settings by which a reward reads boxes: its own if it is `box_list`, else those of the task."""
    args = spec.args if spec is not None and spec.name == REWARD else {}
    return replace(settings, **{key: str(args[key]) for key in ("space", "order") if key in args})


def positions_as(settings: Settings, spec: RewardSpec | None) -> Positions:
    """Return the reading of boxes as a reward does it."""
    settings = settings_as(settings, spec)
    return Positions(check_space(settings.space), SPACES, partial(response_marks, settings))


def response_marks(settings: Settings, x: RewardInput, space: Space) -> Sequence[Mark]:
    """Return the true boxes, and those of a response, read in a space; labels are the confidences.

    Raises: RewardError for a row without true boxes.
    """
    seen = x.seen_sizes or (size_of(x.truth),)
    answer = read_answer(replace(x, seen_sizes=seen), replace(settings, space=space))
    truths = [Mark("truth", convert(box, answer.plane, SHARES)) for box in answer.truths]
    stated = [
        Mark("answer", convert(one.box, answer.plane, SHARES), f"{one.confidence:.2f}") for one in answer.detections
    ]
    return [*truths, *stated]


def saved_marks(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    """Return the true boxes of a row, and those that `box_list` read from a response; none for a damaged truth.

    Args:
        detail: `Score.detail`; its boxes are in the plane of the truth.
    """
    if truth_problems(truth):
        return ()
    plane, boxes = true_boxes(truth)
    marks = [Mark("truth", convert(box, plane, SHARES)) for box in boxes]
    saved = (detail or {}).get(REWARD)
    lists = [saved.get(name) for name in ("boxes", "confidences")] if isinstance(saved, Mapping) else [None, None]
    if not all(isinstance(one, (list, tuple)) for one in lists):
        return marks
    for numbers, confidence in zip(*lists, strict=False):
        box = shares_of(numbers, plane)
        label = f"{confidence:.2f}" if isinstance(confidence, (int, float)) else ""
        marks += [Mark("answer", box, label)] if box is not None else []
    return marks
