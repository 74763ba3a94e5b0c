"""Problems for the rows of a dataset, drawn or in text alone: the same for the same seed, and none in two splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from vlmrl.data.images import encode_png, image_hash
from vlmrl.data.parallel_parts import Progress
from vlmrl.errors import DataError
from vlmrl.tasks.geometry.drawn.angles import ANGLES, CIRCLES
from vlmrl.tasks.geometry.drawn.lengths import AREAS, LENGTHS, SQUARES
from vlmrl.tasks.geometry.drawn.page import NoRoomError, PageStyle, lay_out
from vlmrl.tasks.geometry.drawn.problem import Problem
from vlmrl.types import hash64

Maker = Callable[[random.Random, bool], Problem]
TOPICS: Mapping[str, tuple[Maker, ...]] = {
    "angles": ANGLES,
    "lengths": LENGTHS,
    "circles": CIRCLES,
    "areas": AREAS,
    "squares": SQUARES,
}
USUAL_TOPICS = ("angles", "lengths", "circles", "areas")
"""Topics that are drawn unless others are chosen: those whose figures look like the published ones."""

PORTION = 100
MOST_TRIES = 1000
"""Largest number of drawings for one row. Those of other splits, and those that cannot be printed, are thrown away."""


@dataclass(frozen=True)
class DrawnProblem:
    """Problem with its figure.

    Args:
        image: PNG file.
        text: question, as the style of the collection asks it.
    """

    problem: Problem
    topic: str
    image: bytes
    text: str


def draw_problems(
    counts: Mapping[str, int],
    *,
    seed: int,
    values: bool,
    topics: tuple[str, ...] = USUAL_TOPICS,
    width: int = 448,
    progress: Progress | None = None,
) -> dict[str, list[DrawnProblem]]:
    """Return split -> drawn problems; topics and kinds take turns, so that each is about equally frequent.

    A problem's kind and numbers decide which split it may be in: splits share no problem, only the kinds.

    Args:
        counts: split -> number of problems.
        values: the figure shows the values, and the question asks for x; else the question states the values, and the
            figure shows the shape alone.
        width: of the images in pixels; they are three quarters as high.
        progress: called after each 100 problems.
    Raises: DataError when the topics have too few different problems.
    """
    style = PageStyle(width, width * 3 // 4)
    makers = [(topic, make) for topic in topics for make in TOPICS[topic]]
    draw = _Draw(seed, values, style, _shares(counts))
    drawn: dict[str, list[DrawnProblem]] = {split: [] for split in counts}
    rows = [(split, number) for split, count in counts.items() for number in range(count)]
    for done, (split, number) in enumerate(rows):
        if progress is not None and done % PORTION == 0:
            progress("drawing figures", done, len(rows))
        start = number % len(makers)
        drawn[split].append(draw.problem(split, number, makers[start:] + makers[:start]))
    return drawn


def _shares(counts: Mapping[str, int]) -> list[tuple[str, float]]:
    """Return (split, upper end of its range in [0, 1]): the share of the different problems that a split may use."""
    total, end = sum(counts.values()), 0.0
    ranges = []
    for split, count in counts.items():
        end += count / total
        ranges.append((split, end))
    return ranges


@dataclass
class _Draw:
    """Drawing of rows, each with random numbers of its own."""

    seed: int
    values: bool
    style: PageStyle
    shares: list[tuple[str, float]]
    drawn: set[str] = field(default_factory=set)
    used_up: set[tuple[str, Maker]] = field(default_factory=set)
    """Kinds that have no problem left for a split."""

    def problem(self, split: str, number: int, makers: Sequence[tuple[str, Maker]]) -> DrawnProblem:
        """Return the problem of a row: of the first maker that has one left for the split.

        A kind with few different numbers may have none at all in a small split.

        Raises: DataError when no maker has a problem left.
        """
        for topic, make in makers:
            if (split, make) in self.used_up:
                continue
            problem = self._new_problem(split, number, topic, make)
            if problem is not None:
                return problem
            self.used_up.add((split, make))
        raise DataError(
            f"{MOST_TRIES} drawings of each kind gave no new problem for the split `{split}`",
            hint="draw fewer, take more topics, or draw larger figures (--width)",
        )

    def _new_problem(self, split: str, number: int, topic: str, make: Maker) -> DrawnProblem | None:
        """Return the first problem that belongs to the split, can be printed and is not drawn yet; None without one."""
        for attempt in range(MOST_TRIES):
            rng = random.Random(hash64("geometry", str(self.seed), split, str(number), str(attempt)))
            problem = make(rng, self.values)
            if self._split_of(problem) != split:
                continue
            try:
                page = lay_out(problem.sketch, self.style)
            except NoRoomError:
                continue
            image = encode_png(page.draw())
            if (sha256 := image_hash(image)) not in self.drawn:
                self.drawn.add(sha256)
                return DrawnProblem(problem, topic, image, problem.short if self.values else problem.full)
        return None

    def _split_of(self, problem: Problem) -> str:
        """Return the only split that may have a problem of these numbers."""
        place = hash64("split", str(self.seed), problem.kind, *map(str, problem.numbers)) / 2**63
        return next((split for split, end in self.shares if place < end), self.shares[-1][0])


MOST_WRITTEN_TRIES = 1000
"""Largest number of problems that are made for one row; those of other splits, and repeated ones, are thrown away."""


@dataclass(frozen=True)
class WrittenProblem:
    """Problem with its answer.

    Args:
        steps: the way to the answer, in sentences.
        answer: in LaTeX.
    """

    kind: str
    text: str
    steps: str
    answer: str
    topic: str = ""


WrittenMaker = Callable[[random.Random], WrittenProblem]


def _sum(rng: random.Random) -> WrittenProblem:
    a, b = rng.randint(1, 49), rng.randint(1, 49)
    return WrittenProblem("sum", f"What is {a} + {b}?", f"{a} + {b} = {a + b}.", str(a + b))


def _difference(rng: random.Random) -> WrittenProblem:
    a, b = rng.randint(1, 99), rng.randint(1, 99)
    return WrittenProblem("difference", f"What is {a} - {b}?", f"{a} - {b} = {a - b}.", str(a - b))


def _product(rng: random.Random) -> WrittenProblem:
    a, b = rng.randint(3, 30), rng.randint(3, 30)
    return WrittenProblem("product", f"What is {a} times {b}?", f"{a} times {b} is {a * b}.", str(a * b))


def _remainder(rng: random.Random) -> WrittenProblem:
    a, b = rng.randint(50, 999), rng.randint(3, 19)
    text = f"What is the remainder when {a} is divided by {b}?"
    return WrittenProblem("remainder", text, f"{a} = {a // b} times {b} + {a % b}.", str(a % b))


def _fraction_sum(rng: random.Random) -> WrittenProblem:
    p, q, r, s = rng.randint(1, 9), rng.randint(2, 9), rng.randint(1, 9), rng.randint(2, 9)
    total = Fraction(p, q) + Fraction(r, s)
    text = f"What is $\\frac{{{p}}}{{{q}}} + \\frac{{{r}}}{{{s}}}$, in lowest terms?"
    steps = f"Over the denominator {q * s}, the numerators are {p * s} and {r * q}, together {p * s + r * q}."
    return WrittenProblem("fraction_sum", text, steps, latex_of(total))


def _share(rng: random.Random) -> WrittenProblem:
    p, q, whole = rng.randint(1, 9), rng.randint(2, 12), rng.randint(5, 90)
    value = Fraction(p, q) * whole
    text = f"What is $\\frac{{{p}}}{{{q}}}$ of {whole}, in lowest terms?"
    return WrittenProblem("share", text, f"{p} times {whole} is {p * whole}; divide it by {q}.", latex_of(value))


def _linear(rng: random.Random) -> WrittenProblem:
    a, b, c = rng.randint(2, 12), rng.randint(-30, 30), rng.randint(-30, 30)
    text = f"Solve ${a}x {'-' if b < 0 else '+'} {abs(b)} = {c}$ for $x$."
    return WrittenProblem("linear", text, f"{a}x = {c - b}.", latex_of(Fraction(c - b, a)))


def _two_numbers(rng: random.Random) -> WrittenProblem:
    small, gap = rng.randint(1, 60), rng.randint(1, 40)
    total = 2 * small + gap
    text = f"The sum of two numbers is {total}, and their difference is {gap}. What is the larger number?"
    return WrittenProblem("two_numbers", text, f"Twice the larger number is {total + gap}.", str(small + gap))


WRITTEN_TOPICS: Mapping[str, tuple[WrittenMaker, ...]] = {
    "arithmetic": (_sum, _difference, _product, _remainder),
    "fractions": (_fraction_sum, _share),
    "equations": (_linear, _two_numbers),
    "sums": (_sum,),
}
USUAL_WRITTEN_TOPICS = ("arithmetic", "fractions", "equations")
"""Topics that are written unless others are chosen; `sums` alone is for tiny models."""


def latex_of(number: Fraction) -> str:
    """Return a fraction in lowest terms, in LaTeX."""
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return f"{sign}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def write_problems(
    counts: Mapping[str, int], *, seed: int, topics: tuple[str, ...] = USUAL_WRITTEN_TOPICS
) -> dict[str, list[WrittenProblem]]:
    """Return split -> problems; topics and kinds take turns. No problem is there twice.

    Raises: DataError when the topics have too few different problems.
    """
    makers = [(topic, make) for topic in topics for make in WRITTEN_TOPICS[topic]]
    seen: set[str] = set()
    problems: dict[str, list[WrittenProblem]] = {}
    for split, count in counts.items():
        problems[split] = [_new_problem(split, number, makers, seed, seen) for number in range(count)]
    return problems


def _new_problem(
    split: str, number: int, makers: list[tuple[str, WrittenMaker]], seed: int, seen: set[str]
) -> WrittenProblem:
    topic, make = makers[number % len(makers)]
    for attempt in range(MOST_WRITTEN_TRIES):
        problem = make(random.Random(hash64("written", str(seed), split, str(number), str(attempt))))
        if problem.text not in seen:
            seen.add(problem.text)
            return WrittenProblem(problem.kind, problem.text, problem.steps, problem.answer, topic)
    raise DataError(
        f"{MOST_WRITTEN_TRIES} problems of the topic `{topic}` gave no new one", hint="write fewer, or take more topics"
    )
