"""Charts and headline numbers of a report, from the metrics of runs.

A validation metric is named `eval/[<source>/][<set>/][<setting>/]<metric>`. Metrics of reflection have titles of their
own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from markupsafe import Markup

from vlmrl.diagnose.signs import TITLES as HEALTH_TITLES
from vlmrl.errors import StoreError, VlmrlError
from vlmrl.evaluate.over_training import is_finite
from vlmrl.evaluate.paired import Comparison
from vlmrl.recipe.load import recipe_from_resolved
from vlmrl.report.plots import HEIGHT, WIDTH, Mark, Series, line_chart
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run
from vlmrl.tasks.reflection import COUNT, PREFIX, PREFIXES, RATE, WORD
from vlmrl.tasks.source import set_label


class SetAndSetting(NamedTuple):
    """A set and a setting; "" = the recipe names none."""

    set_name: str
    setting: str

    @property
    def words(self) -> str:
        return "/".join(filter(None, self))


def sets_and_settings(run: Run) -> list[SetAndSetting]:
    """Return those of a run's newest recipe; [] for one without `eval.sets` and settings, or that is damaged."""
    try:
        settings = recipe_from_resolved(read_resolved(run.dir), where=str(run.dir)).eval
    except VlmrlError:
        return []
    if not settings.sets and not settings.settings:
        return []
    sets = [set_label(name) for name in settings.sets] or [""]
    return [SetAndSetting(one, setting) for one in sets for setting in settings.named_settings]


def validation_metric_parts(name: str, pairs: Sequence[SetAndSetting]) -> tuple[str, SetAndSetting | None, str]:
    """Return (place, pair, metric) of a metric's name without `eval/`. The place: source and set, in words.

    Example: "birds/validation/pass8/accuracy" -> ("birds, validation", ("validation", "pass8"), "accuracy").
    """
    for pair in pairs:
        source, words, metric = f"/{name}".partition(f"/{pair.words}/")
        if words and "/" not in source[1:]:
            return ", ".join(filter(None, (source[1:], pair.set_name))), pair, metric
    return "", None, name


def is_reflection(name: str) -> bool:
    """Return whether a metric is one of reflection, in training or below a set of an evaluation."""
    return name.startswith(PREFIX) or f"/{PREFIX}" in name


def reflection_names(lines: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return (ratios and rates, counts of the words that occur) among the metrics of training lines, in their order.

    Both are empty if none of the words ever occurs.
    """
    values = {name: value for line in lines for name, value in line.items() if name.startswith(PREFIX) and value}
    names = dict.fromkeys(
        n for line in lines for n, value in line.items() if n.startswith(PREFIX) and value is not None
    )
    words = [name for name in names if f"/{WORD}" in name and name in values]
    if not any(RATE in name or name in words for name in values):
        return [], []
    return [name for name in names if f"/{WORD}" not in name and f"/{COUNT}" not in name], words


def reflection_title(name: str) -> str:
    """Return a title such as "Reflection ratio in correct answers (maye)"."""
    profiles = sorted(PREFIXES, key=lambda profile: -len(PREFIXES[profile]))
    profile = next(profile for profile in profiles if name.startswith(PREFIXES[profile]))
    words = name.removeprefix(PREFIXES[profile]).removeprefix(WORD).replace("_", " ")
    title = f'"{words}"' if f"/{WORD}" in name else words.capitalize()
    return title if profile == "default" else f"{title} ({profile})"


Line = Mapping[str, Any]
Changes = Callable[[int, int], Mapping[str, tuple[Mapping[str, Any], Comparison]]]
"""Function (first step, last step) -> metric -> (paired difference of the two validations, its comparison)."""

NOT_METRICS = frozenset({"step", "attempt", "kind", "time"})
ENDS = ("_low", "_high")
SMALL = (380, 190)
"""Width and height of the charts of a gallery."""

HEALTH = {
    "rollout/dead_group_share": "Dead groups (share)",
    "rollout/truncated_share": "Truncated responses (share)",
    "rollout/response_tokens_mean": "Response length (tokens, mean)",
    "episode/turns": "Turns per episode",
    "episode/calls": "Calls of tools per episode",
    "episode/tool_errors": "Failed calls of tools (share)",
    "policy/entropy": "Entropy (nats per token)",
    "optim/grad_norm": "Gradient norm (before clipping)",
    "policy/sampler_gap_max": "Sampler gap (largest, nats)",
    "policy/clip_share": "Clipped tokens (share)",
    "reward/errors": "Failed rewards (samples)",
    "reward/unavailable": "Rewards that were unavailable (samples)",
    "reward/timeouts": "Responses that hung the reward (samples)",
    "reward/outage_seconds": "Waiting for a service of the reward (seconds)",
    "loss/kl": "KL to the reference (nats)",
    "policy/kl_in_reward": "KL to the reference (nats)",
    "loss/value": "Loss of the critic",
    "value/explained_variance": "Variance explained by the critic (share)",
    "optim/lr": "Learning rate",
    "rollout/tokens_per_second": "Sampling speed (tokens per second)",
    "time/step_seconds": "Seconds per step",
}
"""Training metric that warns early -> its title. The charts are in this order."""
TITLES = {
    "reward/mean": "Reward in training",
    "reward/accuracy": "Accuracy in training",
    "loss/cross_entropy": "Loss (cross-entropy, nats per token)",
    "rollout/response_tokens_p10": "Response length (tokens, 10th percentile)",
    "rollout/response_tokens_p50": "Response length (tokens, median)",
    "rollout/response_tokens_p90": "Response length (tokens, 90th percentile)",
    "memory/peak_bytes": "Peak memory (bytes)",
    **HEALTH,
    **HEALTH_TITLES,
}
SETTINGS = {"optim/lr", "policy/kl_coef", "train/tokens_per_row", "rollout/samples", "data/rows", "optim/updates"}
"""Training metrics without noise, which jump when a setting changes: they have no moving mean."""
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
        pairs: set and setting of each of its evaluations at a step, as in the names of metrics: "validation/pass8".
    """

    label: str
    colour: int
    train: Sequence[Line] = ()
    validation: Sequence[Line] = ()
    events: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    problem: str = ""
    pairs: Sequence[SetAndSetting] = ()


@dataclass(frozen=True)
class Chart:
    """Titled chart of the page."""

    title: str
    svg: Markup
    name: str = ""


@dataclass(frozen=True)
class Headline:
    """Metric in the top row of the page, with its first and its last value."""

    title: str
    start: Mapping[str, Any] | None
    end: Mapping[str, Any]
    notes: Sequence[str] = field(default_factory=tuple)


def read_curves(run: Run, label: str, colour: int) -> RunCurves:
    """Return the curves of a run. If the metrics are damaged, `problem` is set and no error is raised."""
    try:
        train, validation, events = (run.metrics(kind) for kind in ("train", "validation", "event"))
    except StoreError as error:
        return RunCurves(label, colour, problem=error.message)
    marks = [
        Mark(a.from_step, f"{label}: attempt {a.number} resumed from step {a.from_step}", colour)
        for a in run.manifest.attempts
        if a.number > 1
    ]
    return RunCurves(label, colour, train, validation, events, marks, pairs=sets_and_settings(run))


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
    names = dict.fromkeys(n for r in runs for n in _names(r.train) if n.startswith(("reward/part/", "reward/source/")))
    return [_train_chart(runs, n, title=n.removeprefix("reward/").replace("part/", "")) for n in names]


def validation_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return charts of all validation metrics except the leading ones (they have large charts).

    A metric of several settings has one chart per set, with a line per setting.
    """
    metrics = (n for r in runs for n in _names(r.validation) if n.startswith("eval/") and not n.endswith(ENDS))
    pairs = list(dict.fromkeys(pair for r in runs for pair in r.pairs))
    charts: dict[str, list[Series]] = {}
    titles: dict[str, str] = {}
    for name in dict.fromkeys(metrics):
        short = name.removeprefix("eval/")
        if short in (*LEADING, "metric", "is_best", "epoch") or is_reflection(f"/{short}"):
            continue  # the tables of evaluations have reflection
        place, pair, metric = validation_metric_parts(short, pairs)
        key = f"{place}/{metric}" if place else metric
        titles.setdefault(key, ", ".join(filter(None, (VALIDATION_TITLES.get(metric, metric), place))))
        for run in runs:
            dots = _dots(run, name)
            if dots is not None and pair is not None and pair.setting:
                shift = list(dict.fromkeys(c.setting for c in pairs)).index(pair.setting)
                label = f"{run.label}, {pair.setting}"
                dots = replace(dots, name=label, colour=dots.colour + shift * len(runs))
            charts.setdefault(key, []).extend([dots] if dots is not None else [])
    marks, (width, height) = _marks(runs), SMALL
    return [
        Chart(titles[key], line_chart(titles[key], series, marks=marks, width=width, height=height), key)
        for key, series in charts.items()
    ]


def health_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return charts of early warnings: dead groups, truncation, entropy, gradient, gap between sampler and trainer."""
    there = {n for r in runs for n in _names(r.train)}
    return [_train_chart(runs, n) for n in (*HEALTH, *HEALTH_TITLES) if n in there]


def reflection_charts(runs: Sequence[RunCurves]) -> tuple[list[Chart], list[Chart]]:
    """Return the charts of reflection: of its ratios and rates, and of the counts of words that occur."""
    shares, words = reflection_names([line for r in runs for line in r.train])
    return [_train_chart(runs, n) for n in shares], [_train_chart(runs, n) for n in words]


def training_title(name: str) -> str:
    """Return the title of a training metric."""
    return reflection_title(name) if is_reflection(name) else TITLES.get(name, name)


def other_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Return charts of all training metrics that have no chart elsewhere."""
    large = (metric for name, ends in TRAINED.values() for metric in (name, *(ends or ())))
    shown = {*HEALTH, *HEALTH_TITLES, "loss/cross_entropy", *large}
    names = dict.fromkeys(n for r in runs for n in _names(r.train))
    elsewhere = ("reward/part/", "reward/source/")
    return [_train_chart(runs, n) for n in names if not (n in shown or n.startswith(elsewhere) or is_reflection(n))]


def validated_ends(run: RunCurves, metric: str) -> tuple[Line, Line] | None:
    """Return the first and the last validation line that has a metric; None if no line has it."""
    measured_lines = [line for line in run.validation if is_finite(line.get(f"eval/{metric}"))]
    return (measured_lines[0], measured_lines[-1]) if measured_lines else None


def headlines(run: RunCurves) -> list[Headline]:
    """Return reward and accuracy at the first and the last validation, then those of training, or its loss."""
    result = []
    for metric in LEADING:
        if (ends := validated_ends(run, metric)) is not None:
            (first, last), name = ends, f"eval/{metric}"
            start = _point(first, name) if first is not last else None
            result.append(Headline(f"Validation {metric}", start, _point(last, name)))
    for name, title in (
        ("reward/mean", "Training reward"),
        ("reward/accuracy", "Training accuracy"),
        ("loss/cross_entropy", "Training loss"),
    ):
        values = [(counted(n["step"]), n[name]) for n in run.train if is_finite(n.get(name))]
        if values:
            result.append(_averaged(title, values))
    return result


def mean_value(lines: Sequence[Line], name: str) -> float | None:
    """Return the mean of a metric over all lines that have it."""
    values = [n[name] for n in lines if is_finite(n.get(name))]
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
    ends = [line.get(f"{name}{end}") for end in ENDS]
    low, high = ends if all(map(is_finite, ends)) else (None, None)
    return {"value": line[name], "low": low, "high": high, "step": line["step"]}


def _leading_series(run: RunCurves, metric: str) -> list[Series]:
    name, ends = TRAINED[metric]
    train = _series(run, run.train, name, f"{run.label}, training", ends)
    return [series for series in (train, _dots(run, f"eval/{metric}")) if series]


def _dots(run: RunCurves, name: str) -> Series | None:
    label = f"{run.label}, validation"
    series = _series(run, run.validation, name, label, (f"{name}_low", f"{name}_high"))
    return replace(series, dots=True) if series else None


def _train_chart(runs: Sequence[RunCurves], name: str, *, title: str = "", large: bool = False) -> Chart:
    series = [s for r in runs if (s := _series(r, r.train, name, r.label)) is not None]
    title = title or training_title(name)
    width, height = (WIDTH, HEIGHT) if large else SMALL
    return Chart(title, line_chart(title, series, marks=_marks(runs), width=width, height=height), name)


def _series(
    run: RunCurves, lines: Sequence[Line], name: str, label: str, ends: tuple[str, str] | None = None
) -> Series | None:
    # Older versions logged a learning rate of 0 for steps without an update.
    no_rate = name == "optim/lr"
    lines_with_value = [
        n for n in lines if is_finite(n.get(name)) and not (no_rate and n[name] == 0 and "optim/grad_norm" not in n)
    ]
    if not lines_with_value:
        return None
    low = high = ()
    if ends is not None and any(is_finite(n.get(ends[0])) and is_finite(n.get(ends[1])) for n in lines_with_value):
        low, high = ([float(n[e]) if is_finite(n.get(e)) else math.nan for n in lines_with_value] for e in ends)
    trained = lines is run.train
    steps = [float(counted(n["step"]) if trained else n["step"]) for n in lines_with_value]
    smooth = trained and name not in SETTINGS
    return Series(label, steps, [float(n[name]) for n in lines_with_value], low, high, run.colour, smooth=smooth)


def _marks(runs: Sequence[RunCurves]) -> list[Mark]:
    return [m for r in runs for m in r.marks]


def _names(lines: Sequence[Line]) -> Mapping[str, None]:
    """Return the names of the numeric metrics in the lines, in order of first appearance."""
    return dict.fromkeys(k for n in lines for k, v in n.items() if k not in NOT_METRICS and is_finite(v))
