"""Places of a figure's labels: no label touches a line, another label or the edge of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.geometry.drawn.sketch import AngleLabel, Point

GAP = 0.18
"""Least distance of a label to any line or other label, besides the width of a line; in heights of the font."""
TURNS = (0, 12, -12, 25, -25, 40, -40, 58, -58, 80, -80, 105, -105, 130, -130)
"""Directions that are tried for a point's name, in degrees from the one away from the figure."""


class NoRoomError(DataError):
    """Error: a label has no free place; the problem is drawn again with other numbers."""


@dataclass(frozen=True)
class PlacedLabel:
    """Text with the rectangle that its ink fills, in pixels; y goes down."""

    text: str
    left: float
    top: float
    width: float
    height: float


class Ink:
    """Ink on a page: points along every line, and the rectangles of labels."""

    def __init__(self, width: float, height: float, gap: float) -> None:
        self.width, self.height, self.gap = width, height, gap
        self._lines: list[Any] = []
        self._points: Any = None
        self._taken: list[PlacedLabel] = []

    def add_path(self, points: Sequence[Point]) -> None:
        """Add a path of straight lines, in pixels."""
        import numpy as np

        for a, b in pairwise(points):
            count = max(2, int(math.dist(a, b)) + 2)
            self._lines.append(np.linspace(a, b, count))
        self._points = None

    def is_free(self, label: PlacedLabel) -> bool:
        """Return whether a label and the gap around it are on the page and touch nothing."""
        import numpy as np

        if self._points is None:
            self._points = np.concatenate(self._lines) if self._lines else np.zeros((0, 2))
        left, top = label.left - self.gap, label.top - self.gap
        right, bottom = label.left + label.width + self.gap, label.top + label.height + self.gap
        if left < 0 or top < 0 or right > self.width or bottom > self.height:
            return False
        x, y = self._points[:, 0], self._points[:, 1]
        if bool(((x > left) & (x < right) & (y > top) & (y < bottom)).any()):
            return False
        return not any(
            left < other.left + other.width + self.gap
            and right > other.left - self.gap
            and top < other.top + other.height + self.gap
            and bottom > other.top - self.gap
            for other in self._taken
        )

    def take(self, label: PlacedLabel) -> None:
        self._taken.append(label)


def place(text: str, size: tuple[float, float], centres: Iterable[Point], ink: Ink) -> PlacedLabel:
    """Return the label at the first centre that is free, and take that place. Raises: NoRoomError."""
    width, height = size
    for x, y in centres:
        label = PlacedLabel(text, x - width / 2, y - height / 2, width, height)
        if ink.is_free(label):
            ink.take(label)
            return label
    raise NoRoomError(f"the label {text} has no free place in the figure")


def point_centres(at: Point, away: Point | None, size: tuple[float, float], em: float) -> Iterator[Point]:
    """Yield centres for the name of a point, the nearest to the point and to the direction away from the figure first.

    Args:
        at, away: in pixels.
        size: of the text, in pixels.
        em: height of the font, in pixels.
    """
    start = math.atan2(at[1] - away[1], at[0] - away[0]) if away and away != at else -math.pi / 2
    for extra in (0.28, 0.45, 0.65):
        for turn in TURNS:
            yield _beside(at, start + math.radians(turn), size, extra * em)


def length_centres(a: Point, b: Point, away: Point | None, size: tuple[float, float], em: float) -> Iterator[Point]:
    """Yield centres for the length of a line, in pixels: beside its middle, outside of the figure first."""
    normal = math.atan2(b[1] - a[1], b[0] - a[0]) + math.pi / 2
    middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
    if away is not None and math.cos(normal) * (middle[0] - away[0]) + math.sin(normal) * (middle[1] - away[1]) < 0:
        normal += math.pi
    for side in (normal, normal + math.pi):
        for extra in (0.34, 0.5):
            for share in (0.5, 0.44, 0.56, 0.38, 0.62):
                at = (a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]))
                yield _beside(at, side, size, extra * em)


def angle_centres(label: AngleLabel, at: Point, arc: float, size: tuple[float, float], em: float) -> Iterator[Point]:
    """Yield centres for the size of an angle, in pixels: behind its arc, near the middle of the angle.

    Args:
        arc: radius of the arc, in pixels.
    """
    middle = label.start + label.size / 2
    for step in range(12):
        for turn in (0, 0.12, -0.12, 0.24, -0.24):
            towards = -math.radians(middle + turn * label.size)
            yield _beside(at, towards, size, arc + (0.2 + 0.22 * step) * em)


def _beside(at: Point, angle: float, size: tuple[float, float], gap: float) -> Point:
    """Return the centre of a rectangle of this size whose edge is `gap` away from a point, in a direction."""
    cos, sin = math.cos(angle), math.sin(angle)
    reach = min(
        size[0] / 2 / abs(cos) if abs(cos) > 1e-9 else math.inf, size[1] / 2 / abs(sin) if abs(sin) > 1e-9 else math.inf
    )
    return at[0] + cos * (gap + reach), at[1] + sin * (gap + reach)
