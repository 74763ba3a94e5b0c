"""Problems in text alone with exact answers: the same for the same seed, and no problem in two splits."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from vlmrl.errors import DataError
from vlmrl.types import hash64

MOST_TRIES = 1000
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


Maker = Callable[[random.Random], WrittenProblem]


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


TOPICS: Mapping[str, tuple[Maker, ...]] = {
    "arithmetic": (_sum, _difference, _product, _remainder),
    "fractions": (_fraction_sum, _share),
    "equations": (_linear, _two_numbers),
    "sums": (_sum,),
}
USUAL_TOPICS = ("arithmetic", "fractions", "equations")
"""Topics that are written unless others are chosen; `sums` alone is for tiny models."""


def latex_of(number: Fraction) -> str:
    """Return a fraction in lowest terms, in LaTeX."""
    if number.denominator == 1:
        return str(number.numerator)
    sign = "-" if number < 0 else ""
    return f"{sign}\\frac{{{abs(number.numerator)}}}{{{number.denominator}}}"


def write_problems(
    counts: Mapping[str, int], *, seed: int, topics: tuple[str, ...] = USUAL_TOPICS
) -> dict[str, list[WrittenProblem]]:
    """Return split -> problems; topics and kinds take turns. No problem is there twice.

    Raises: DataError when the topics have too few different problems.
    """
    makers = [(topic, make) for topic in topics for make in TOPICS[topic]]
    seen: set[str] = set()
    problems: dict[str, list[WrittenProblem]] = {}
    for split, count in counts.items():
        problems[split] = [_new_problem(split, number, makers, seed, seen) for number in range(count)]
    return problems


def _new_problem(split: str, number: int, makers: list[tuple[str, Maker]], seed: int, seen: set[str]) -> WrittenProblem:
    topic, make = makers[number % len(makers)]
    for attempt in range(MOST_TRIES):
        problem = make(random.Random(hash64("written", str(seed), split, str(number), str(attempt))))
        if problem.text not in seen:
            seen.add(problem.text)
            return WrittenProblem(problem.kind, problem.text, problem.steps, problem.answer, topic)
    raise DataError(
        f"{MOST_TRIES} problems of the topic `{topic}` gave no new one", hint="write fewer, or take more topics"
    )
