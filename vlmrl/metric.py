"""Facts about metrics: the range of their values and which direction is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from vlmrl.redaction.redact import quoted

Better = Literal["higher", "lower", "neither"]
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class Metric:
    """Facts about one metric and its variants `<name>/...`.

    Args:
        better: the better direction; None = unknown: a difference is then called neither better nor worse.
        range: (smallest, largest) possible value; intervals are limited to it. None = not declared.
    Raises: ValueError for an unknown direction, or a range that is not two increasing numbers.
    """

    better: Better | None = None
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if self.better not in (None, *get_args(Better)):
            known = ", ".join(repr(word) for word in get_args(Better))
            raise ValueError(f"`better` of a metric is {self.better!r}; it can be {known} or None")
        if self.range is not None:
            object.__setattr__(self, "range", _growing(self.range))


def _growing(given: Any) -> tuple[float, float]:
    """Return a declared range as two floats. Raises: ValueError for anything but two increasing numbers."""
    try:
        low, high = given
        ends = (math.nan, math.nan) if isinstance(low, str) or isinstance(high, str) else (float(low), float(high))
    except (TypeError, ValueError, OverflowError):
        ends = (math.nan, math.nan)
    if not ends[0] < ends[1]:
        raise ValueError(f"`range` of a metric is {quoted(given)}; it must be two increasing numbers or None")
    return ends


METRICS: Mapping[str, Metric] = {
    "reward": Metric("higher"),
    "part": Metric("higher"),
    "accuracy": Metric("higher", SHARE),
    "pass@k": Metric("higher", SHARE),
    "maj@k": Metric("higher", SHARE),
    "mean@k": Metric("higher", SHARE),
    "brier": Metric("lower", SHARE),
    "auc": Metric("higher"),
    "ece": Metric("lower"),
    "precision": Metric("higher"),
    "recall": Metric("higher"),
    "f1": Metric("higher"),
    "loss": Metric("lower"),
    "perplexity": Metric("lower"),
    "parse_failure": Metric("lower", SHARE),
    "parse_failures": Metric("lower"),
    "parse_failure_rate": Metric("lower"),
    "response_tokens": Metric("neither"),
    "truncated": Metric("neither", SHARE),
}
"""Metrics that evaluations of any task may have. A task declares its own metrics in `Task.metrics`."""
UNKNOWN = Metric()


def metric_facts(name: str, own: Mapping[str, Metric] | None = None) -> Metric:
    """Return the facts about a metric: for its full name, else for its name up to a `/`, else UNKNOWN.

    Args:
        own: facts that the task declares; they have priority over METRICS.
    """
    kind, at, _ = name.partition("@")
    base = f"{kind}@k" if at and f"{kind}@k" in METRICS else name.split("/")[0]
    for table in (own or {}, METRICS):
        for key in (name, base):
            if key in table:
                return table[key]
    return UNKNOWN
