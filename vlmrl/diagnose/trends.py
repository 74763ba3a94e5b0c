"""Lasting changes in the metrics of a run: the rise of a series at a step, and its standard error."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from vlmrl.diagnose.thresholds import limit
from vlmrl.reward_check.scores import Floats, Ints
from vlmrl.rewards.accuracy_part import NAMES as ACCURACY_NAMES

MOST_GAPS = 0.2
"""Maximum share of lines that may lack a metric. Such a line gets the value of the line before it."""

WATCHED = (
    "step",
    "reward/mean",
    "reward/accuracy",
    "rollout/dead_group_share",
    "rollout/truncated_share",
    "rollout/response_tokens_mean",
)


def is_watched(metric: str) -> bool:
    """Return whether this module or `diagnose/signs.py` uses the metric."""
    return metric in WATCHED or metric.startswith(("health/", "reward/part/"))


@dataclass(frozen=True)
class Contrast:
    """Means of a series before and after each of T steps at which a change may have begun. [T] each, except `last`.

    Args:
        before: mean over a window of lines before the step.
        after: mean from the step to the end.
        error: standard error of the difference of both means.
        last: mean of the last few lines of the series.
    """

    before: Floats
    after: Floats
    error: Floats
    last: float

    @property
    def rise(self) -> Floats:
        return self.after - self.before

    def lasting(self, least: float | Floats) -> Any:
        """Return [T]: whether the series rose significantly, by at least `least`, and its last values are still higher.

        The last values must also exceed the mean before the step by at least `least`.
        """
        certain = self.rise > limit("sign_certainty") * self.error
        return certain & (self.rise >= least) & (self.last - self.before >= least)

    @property
    def certainty(self) -> Floats:
        """Rise divided by its standard error, [T]. If the standard error is 0, 1e-9 is used."""
        return self.rise / np.maximum(self.error, 1e-9)


class History:
    """Train lines of a run as series of numbers, one per metric; NaN where a line lacks the metric."""

    def __init__(self, lines: Sequence[Mapping[str, Any]]) -> None:
        self.lines = lines

    def series(self, name: str) -> Floats:
        values = (line.get(name) for line in self.lines)
        return np.asarray(
            [float(v) if isinstance(v, (int, float)) and math.isfinite(v) else math.nan for v in values], dtype=float
        )

    @cached_property
    def reward(self) -> Floats:
        return self.series("reward/mean")

    @cached_property
    def accuracy(self) -> Floats:
        """Mean accuracy per step. Older runs lack this metric; there it is the part of the reward with such a name."""
        named = self.series("reward/accuracy")
        parts = (self.series(f"reward/part/{name}") for name in ACCURACY_NAMES)
        return named if np.isfinite(named).any() else next((p for p in parts if np.isfinite(p).any()), named)

    @cached_property
    def format(self) -> Floats:
        """Mean of the format part per step, in [0, 1]; NaN if the reward has no such part."""
        names = {n for line in self.lines[-1:] for n in line if n.startswith("reward/part/") and "format" in n.lower()}
        series = self.series(min(names)) if names else np.full(len(self.lines), math.nan)
        inside = np.nanmin(series, initial=0.0) >= 0 and np.nanmax(series, initial=1.0) <= 1
        return series if inside else np.full(len(self.lines), math.nan)

    @cached_property
    def scale(self) -> float:
        """Scale by which rises of the reward are divided: the larger of its largest absolute mean and its range."""
        values = self.reward[np.isfinite(self.reward)]
        return float(max(np.abs(values).max(), np.ptp(values))) if len(values) else 0.0

    @cached_property
    def steps(self) -> Ints:
        """Indices of the lines at which a change may have begun, [T]: there are enough lines before and after them."""
        least = int(limit("sign_before"))
        return np.arange(least, max(least, len(self.lines) - int(limit("sign_steps")) + 1))

    def contrast(self, values: Floats) -> Contrast | None:
        """Return the contrast of a series at each of `steps`; None if it has many gaps or too few lines.

        Args:
            values: [N], one value per line; NaN where a line lacks the metric.
        """
        if not len(self.steps) or np.isnan(values).mean() > MOST_GAPS or np.isnan(values[0]):
            return None
        values = values[np.maximum.accumulate(np.where(np.isnan(values), 0, np.arange(len(values))))]
        number, t = len(values), self.steps
        centre = float(values.mean())
        sums = np.concatenate([[0.0], np.cumsum(values - centre)])
        squares = np.concatenate([[0.0], np.cumsum((values - centre) ** 2)])
        start = np.maximum(0, t - int(limit("sign_window")))

        def mean_and_variance(low: Ints, high: Any) -> tuple[Floats, Floats]:
            size = high - low
            mean = (sums[high] - sums[low]) / size
            variance = np.maximum(squares[high] - squares[low] - size * mean**2, 0.0) / (size - 1)
            return mean + centre, variance

        before, noise_before = mean_and_variance(start, t)
        after, noise_after = mean_and_variance(t, np.full(len(t), number))
        few = t - start < limit("sign_steps")  # with few steps before, their noise may be small by chance
        noise_before = np.where(few, np.maximum(noise_before, noise_after), noise_before)
        error = np.sqrt(noise_before / (t - start) + noise_after / (number - t))
        return Contrast(before, after, error, float(values[-int(limit("sign_steps")) :].mean()))

    @cached_property
    def paid(self) -> Contrast | None:
        """Contrast of the reward; None if it cannot be computed.

        At steps around which the format is being learned, the reward is divided by the share of well-formed responses,
        because a rise that comes from the format alone is intended.
        """
        plain = self.contrast(self.reward)
        form = self.contrast(self.format)
        if plain is None or form is None:
            return plain
        formed = self.contrast(self.reward / np.maximum(self.format, limit("sign_formed")))
        assert formed is not None
        learning = (form.rise > limit("sign_format")) | (form.before < limit("sign_formed"))
        pick = lambda a, b: np.where(learning, b, a)  # noqa: E731
        return Contrast(
            pick(plain.before, formed.before),
            pick(plain.after, formed.after),
            pick(plain.error, formed.error),
            plain.last,
        )

    @cached_property
    def no_better(self) -> Any:
        """Return whether the accuracy did not rise, or rose far less than the reward, [T]; None if not known."""
        paid, right = self.paid, self.contrast(self.accuracy)
        if paid is None or right is None:
            return None
        share = paid.rise / max(self.scale, 1e-9)
        uncertain = limit("accuracy_certainty") * right.error
        unmoved = (right.rise <= uncertain) | (right.rise < limit("accuracy_nothing") * share)
        return unmoved & (right.rise + uncertain < limit("accuracy_share") * share)

    @cached_property
    def learned(self) -> bool:
        """Return whether nearly all recent responses are right."""
        recent = self.accuracy[-int(limit("sign_steps")) :]
        return bool(len(recent)) and bool(np.mean(recent) >= limit("accuracy_learned"))

    def recent(self, name: str) -> float:
        """Return the mean of a metric over the last few lines; NaN if one of them lacks the metric."""
        values = self.series(name)[-int(limit("sign_steps")) :]
        return float(np.mean(values)) if len(values) == int(limit("sign_steps")) else math.nan

    def step_at(self, where: Any, contrast: Contrast) -> int | None:
        """Return the index in `steps` of the most certain change where `where` [T] is True; None if it never is."""
        if where is None or not np.any(where):
            return None
        return int(np.argmax(np.where(where, contrast.certainty, -np.inf)))

    def number(self, place: int) -> int:
        """Return the training step of the line `steps[place]`."""
        return int(self.lines[int(self.steps[place])].get("step", self.steps[place]))
