"""Solve rate of a prompt: its measure for each source, or the reason why there is none."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev

from vlmrl.errors import RewardError
from vlmrl.rewards.accuracy_part import RIGHT, is_binary
from vlmrl.rewards.base import value_bounds
from vlmrl.tasks.source import Source, accuracies
from vlmrl.types import Group, ScoredSample

SIGNS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
CONDITION = re.compile(r"\s*(?P<part>[^\s<>=](?:[^<>=]*[^\s<>=])?)\s*(?P<sign>>=|<=|==|>|<)\s*(?P<bound>\S+)\s*")
SCORE = "reward"
"""Name that stands for the score itself in a condition."""


@dataclass(frozen=True)
class Solved:
    """The user's condition for a solved response: `part sign bound`. `part` is a part of the reward, or SCORE."""

    part: str
    sign: str
    bound: float

    def __str__(self) -> str:
        return f"{self.part} {self.sign} {self.bound:g}"

    def of(self, sample: ScoredSample) -> float | None:
        """Return 1 for a solved response, 0 for another, None if the part does not apply."""
        value = sample.score.value if self.part == SCORE else sample.score.parts.get(self.part)
        return None if value is None or math.isnan(value) else float(SIGNS[self.sign](value, self.bound))


def parse_solved(text: str) -> Solved:
    """Read a condition such as `acc>=1`. Raises: RewardError when the text is no condition."""
    match = CONDITION.fullmatch(text)
    try:
        bound = float(match["bound"]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        hint = "write --solved 'acc>=1': a part, or `reward` for the score; one of >=, >, <=, <, ==; a number"
        raise RewardError(f"--solved {text!r} is not a condition", hint=hint)
    return Solved(match["part"], match["sign"], bound)


@dataclass(frozen=True)
class Rate:
    """Solve rates of a source's groups, and their measure.

    Args:
        words: the measure, in words.
        by_group: one rate per group of the source, in order; in [0, 1], None if no response of the group is measured.
    """

    words: str
    by_group: tuple[float | None, ...]


def measure_rate(source: Source, groups: Sequence[Group], solved: Solved | None = None) -> Rate | None:
    """Return the solve rate of a source's groups; None if nothing says what a solved response is.

    The measure is the first of these that exists: the user's condition; the accuracy (rewards/accuracy_part.py), as the
    share of right responses or, if it is not only right or wrong, as the mean; the reward, scaled from 0 at the
    smallest value that it declares to 1 at the largest.
    """
    if solved is not None:
        if solved.part != SCORE and not any(solved.part in s.score.parts for g in groups for s in g.samples):
            return None
        return Rate(f"share of responses with {solved}", _means([[solved.of(s) for s in g.samples] for g in groups]))
    by_group = accuracies(groups, [source])
    values = [a for group_accuracies in by_group for a in group_accuracies if a is not None]
    if values and is_binary(values):
        rights = [[None if a is None else float(a == RIGHT) for a in group_accuracies] for group_accuracies in by_group]
        return Rate(f"share of responses with accuracy >= {RIGHT:g}", _means(rights))
    if values and all(0 <= a <= 1 for a in values):
        return Rate("mean of accuracy", _means(by_group))
    low, high = value_bounds(source.reward, source.weights)
    if not values and math.isfinite(low) and math.isfinite(high) and high > low:
        scaled = [
            [(s.score.value - low) / (high - low) if s.score.error is None else None for s in g.samples] for g in groups
        ]
        return Rate(f"mean reward, from {low:g} = 0 to {high:g} = 1", _means(scaled))
    return None


def _means(values: Sequence[Sequence[float | None]]) -> tuple[float | None, ...]:
    present = [[v for v in numbers if v is not None] for numbers in values]
    return tuple(fmean(numbers) if numbers else None for numbers in present)


def why_none(source: Source, groups: Sequence[Group]) -> str:
    """Return why a source has no solve rate, and the option that would define one."""
    parts = list(dict.fromkeys(name for g in groups for s in g.samples for name in s.score.parts))
    example = next((name for name in parts if name != SCORE), SCORE)
    known = ", ".join(dict.fromkeys([*parts, SCORE]))
    return (
        f"nothing says when a response of `{source.name}` is solved: {source.reward.name} gives no accuracy from 0 to "
        f"1 and declares no RANGES; define it with --solved '{example}>=1' (known names: {known})"
    )


def spread(group: Group) -> Mapping[str, float] | None:
    """Return mean, min, max and std (of the population) of a group's scores; None if it has no score."""
    values = [s.score.value for s in group.samples if s.score.error is None]
    if not values:
        return None
    return {"mean": fmean(values), "min": min(values), "max": max(values), "std": pstdev(values)}
