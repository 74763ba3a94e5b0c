"""Results over the epochs of runs: before training, mean and maximum over epochs, and the checkpoint that was selected.

Runs are validated at epochs if their recipes set `eval.every_epochs`. Several runs that differ only in their seed are
one setting: its numbers are means over runs, with the standard deviation between them. The mean over epochs is that of
all validations after the start. The maximum over epochs is taken per run. It is chosen on the rows that it is measured
on, and its label says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any, TypeGuard

from vlmrl.errors import StoreError
from vlmrl.evaluate.over_checkpoints import best_label, selected_step
from vlmrl.evaluate.tested import LEADING
from vlmrl.recipe.load import leaves, with_defaults
from vlmrl.recipe.tables import is_test_split
from vlmrl.recipe.toml_lines import dotted
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.runs import Run

EPOCH = "eval/epoch"
"""Metric of a validation: number of passes over the data so far."""
PREFIX = "eval/"
WEIGHT = "rollout/samples"
"""Metric of a training step: the number of its responses, by which its means are weighted."""
EPOCH_MEANS = (
    "reward/accuracy",
    "rollout/response_tokens_mean",
    "rollout/response_tokens_p50",
    "rollout/response_tokens_p90",
    "rollout/truncated_share",
)
"""Training metrics whose mean over the responses of an epoch is shown."""
FREE_KEYS = ("log.",)
"""Beginnings of recipe keys that may differ between the runs of a setting, besides seeds."""


@dataclass(frozen=True)
class RunEpochs:
    """Validations of one run, one per epoch.

    Args:
        name: of the run.
        kind: "rl" or "sft".
        steps: step of each validation, from 0, [E].
        epochs: epochs of training before each validation, [E].
        values: `<set>/<setting>/<metric>`, with what a recipe names, -> value at each validation, None = none, [E].
        training: name of a training metric -> mean over the epoch that ends with each validation, [E].
        selected: step that validation selected; None = none.
        numbers: `[paper.numbers]` of its recipe.
        source: of these numbers.
    """

    name: str
    kind: str
    steps: Sequence[int]
    epochs: Sequence[float]
    values: Mapping[str, Sequence[float | None]]
    training: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    selected: int | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""


def read_epochs(run: Run) -> RunEpochs | None:
    """Return the validations of a run over its epochs; None if it has none, or its recipe sets no `every_epochs`.

    Raises: StoreError when the metrics are damaged.
    """
    lines = [line for line in run.metrics("validation") if is_finite(line.get(EPOCH))]
    if not lines:
        return None
    steps, train = [line["step"] for line in lines], run.metrics("train")
    names = _results(dict.fromkeys(name for line in lines for name in line))
    means = {name: epoch_means(train, steps, name) for name in EPOCH_MEANS}
    paper = (_recipe(run) or {}).get("paper") or {}
    return RunEpochs(
        run.manifest.name or run.id,
        run.manifest.kind,
        steps,
        [float(line[EPOCH]) for line in lines],
        {name.removeprefix(PREFIX): [_number(line.get(name)) for line in lines] for name in names},
        {name: values for name, values in means.items() if any(value is not None for value in values)},
        selected_step(run),
        paper.get("numbers") or {},
        str(paper.get("source") or ""),
    )


def _results(names: Iterable[str]) -> list[str]:
    """Return the metrics of a validation that are summarised, in order.

    They are, for each set and setting: accuracy, else reward; pass@k and maj@k of the largest k. The same metrics
    without set and setting are left out if others have one.
    """
    places: dict[str, dict[str, str]] = {}
    for name in names:
        place, _, metric = name.rpartition("/")
        kind, at, k = metric.partition("@")
        repeated = at and kind in ("pass", "maj") and k.isdigit()
        is_part = place.endswith("/part")
        if f"{place}/".startswith(PREFIX) and not is_part and (metric in LEADING or repeated):
            kinds = places.setdefault(place, {})
            if kind not in kinds or int(k or 0) > int(kinds[kind].partition("@")[2] or 0):
                kinds[kind] = name
    results = []
    for place, kinds in places.items():
        if len(places) > 1 and f"{place}/" == PREFIX:
            continue
        leading = next((kinds[kind] for kind in LEADING if kind in kinds), None)
        results += [leading] if leading else []
        results += [name for kind, name in kinds.items() if kind not in LEADING]
    return results


def epoch_means(lines: Iterable[Mapping[str, Any]], steps: Sequence[int], name: str) -> list[float | None]:
    """Return the mean of a training metric over the steps before each validation and after the one before it.

    The steps are weighted by their responses. None = there is no such step, as before a validation at the start.

    Args:
        lines: the `train` lines of a run.
        steps: steps of the validations, in increasing order.
    Example: validations at steps 0, 2, 3; values 0.1 and 0.3 (8 responses each) at steps 0 and 1, 0.5 at step 2 ->
        [None, 0.2, 0.5].
    """
    sums, weights = [0.0] * len(steps), [0.0] * len(steps)
    for line in lines:
        index = next((i for i, step in enumerate(steps) if line["step"] < step), None)
        value, weight = _number(line.get(name)), _number(line.get(WEIGHT, 1))
        if index is not None and value is not None and weight:
            sums[index] += weight * value
            weights[index] += weight
    return [total / weight if weight else None for total, weight in zip(sums, weights, strict=True)]


def group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Return the runs in settings: runs whose recipes differ only in seeds are together. Order of first appearance.

    A run whose recipe cannot be read is alone.
    """
    groups: dict[Any, list[Run]] = {}
    for run in runs:
        recipe = _recipe(run)
        key: Any = run.id
        if recipe is not None:
            values = {dotted(name): value for name, value in leaves(recipe)}
            key = tuple((name, repr(value)) for name, value in sorted(values.items()) if not _may_differ(name))
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def over_epochs(settings: Sequence[tuple[str, Sequence[RunEpochs]]]) -> list[dict[str, Any]]:
    """Return the results of settings over epochs, one entry per metric of a set and setting of sampling; JSON values.

    Args:
        settings: (label, validations of its runs).
    Returns: each entry has "metric": `<set>/<setting>/<metric>`, "role": test or validation, "label" of its maxima,
        "settings": one mapping per setting that has the metric: {"label", "kind", "runs": names, "epochs": number of
        validations after the start, "base", "mean", "max", "selected": each a band {"mean", "sd", "runs"} over runs, or
        None, "at": epoch of each run's maximum, "paper": column -> published number}.
    """
    names = dict.fromkeys(name for _, runs in settings for run in runs for name in run.values)
    entries = []
    for name in names:
        rows = [
            _of_setting(label, [run for run in runs if name in run.values], name)
            for label, runs in settings
            if any(name in run.values for run in runs)
        ]
        rows = [row for row in rows if row["mean"] is not None]
        if rows:
            role = "test" if any(is_test_split(word) for word in name.split("/")[:-1]) else "validation"
            label = best_label(max(row["epochs"] for row in rows), role).replace("checkpoints", "epochs")
            entries.append({"metric": name, "role": role, "label": label, "settings": rows})
    return entries


def _of_setting(label: str, runs: Sequence[RunEpochs], name: str) -> dict[str, Any]:
    """Return the numbers of one setting on one metric; see `over_epochs`."""
    base, mean, best, at, selected = [], [], [], [], []
    for run in runs:
        points = list(zip(run.epochs, run.steps, run.values[name], strict=True))
        later = [(value, epoch, step) for epoch, step, value in points if epoch > 0 and value is not None]
        base += [value for epoch, _, value in points if epoch == 0 and value is not None]
        if later:
            mean.append(fmean(value for value, _, _ in later))
            top = max(later, key=lambda point: point[0])
            best.append(top[0])
            at.append(top[1])
        selected += [value for _, step, value in points if step == run.selected and value is not None]
    return {
        "label": label,
        "kind": runs[0].kind,
        "runs": [run.name for run in runs],
        "epochs": max(sum(epoch > 0 for epoch in run.epochs) for run in runs),
        "base": band_of(base),
        "mean": band_of(mean),
        "max": band_of(best),
        "selected": band_of(selected),
        "at": at,
        "paper": published(runs[0].numbers, name, runs[0].kind),
    }


def band_of(values: Sequence[float]) -> dict[str, Any] | None:
    """Return {"mean", "sd": sample standard deviation, None for one value, "runs": the values}; None without values."""
    if not values:
        return None
    return {"mean": fmean(values), "sd": stdev(values) if len(values) > 1 else None, "runs": list(values)}


def published(numbers: Mapping[str, Any], name: str, kind: str) -> dict[str, float]:
    """Return the published numbers for the columns base, mean and max, for a run of a kind.

    Args:
        numbers: `[paper.numbers]`: metric -> number, or a table with the columns `base`, and `rl`, `rl_max`, `sft` and
            `sft_max` for means and maxima over epochs.
    """
    value = numbers.get(name)
    if not isinstance(value, Mapping):
        return {"mean": float(value)} if is_finite(value) else {}
    columns = {"base": "base", "mean": kind, "max": f"{kind}_max"}
    return {column: float(value[key]) for column, key in columns.items() if is_finite(value.get(key))}


def _recipe(run: Run) -> Mapping[str, Any] | None:
    try:
        recipe = read_resolved(run.dir).get("recipe")
    except StoreError:  # where the recipe is shown, its damage is reported
        return None
    return with_defaults(recipe) if isinstance(recipe, Mapping) else None


def _may_differ(key: str) -> bool:
    return key.endswith("seed") or key.startswith(FREE_KEYS)


def is_finite(value: Any) -> TypeGuard[float]:
    """Return whether a value of a metric is a number that can be drawn: finite, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _number(value: Any) -> float | None:
    return float(value) if is_finite(value) else None


def published_here(paper: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return metric -> published number or text of one evaluation, from the `[paper]` table of its recipe.

    A number under `<set>/<setting>/<metric>` belongs to the evaluations of that set and setting; a table of columns
    becomes a text, such as "base 0.29, rl 0.352".

    Args:
        meta: the evaluation's record.
    """
    place = "".join(f"{word}/" for word in (meta.get("split"), meta.get("setting")) if word)
    shown: dict[str, Any] = {}
    for key, value in (paper.get("numbers") or {}).items():
        is_table = isinstance(value, Mapping)
        text = ", ".join(f"{column} {number}" for column, number in value.items()) if is_table else value
        if place and key.startswith(place):
            shown[key.removeprefix(place)] = text
        elif not is_table:
            shown[key] = text
    return shown
