"""Problem with one exact answer, and the parts of its figure: points, lines, circles, marks and labels."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

Point = tuple[float, float]
"""(x, y), in the units of the problem; y goes up."""
SHADE = 205
"""Usual grey value of shaded areas."""


@dataclass(frozen=True)
class LengthLabel:
    """Text beside the middle of a line from `a` to `b`, on the side that is away from `away` if possible."""

    a: Point
    b: Point
    text: str
    away: Point | None = None


@dataclass(frozen=True)
class AngleLabel:
    """Text between two rays, from the direction `start` over `size` degrees, counterclockwise."""

    at: Point
    start: float
    size: float
    text: str


@dataclass(frozen=True)
class PointLabel:
    """Name of a point, on the side that is away from `away`."""

    at: Point
    text: str
    away: Point | None = None


@dataclass(frozen=True)
class Arc:
    """Arc that marks an angle. `radius` is in widths of a digit of a label; see `AngleLabel` for the directions."""

    at: Point
    start: float
    size: float
    radius: float = 2.0


@dataclass
class Sketch:
    """Figure of a problem.

    Args:
        values: whether labels with values are printed.
        dashed: helper lines, such as a height.
        circles: (centre, radius).
        sectors: (centre, radius, start in degrees, size in degrees), outlined arcs of circles.
        filled: shaded outlines.
        shade: grey value of what is shaded, between 0 (black) and 255.
        holes: circles (centre, radius) that are cut out of the shaded outlines.
        dots: points printed as dots.
        squares: right angles: (vertex, point on one ray, point on the other ray).
        ticks: (a, b, number of strokes): lines with the same number are equally long.
        arrows: (a, b, number of heads): lines with the same number are parallel.
    """

    values: bool = True
    shade: int = SHADE
    lines: list[tuple[Point, Point]] = field(default_factory=list)
    dashed: list[tuple[Point, Point]] = field(default_factory=list)
    circles: list[tuple[Point, float]] = field(default_factory=list)
    sectors: list[tuple[Point, float, float, float]] = field(default_factory=list)
    filled: list[list[Point]] = field(default_factory=list)
    holes: list[tuple[Point, float]] = field(default_factory=list)
    dots: list[Point] = field(default_factory=list)
    squares: list[tuple[Point, Point, Point]] = field(default_factory=list)
    ticks: list[tuple[Point, Point, int]] = field(default_factory=list)
    arrows: list[tuple[Point, Point, int]] = field(default_factory=list)
    arcs: list[Arc] = field(default_factory=list)
    names: list[PointLabel] = field(default_factory=list)
    lengths: list[LengthLabel] = field(default_factory=list)
    angles: list[AngleLabel] = field(default_factory=list)

    def polygon(self, points: Sequence[Point], names: str = "") -> None:
        """Add a closed outline, and the names of its corners, outside of it."""
        self.lines += list(zip(points, [*points[1:], points[0]], strict=True))
        self.names_at(points[: len(names)], names, away=centre_of(points))

    def names_at(self, points: Sequence[Point], names: Sequence[str], *, away: Point) -> None:
        """Add the names of points."""
        self.names += [PointLabel(at, text, away) for at, text in zip(points, names, strict=True)]

    def name(self, at: Point, text: str, *, away: Point | None = None) -> None:
        """Add the name of a point."""
        self.names.append(PointLabel(at, text, away))

    def length(self, a: Point, b: Point, text: str, *, away: Point | None = None) -> None:
        """Add the length of a line, where values are printed."""
        if self.values:
            self.lengths.append(LengthLabel(a, b, text, away))

    def angle(self, at: Point, a: Point, b: Point, text: str = "", *, radius: float = 2.0) -> None:
        """Add the mark of the angle `a at b` (less than 180 degrees), and its size where values are printed."""
        first, second = direction(at, a), direction(at, b)
        size = (second - first) % 360
        start, size = (first, size) if size <= 180 else (second, 360 - size)
        if self.values or not text:
            self.arcs.append(Arc(at, start, size, radius))
        if text and self.values:
            self.angles.append(AngleLabel(at, start, size, text))


def direction(a: Point, b: Point) -> float:
    """Return the direction from `a` to `b` in degrees, in [0, 360)."""
    return math.degrees(math.atan2(b[1] - a[1], b[0] - a[0])) % 360


def distance(a: Point, b: Point) -> float:
    return math.hypot(b[0] - a[0], b[1] - a[1])


def towards(a: Point, degrees: float, length: float) -> Point:
    """Return the point at a distance from `a` in a direction."""
    angle = math.radians(degrees)
    return a[0] + length * math.cos(angle), a[1] + length * math.sin(angle)


def between(a: Point, b: Point, share: float = 0.5) -> Point:
    """Return the point on the way from `a` to `b`: 0 is `a`, 1 is `b`."""
    return a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1])


def centre_of(points: Sequence[Point]) -> Point:
    """Return the mean of points."""
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def turned(points: Sequence[Point], degrees: float, mirrored: bool = False) -> list[Point]:
    """Return points turned about (0, 0), after a reflection in the y axis if `mirrored`."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    flipped = [(-x if mirrored else x, y) for x, y in points]
    return [(cos * x - sin * y, sin * x + cos * y) for x, y in flipped]


def triangle_of_angles(first: float, second: float, base: float = 10.0) -> list[Point]:
    """Return the corners of a triangle: the base from (0, 0) to (base, 0), with these angles at its ends in degrees."""
    third = math.radians(180 - first - second)
    side = base * math.sin(math.radians(second)) / math.sin(third)
    return [(0.0, 0.0), (base, 0.0), towards((0.0, 0.0), first, side)]


LETTERS = ("ABC", "DEF", "PQR", "KLM", "XYZ", "RST")
DEGREE = "\u00b0"


@dataclass(frozen=True)
class Problem:
    """Question about a figure.

    Args:
        kind: which problem of the collection.
        numbers: what distinguishes it from others of its kind, whatever its letters and its position.
        short: question where the figure shows the values.
        full: question that states the values.
        steps: the way to the answer, in sentences; empty where the answer is only counted.
        answer: in LaTeX, without a unit.
    """

    kind: str
    numbers: tuple[int, ...]
    sketch: Sketch
    short: str
    full: str
    steps: str
    answer: str


@dataclass(frozen=True)
class Surd:
    """Exact number `factor * sqrt(root)`; the root has no square factor.

    Example: Surd.of_square(48) is 4 sqrt(3).
    """

    factor: Fraction
    root: int = 1

    @classmethod
    def of_square(cls, square: int) -> Surd:
        """Return the square root of a positive integer."""
        factor = max(n for n in range(1, math.isqrt(square) + 1) if square % (n * n) == 0)
        return cls(Fraction(factor), square // factor**2)

    @property
    def value(self) -> float:
        return float(self.factor) * math.sqrt(self.root)

    @property
    def latex(self) -> str:
        return product(self.factor, f"\\sqrt{{{self.root}}}" if self.root > 1 else "")


def product(factor: Fraction | int, sign: str = "") -> str:
    r"""Return a factor before a sign in LaTeX.

    Example: (3, "\pi") -> 3\pi; (1, "\pi") -> \pi; (Fraction(9, 2), "") -> \frac{9}{2}.
    """
    factor = Fraction(factor)
    if factor == 1 and sign:
        return sign
    if factor.denominator == 1:
        return f"{factor.numerator}{sign}"
    return f"\\frac{{{factor.numerator}{sign}}}{{{factor.denominator}}}"


def numbers(rng: random.Random, *ranges: tuple[int, int], fit: Callable[[Sequence[int]], bool]) -> list[int]:
    """Return a whole number of each range, its ends included: the first ones that fit together."""
    while not fit(chosen := [rng.randint(*ends) for ends in ranges]):
        pass
    return chosen


def letters(rng: random.Random) -> str:
    """Return the names of three corners."""
    return rng.choice(LETTERS)


def angle_name(a: str, b: str, c: str) -> str:
    """Return an angle in LaTeX, with its vertex in the middle."""
    return f"$\\angle {a}{b}{c}$"


def posed(rng: random.Random, points: Sequence[Point], *, upright: bool = False) -> list[Point]:
    """Return points mirrored or not, and turned.

    Args:
        upright: turned by 0 or 90 degrees; else not, or by 7 to 25 degrees, or upside down.
    """
    tilt = rng.choice((-1, 0, 1)) * rng.uniform(7, 25)  # a tilt of a few degrees would look like a mistake
    degrees = rng.choice((0, 90)) if upright else rng.choice((0, 0, 180)) + tilt
    return turned(points, degrees, rng.random() < 0.5)
