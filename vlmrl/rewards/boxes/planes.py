"""Coordinate planes: the numbers in which a model, or a dataset, states positions in an image; overlap of boxes.

The plane is declared, never found out from the numbers: [100, 100, 200, 200] is a box in each of them. Boxes of which
the overlap is asked, or the best assignment, must be finite and have x1 <= x2 and y1 <= y2, as `read_boxes` returns
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from vlmrl.errors import RewardError, unknown
from vlmrl.types import RewardInput, Size

Space = Literal["pixels", "seen", "thousand", "unit", "loc"]
SPACES: tuple[Space, ...] = get_args(Space)
MEANINGS: Mapping[Space, str] = {
    "pixels": "pixels of the image as it is stored",
    "seen": "pixels of the image as the model saw it, after the processor resized it",
    "thousand": "0 to 1000 in both directions",
    "unit": "0 to 1 in both directions",
    "loc": "tokens from <loc0000> to <loc1023>, in the order y1, x1, y2, x2",
}
"""Space -> its numbers, in words. The space of each model family is in setup/rows.py."""
LOC_BINS = 1024


class Box(NamedTuple):
    """Box: left, upper, right and lower edge, in the numbers of a plane. Pixel k reaches from k to k + 1."""

    x1: float
    y1: float
    x2: float
    y2: float


class Point(NamedTuple):
    """Point in the numbers of a plane."""

    x: float
    y: float


@dataclass(frozen=True, slots=True)
class Plane:
    """Coordinate plane of one image: its numbers reach from (0, 0) to (width, height).

    Args:
        width, height: > 0.
    """

    space: Space
    width: float
    height: float

    @property
    def whole(self) -> Box:
        """The box of the whole image."""
        return Box(0.0, 0.0, self.width, self.height)


def check_space(space: str) -> Space:
    """Return the space. Raises: RewardError with the nearest name for an unknown one."""
    if space not in SPACES:
        raise unknown("coordinate space", str(space), SPACES, error=RewardError)
    return space


def plane_of(space: Space, stored: Size, seen: Size | None = None) -> Plane:
    """Return the plane of an image.

    Args:
        stored: size of the image as stored, in pixels.
        seen: size of the image as the model saw it; None = unknown.
    Raises: RewardError for a size below 1, and for the space `seen` if that size is unknown.
    """
    if space == "seen" and seen is None:
        raise RewardError(
            "the size at which the model saw the image is unknown, and the space `seen` needs it",
            hint="score responses of a run or an evaluation, or declare another space: pixels, thousand, unit",
        )
    width, height = {"thousand": (1000, 1000), "unit": (1, 1), "loc": (LOC_BINS, LOC_BINS)}.get(
        space, seen if space == "seen" and seen is not None else stored
    )
    if min(width, height) < 1:
        raise RewardError(f"an image of {width} x {height} pixels has no coordinates")
    return Plane(space, float(width), float(height))


def answer_plane(x: RewardInput, space: Space, stored: Size, image: int = 0) -> Plane:
    """Return the plane of a response.

    Args:
        stored: size of the image for which the row's truth was made; used where the response has no reference to it.
        image: number of the image in the prompt.
    Raises: RewardError; see `plane_of`.
    """
    if len(x.media) > image:
        stored = (x.media[image].width, x.media[image].height)
    return plane_of(space, stored, x.seen_sizes[image] if len(x.seen_sizes) > image else None)


def convert(box: Box, source: Plane, target: Plane) -> Box:
    """Return a box of one plane in the numbers of another plane of the same image.

    Example: (0, 250, 500, 1000) of `thousand` is (0, 120, 320, 480) in an image of 640 x 480 pixels.
    """
    return Box(
        box.x1 * target.width / source.width,
        box.y1 * target.height / source.height,
        box.x2 * target.width / source.width,
        box.y2 * target.height / source.height,
    )


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
