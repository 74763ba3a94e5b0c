"""Metrics of a whole set of responses that are computed from counts: a count per response, summed over the set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from vlmrl.types import RewardInput, Score

Verdict = tuple[RewardInput, Score, Mapping[str, float | None]]
"""Response, its score, and its outcome."""


@dataclass(frozen=True)
class PooledMetrics:
    """Metrics that depend only on sums over responses, such as the ratio of two counts.

    As `Task.set_metrics`, they are measured in evaluations, and in training at every step on the responses of all
    ranks. The sums are stored with them. So the metrics of several steps, runs or sources together can be computed from
    the added sums.

    Args:
        count: response -> its integers by name; the same names for every response, none of them that of a metric.
        metrics: sums by name -> metrics by name; None = not defined, such as a ratio whose denominator is 0.
    Example: shouting = PooledMetrics(
        count=lambda verdict: {"loud": int(verdict[0].response.isupper()), "all": 1},
        metrics=lambda sums: {"shouting": sums["loud"] / sums["all"] if sums["all"] else None},
    )
    """

    count: Callable[[Verdict], Mapping[str, int]]
    metrics: Callable[[Mapping[str, int]], Mapping[str, float | None]]

    def sums(self, verdicts: Iterable[Verdict]) -> dict[str, int]:
        """Return the sums over responses; {} without responses."""
        total: dict[str, int] = {}
        for verdict in verdicts:
            for name, number in self.count(verdict).items():
                total[name] = total.get(name, 0) + number
        return total

    def __call__(self, verdicts: Iterable[Verdict]) -> Mapping[str, float | None]:
        """Return the metrics of responses, at least one."""
        return self.metrics(self.sums(verdicts))
