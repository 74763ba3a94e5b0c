"""Boxes of truths and answers over images: of a response in any coordinate space, and of a saved score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from vlmrl.rewards.base import RewardSpec
from vlmrl.rewards.boxes.drawing import ANSWER_COLOUR, TRUTH_COLOUR, draw_boxes
from vlmrl.rewards.boxes.planes import Box, Plane, check_space, convert
from vlmrl.rewards.boxes.reading import Coordinates, check_order
from vlmrl.tasks.boxes.settings import S, settings_as
from vlmrl.tasks.boxes.truth import size_of
from vlmrl.tasks.overlay import SHARES, Mark
from vlmrl.tasks.positions import Positions
from vlmrl.types import RewardInput, RewardResult


class BoxAnswer(Protocol):
    """Boxes of a response, beside the true ones. All are in one plane."""

    @property
    def plane(self) -> Plane: ...
    @property
    def truths(self) -> Sequence[Box]: ...
    @property
    def stated(self) -> Sequence[tuple[Box, str]]:
        """Boxes of the response, each with a label; "" = none."""
        ...


Read = Callable[[RewardInput, S], BoxAnswer]
"""(Input of the reward, settings) -> the answer. Raises: RewardError for a row without true boxes."""


def positions_as(settings: S, reward: str, read: Read[S], spec: RewardSpec | None) -> Positions:
    """Return the reading of boxes as a reward does it; see `settings_as` for the arguments."""
    settings = settings_as(settings, reward, spec)
    declared = Coordinates(check_space(settings.space), check_order(settings.order))
    return Positions(declared, partial(response_marks, settings, read))


def response_marks(settings: S, read: Read[S], x: RewardInput, read_as: Coordinates) -> Sequence[Mark]:
    """Return the true boxes, and those of a response, read in these coordinates.

    Raises: RewardError without true boxes.
    """
    seen = x.seen_sizes or (size_of(x.truth),)
    answer = read(replace(x, seen_sizes=seen), replace(settings, space=read_as.space, order=read_as.order))
    stated = [Mark("answer", convert(box, answer.plane, SHARES), label) for box, label in answer.stated]
    return [*true_marks(answer.truths, answer.plane), *stated]


def true_marks(boxes: Iterable[Box], plane: Plane) -> list[Mark]:
    """Return the marks of true boxes in a plane."""
    return [Mark("truth", convert(box, plane, SHARES)) for box in boxes]


def with_picture(parts: Mapping[str, Any], x: RewardInput, answer: BoxAnswer) -> RewardResult:
    """Return the parts of a score, with the artifact `boxes` if the image is there: the image with all boxes."""
    if not x.images:
        return RewardResult(parts)
    shapes = [*((box, TRUTH_COLOUR) for box in answer.truths), *((box, ANSWER_COLOUR) for box, _ in answer.stated)]
    return RewardResult(parts, artifacts={"boxes": draw_boxes(x.images[0], answer.plane, shapes)})
