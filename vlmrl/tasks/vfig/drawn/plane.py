"""Points and boxes of the plane in pixels, y downwards, and numbers as SVG code writes them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Point(NamedTuple):
    """Place in the plane, in pixels unless it is said otherwise."""

    x: float
    y: float


class Box(NamedTuple):
    """Box with sides parallel to the axes: left, top, right, bottom."""

    x1: float
    y1: float
    x2: float
    y2: float

    @property
    def width(self) -> float:
        return self.x2 - self.x1

    @property
    def height(self) -> float:
        return self.y2 - self.y1

    @property
    def centre(self) -> Point:
        return Point((self.x1 + self.x2) / 2, (self.y1 + self.y2) / 2)

    def grown(self, margin: float) -> Box:
        """Return the box with a margin on every side; a negative margin shrinks it."""
        return Box(self.x1 - margin, self.y1 - margin, self.x2 + margin, self.y2 + margin)

    def rounded(self) -> Box:
        return Box(*(round(side, 1) for side in self))

    def overlaps(self, other: Box) -> bool:
        """Return whether the boxes share an area; boxes that only touch do not."""
        return self.x1 < other.x2 and other.x1 < self.x2 and self.y1 < other.y2 and other.y1 < self.y2

    def contains(self, point: Point) -> bool:
        return self.x1 < point.x < self.x2 and self.y1 < point.y < self.y2

    def at(self, u: float, v: float) -> Point:
        """Return the point with these shares of width and height, to a tenth of a pixel."""
        return Point(round(self.x1 + u * self.width, 1), round(self.y1 + v * self.height, 1))


def box_of(points: Iterable[Point]) -> Box:
    """Return the smallest box around the points. Raises: ValueError without a point."""
    xs, ys = zip(*points, strict=True)
    return Box(min(xs), min(ys), max(xs), max(ys))


def hull(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the corners of the convex hull in order around it.

    Source: Andrew's monotone chain (1979).
    """
    ordered = sorted(set(points))

    def chain(sequence: Sequence[Point]) -> list[Point]:
        corners: list[Point] = []
        for point in sequence:
            while len(corners) > 1 and turn(corners[-2], corners[-1], point) <= 0:
                corners.pop()
            corners.append(point)
        return corners[:-1]

    return tuple(chain(ordered) + chain(ordered[::-1])) if len(ordered) > 1 else tuple(ordered)


def turn(a: Point, b: Point, c: Point) -> float:
    """Return twice the signed area of the triangle a, b, c, in square pixels."""
    return (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x)


def segments_cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Return whether the segments a-b and c-d cross at a point inside both."""
    return turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0


def leave(start: Point, towards: Point, outline: Sequence[Point]) -> Point:
    """Return where the ray from `start` through `towards` leaves the closed outline; `start` if it meets none of it."""
    dx, dy = towards.x - start.x, towards.y - start.y
    farthest = 0.0
    for a, b in zip(outline, (*outline[1:], outline[0]), strict=True):
        ex, ey = b.x - a.x, b.y - a.y
        determinant = dx * ey - dy * ex
        if determinant == 0:
            continue
        along_ray = ((a.x - start.x) * ey - (a.y - start.y) * ex) / determinant
        along_edge = ((a.x - start.x) * dy - (a.y - start.y) * dx) / determinant
        if 0 <= along_edge <= 1:
            farthest = max(farthest, along_ray)
    return Point(start.x + farthest * dx, start.y + farthest * dy)


def moved(start: Point, towards: Point, distance: float) -> Point:
    """Return the point at this distance in pixels from `start` towards another point."""
    length = math.dist(start, towards)
    if length == 0:
        return start
    return Point(
        start.x + (towards.x - start.x) * distance / length, start.y + (towards.y - start.y) * distance / length
    )


def number(value: float) -> str:
    """Return a number with at most one decimal, as SVG code writes it. Example: 3.04 -> 3; -0.02 -> 0; 2.55 -> 2.5."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


def numbers(points: Iterable[Point]) -> str:
    """Return points as SVG code writes them. Example: `1,2 3.5,4`."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)
