"""Facts about metrics: the range of their values and which way is better."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Better = Literal["higher", "lower", "neither"]
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Metric:
    """Facts about one metric and its variants `<name>/...`.

    Args:
        better: which way is better; None = not known, so that a difference is called neither better nor worse.
        range: (least, largest) value; intervals stay inside. None = not declared.
    Raises: ValueError for another direction, or a range that is not two growing numbers.
    """

    better: Better | None = None
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.better not in (None, *get_args(Better)):
            known = ", ".join(repr(word) for word in get_args(Better))
            raise ValueError(f"`better` of a metric is {self.better!r}; it can be {known} or None")
        try:
            sound = self.range is None or float(self.range[0]) < float(self.range[1])
        except (TypeError, ValueError, IndexError, KeyError):
            sound = False
        if not sound:
            raise ValueError(f"`range` of a metric is {self.range!r:.80}; it must be two growing numbers or None")


METRICS: Mapping[str, Metric] = {
    "reward": Metric("higher"),
    "part": Metric("higher"),
    "accuracy": Metric("higher", SHARE),
    "pass@k": Metric("higher", SHARE),
    "brier": Metric("lower", SHARE),
    "auc": Metric("higher"),
    "ece": Metric("lower"),
    "precision": Metric("higher"),
    "recall": Metric("higher"),
    "f1": Metric("higher"),
    "parse_failure": Metric("lower", SHARE),
    "parse_failures": Metric("lower"),
    "parse_failure_rate": Metric("lower"),
    "response_tokens": Metric("neither"),
    "truncated": Metric("neither", SHARE),
}
"""Metrics that every evaluation may have, whatever the task. A task declares those of its own (`Task.metrics`)."""
UNKNOWN = Metric()


def metric_facts(name: str, own: Mapping[str, Metric] | None = None) -> Metric:
    """Return the facts about a metric: its own, else of the name before a `/`; UNKNOWN where nothing is declared.

    Args: own: declared by the task; they come before METRICS.
    """
    base = "pass@k" if name.startswith("pass@") else name.split("/")[0]
    for table in (own or {}, METRICS):
        for key in (name, base):
            if key in table:
                return table[key]
    return UNKNOWN
