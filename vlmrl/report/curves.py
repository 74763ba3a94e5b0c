"""Charts and headline numbers of a report, from the metrics of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from markupsafe import Markup

from vlmrl.diagnose.health import TITLES as HEALTH_TITLES
from vlmrl.evaluate.verdict import Verdict
from vlmrl.report.plots import HEIGHT, WIDTH, Mark, Series, line_chart
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run

Line = Mapping[str, Any]
Changes = Callable[[int, int], Mapping[str, tuple[Mapping[str, Any], Verdict]]]

NOT_METRICS = frozenset({"step", "attempt", "kind", "time"})
ENDS = ("_low", "_high")
SMALL = (380, 190)
"""Width and height of the charts of a gallery."""

TITLES = {
    "reward/mean": "Reward in training",
    "reward/accuracy": "Accuracy in training",
    "loss/cross_entropy": "Loss (cross-entropy, nats per token)",
    "rollout/dead_group_share": "Dead groups (share)",
    "rollout/truncated_share": "Truncated responses (share)",
    "rollout/response_tokens_mean": "Response length (tokens, mean)",
    "rollout/tokens_per_second": "Sampling speed (tokens per second)",
    "policy/entropy": "Entropy (nats per token)",
    "policy/sampler_gap_max": "Sampler gap (largest, nats)",
    "policy/clip_share": "Clipped tokens (share)",
    "optim/grad_norm": "Gradient norm (before clipping)",
    "optim/lr": "Learning rate",
    "reward/errors": "Failed rewards (samples)",
    "reward/unavailable": "Rewards that were unavailable (samples)",
    "reward/timeouts": "Responses that hung the reward (samples)",
    "reward/outage_seconds": "Waiting for a service of the reward (seconds)",
    "time/step_seconds": "Seconds per step",
    "memory/peak_bytes": "Peak memory (bytes)",
    "loss/kl": "KL to the reference (nats)",
    "policy/kl_in_reward": "KL to the reference (nats)",
    "loss/value": "Loss of the critic",
    "value/explained_variance": "Variance explained by the critic (share)",
    **HEALTH_TITLES,
}
HEALTH = (
    "rollout/dead_group_share",
    "rollout/truncated_share",
    "rollout/response_tokens_mean",
    "policy/entropy",
    "optim/grad_norm",
    "policy/sampler_gap_max",
    "policy/clip_share",
    "reward/errors",
    "reward/unavailable",
    "reward/timeouts",
    "reward/outage_seconds",
    "loss/kl",
    "policy/kl_in_reward",
    "loss/value",
    "value/explained_variance",
    "optim/lr",
    "rollout/tokens_per_second",
    "time/step_seconds",
)
VALIDATION_TITLES = {
    "reward": "Reward",
    "accuracy": "Accuracy",
    "brier": "Brier score (lower is better)",
    "auc": "AUC",
    "ece": "Calibration error (lower is better)",
    "f1": "F1 of the label 1",
    "parse_failure": "Parse failures (share)",
    "response_tokens": "Response length (tokens)",
    "truncated": "Truncated (share)",
}
LEADING = ("reward", "accuracy")
"""Validation metrics that get a large chart and are among the headline numbers."""
TRAINED = {"reward": ("reward/mean", ("reward/low", "reward/high")), "accuracy": ("reward/accuracy", None)}
"""Leading metric -> (metric of the train lines, metrics of its interval or None)."""


@dataclass(frozen=True)
class RunCurves:
    """Valid lines of one run's metrics.jsonl.

    Args:
        label, colour: name and colour of the run on the page.
        marks: steps at which the run was resumed.
        problem: reason why the metrics could not be read; "" if they were read.
    """

    label: str
    colour: int
    train: Sequence[Line] = ()
    validation: Sequence[Line] = ()
    events: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    problem: str = ""


@dataclass(frozen=True)
class Chart:
    """Titled chart of the page."""

    title: str
    svg: Markup
    name: str = ""


@dataclass(frozen=True)
class Headline:
    """Metric in the top row of the page, with its first and its last value.

    Args:
        interval: interval of the change if the same rows were compared in pairs: [low, high]; else [None, None].
        verdict: result of this comparison; "" if the rows were not compared.
    """

    title: str
    start: Mapping[str, Any] | None
    end: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)
    interval: Sequence[float | None] = (None, None)
    verdict: Verdict | Literal[""] = ""

    @property
    def change(self) -> float | None:
        return None if self.start is None else self.end["value"] - self.start["value"]

    @property
    def colour(self) -> str:
        """`up` if the change is clearly good, `down` if it is clearly bad, else ""."""
        return {"better": "up", "worse": "down"}.get(self.verdict, "")


def read_curves(run: Run, label: str, colour: int) -> RunCurves:
    """Return the curves of a run. If the metrics are damaged, `problem` is set and no error is raised."""
    from vlmrl.errors import StoreError

    try:
        train, validation, events = (run.metrics(kind) for kind in ("train", "validation", "event"))
    except StoreError as error:
        return RunCurves(label, colour, problem=error.message)
    marks = [
        Mark(a.from_step, f"{label}: attempt {a.number} resumed from step {a.from_step}", colour)
        for a in run.manifest.attempts
        if a.number > 1
    ]
    return RunCurves(label, colour, train, validation, events, marks)


def main_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return the charts of reward and accuracy: lines for training and dots for validation, all runs in one chart."""
    charts = []
    for metric in LEADING:
        series = [s for r in runs for s in _leading_series(r, metric)]
        if series:
            title = VALIDATION_TITLES[metric]
            charts.append(Chart(title, line_chart(title, series, marks=_marks(runs))))
    if any(name == "loss/cross_entropy" for r in runs for name in _names(r.train)):
        charts.append(_train_chart(runs, "loss/cross_entropy", large=True))
    return charts


def part_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return the charts of the reward's parts over the training steps, then of the rewards of several sources."""
    names = _ordered(n for r in runs for n in _names(r.train) if n.startswith(("reward/part/", "reward/source/")))
    return [_train_chart(runs, n, title=n.removeprefix("reward/").replace("part/", "")) for n in names]


def validation_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return charts of all validation metrics except the leading ones (they have large charts)."""
    names = _ordered(n for r in runs for n in _names(r.validation) if n.startswith("eval/") and not n.endswith(ENDS))
    charts = []
    for name in names:
        short = name.removeprefix("eval/")
        if short in LEADING or short in ("metric", "is_best"):
            continue
        series = [s for r in runs if (s := _dots(r, name)) is not None]
        title = VALIDATION_TITLES.get(short, short)
        charts.append(
            Chart(title, line_chart(title, series, marks=_marks(runs), width=SMALL[0], height=SMALL[1]), short)
        )
    return charts


def health_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return charts of early warnings: dead groups, truncation, entropy, gradient, gap between sampler and trainer."""
    there = {n for r in runs for n in _names(r.train)}
    return [_train_chart(runs, n) for n in (*HEALTH, *HEALTH_TITLES) if n in there]


def other_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return charts of all training metrics that have no chart elsewhere."""
    shown = {
        *HEALTH,
        *HEALTH_TITLES,
        "reward/mean",
        "reward/low",
        "reward/high",
        "reward/accuracy",
        "loss/cross_entropy",
    }
    names = _ordered(n for r in runs for n in _names(r.train))
    other_names = [n for n in names if n not in shown and not n.startswith(("reward/part/", "reward/source/"))]
    return [_train_chart(runs, n) for n in other_names]


def headlines(run: RunCurves, changes: Changes = lambda first, last: {}) -> list[Headline]:
    """Return reward and accuracy at the first and the last validation, then those of training, or its loss.

    Args:
        changes: function (first step, last step) -> metric -> (paired difference of the validations, its verdict).
    """
    result = []
    lines = run.validation
    for metric in LEADING:
        name = f"eval/{metric}"
        measured_lines = [n for n in lines if _finite(n.get(name))]
        if measured_lines:
            first, last = measured_lines[0], measured_lines[-1]
            start = _point(first, name) if len(measured_lines) > 1 else None
            difference, verdict_on_change = changes(first["step"], last["step"]).get(metric, ({}, ""))
            ends = (difference.get("low"), difference.get("high"))
            result.append(
                Headline(f"Validation {metric}", start, _point(last, name), interval=ends, verdict=verdict_on_change)
            )
    for name, title in (
        ("reward/mean", "Training reward"),
        ("reward/accuracy", "Training accuracy"),
        ("loss/cross_entropy", "Training loss"),
    ):
        values = [(counted(n["step"]), n[name]) for n in run.train if _finite(n.get(name))]
        if values:
            result.append(_averaged(title, values))
    return result


def mean_value(lines: Sequence[Line], name: str) -> float | None:
    """Return the mean of a metric over all lines that have it."""
    values = [n[name] for n in lines if _finite(n.get(name))]
    return math.fsum(values) / len(values) if values else None


def _averaged(title: str, values: Sequence[tuple[int, float]]) -> Headline:
    """Return a headline with the means of the first and the last tenth of a noisy series (1 to 10 steps each)."""
    size = min(10, max(1, len(values) // 10))
    first, last = values[:size], values[-size:]

    def mean(part: Sequence[tuple[int, float]]) -> dict[str, Any]:
        value = math.fsum(v for _, v in part) / len(part)
        return {"value": value, "low": None, "high": None, "step": part[-1][0]}

    notes = (f"means of {size} steps",) if size > 1 else ()
    return Headline(title, mean(first) if len(values) > 1 else None, mean(last), notes)


def _point(line: Line, name: str) -> dict[str, Any]:
    low, high = (line.get(f"{name}{end}") for end in ENDS)
    whole = _finite(low) and _finite(high)
    return {
        "value": line[name],
        "low": low if whole else None,
        "high": high if whole else None,
        "step": line["step"],
    }


def _leading_series(run: RunCurves, metric: str) -> list[Series]:
    name, ends = TRAINED[metric]
    train = _series(run, run.train, name, f"{run.label}, training", ends)
    series_of_metric = [train] if train else []
    dots = _dots(run, f"eval/{metric}")
    return [*series_of_metric, *([dots] if dots else [])]


def _dots(run: RunCurves, name: str) -> Series | None:
    label = f"{run.label}, validation"
    series = _series(run, run.validation, name, label, (f"{name}_low", f"{name}_high"))
    if series is None:
        return None
    return Series(label, series.x, series.y, series.low, series.high, run.colour, dots=True)


def _train_chart(runs: Sequence[RunCurves], name: str, *, title: str = "", large: bool = False) -> Chart:
    series = [s for r in runs if (s := _series(r, r.train, name, r.label)) is not None]
    title = title or TITLES.get(name, name)
    width, height = (WIDTH, HEIGHT) if large else SMALL
    return Chart(title, line_chart(title, series, marks=_marks(runs), width=width, height=height), name)


def _series(
    run: RunCurves, lines: Sequence[Line], name: str, label: str, ends: tuple[str, str] | None = None
) -> Series | None:
    lines_with_value = [n for n in lines if _finite(n.get(name)) and not _no_rate(n, name)]
    if not lines_with_value:
        return None
    low = high = ()
    if ends is not None and any(_finite(n.get(ends[0])) and _finite(n.get(ends[1])) for n in lines_with_value):
        low, high = ([_number(n.get(end)) for n in lines_with_value] for end in ends)
    trained = lines is run.train
    steps = [float(counted(n["step"]) if trained else n["step"]) for n in lines_with_value]
    return Series(label, steps, [float(n[name]) for n in lines_with_value], low, high, run.colour, smooth=trained)


def _no_rate(line: Line, name: str) -> bool:
    """Return whether the value is 0 only because an older version logged a learning rate of 0 without an update."""
    return name == "optim/lr" and line[name] == 0 and "optim/grad_norm" not in line


def _marks(runs: Sequence[RunCurves]) -> list[Mark]:
    return [m for r in runs for m in r.marks]


def _names(lines: Sequence[Line]) -> list[str]:
    """Return the names of the numeric metrics in the lines, in order of first appearance."""
    return _ordered(k for n in lines for k, v in n.items() if k not in NOT_METRICS and _finite(v))


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> float:
    return float(value) if _finite(value) else math.nan
