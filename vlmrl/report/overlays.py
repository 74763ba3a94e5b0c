"""Boxes of truth and answers over the images of a page, as SVG rectangles over a picture that the page already has.

The numbers of the rectangles are computed here; text of a model or a dataset is only ever escaped text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmrl.tasks import kind_of
from vlmrl.tasks.positions import Mark

if TYPE_CHECKING:
    from vlmrl.report.rollout_examples import Picture

MOST_BOXES = 60
"""Maximum number of boxes over one image."""


@dataclass(frozen=True)
class BoxView:
    """Rectangle over a picture, in its pixels. `role`: "truth" or "answer"."""

    role: str
    x: float
    y: float
    width: float
    height: float
    label: str


@dataclass(frozen=True)
class OverlayView:
    """Picture with boxes. `caption`: text below it."""

    picture: Picture
    boxes: Sequence[BoxView]
    caption: str = ""


def overlays_of(
    truth: Mapping[str, Any], detail: Mapping[str, Any] | None, num_images: int, picture_of: Callable[[int], Picture]
) -> list[OverlayView]:
    """Return the images of a row that have boxes, with the boxes of the truth and of an answer.

    Args:
        detail: values that rewards read from the answer (`Score.detail`).
        picture_of: number of an image -> its picture.
    Returns: [] if rows of this kind have no boxes.
    """
    return views_of(marks_of(truth, detail), num_images, picture_of)


def marks_of(truth: Mapping[str, Any], detail: Mapping[str, Any] | None) -> Sequence[Mark]:
    marks = kind_of(truth).marks
    return () if marks is None else marks(truth, detail)


def views_of(marks: Sequence[Mark], num_images: int, picture_of: Callable[[int], Picture]) -> list[OverlayView]:
    views = []
    for number in range(num_images):
        own = sorted((mark for mark in marks if mark.image == number), key=lambda mark: mark.role != "truth")
        if own:
            picture = picture_of(number)
            views.append(OverlayView(picture, [_box(mark, picture) for mark in own[:MOST_BOXES]]))
    return views


def _box(mark: Mark, picture: Picture) -> BoxView:
    x1, y1, x2, y2 = mark.box
    x, width = round(x1 * picture.width, 2), round((x2 - x1) * picture.width, 2)
    y, height = round(y1 * picture.height, 2), round((y2 - y1) * picture.height, 2)
    return BoxView(mark.role, x, y, width, height, mark.label)
