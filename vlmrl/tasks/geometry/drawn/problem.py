"""Problem with one exact answer, and the numbers and words that problems are made of."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from vlmrl.tasks.geometry.drawn.sketch import Point, Sketch, turned

LETTERS = ("ABC", "DEF", "PQR", "KLM", "XYZ", "RST")
DEGREE = "\u00b0"


@dataclass(frozen=True)
class Problem:
    """Question about a figure.

    Args:
        kind: which problem of the collection.
        numbers: what distinguishes it from others of its kind, whatever its letters and its position.
        sketch: the figure.
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
