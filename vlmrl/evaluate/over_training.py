"""A run's evaluations of the same rows over checkpoints or epochs: mean, maximum, and the checkpoint that was selected.

Checkpoints are selected by validation alone: `Manifest.best`, else the last one. The maximum on other rows is shown
with a label, because it is chosen on the rows that it is measured on: it is too high for new rows, by several points
for 100 rows and 30 checkpoints that are all equally good.

Runs are validated at epochs if their recipes set `eval.every_epochs`. Several runs that differ only in their seed are
one setting: its numbers are means over runs, with the standard deviation between them. The mean over epochs is that of
all validations after the start; the maximum is taken per run, and counts the start, because validation may select it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, TypeGuard

from vlmrl.errors import StoreError
from vlmrl.evaluate.paired import scored_alike, scored_by
from vlmrl.evaluate.significance import LEADING, leading_metrics
from vlmrl.metric import metric_facts
from vlmrl.recipe.load import leaves, with_defaults
from vlmrl.recipe.tables import is_test_split
from vlmrl.recipe.toml_lines import dotted
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import ON_TEST, image_condition, read_summary, role_of, without_step
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.runs import Run


def over_checkpoints(run: Run) -> list[dict[str, Any]]:
    """Return one entry per group of evaluations of the same rows by one reward, and per metric, if of several steps.

    Returns: see `summary_over_steps`, with "evaluation": the name without the step, and the reward if there are several
        of this name. Damaged evaluations are left out, and those with changed images.
    """
    groups: dict[str, list[list[Mapping[str, Any]]]] = {}
    for folder in layout.eval_dirs(run.dir):
        try:
            summary = read_summary(folder)
        except StoreError:
            continue
        meta = summary.get("meta") or {}
        if step_of(summary) is not None and image_condition(meta) is None:
            same = groups.setdefault(without_step(folder.name), [])
            # The run's own reward scored those that do not record it.
            alike = (group for group in same if scored_alike(group[0].get("meta") or {}, meta) is not False)
            if (group := next(alike, None)) is None:
                same.append(group := [])
            group.append(summary)
    entries = []
    for name, summaries in ((name, group) for name, same in groups.items() for group in same):
        words = f", scored by {scored_by(summaries[0]['meta'])}" if len(groups[name]) > 1 else ""
        for metric in leading_metrics(dict.fromkeys(name for summary in summaries for name in summary["metrics"])):
            entry = summary_over_steps(summaries, metric, selected_step(run))
            if entry is None:
                continue
            if entry["selected"] and entry["selected"]["by"] == "validation" and ON_TEST in run.manifest.labels:
                entry["selected"]["by"] = ON_TEST
            entries.append({"evaluation": name + words, **entry})
    return entries


def selected_step(run: Run) -> int | None:
    """Return the step that validation selected; None if there was no validation."""
    return run.manifest.best.step if run.manifest.best else None


def step_of(summary: Mapping[str, Any]) -> int | None:
    """Return the step of the evaluated checkpoint."""
    step = (summary.get("meta") or {}).get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def summary_over_steps(
    summaries: Iterable[Mapping[str, Any]], metric: str, selected: int | None
) -> dict[str, Any] | None:
    """Return mean, best and selected value of a metric over checkpoints; None for fewer than two trained ones.

    The weights that a run starts from (step 0) may be the selected ones, but do not count for mean and best.

    Args:
        selected: step that validation selected; None = there was no validation, and the last step counts.
    Returns: {"metric", "role": of the rows, "steps", "values", "mean", "best": {"step", "value", "label"}, "selected":
        {"step", "value", "by": "validation" or "the last step"}, or None if that step was not evaluated}. "by" is
        ON_TEST in `over_checkpoints` if the run was validated on test rows.
    """
    values: dict[int, float] = {}
    roles: list[str] = []
    better = None
    for summary in summaries:
        step, entry = step_of(summary), summary["metrics"].get(metric)
        if step is not None and entry is not None and entry["value"] is not None:
            values[step] = float(entry["value"])
            roles.append(role_of(summary.get("meta") or {}))
            better = entry.get("better") or better
    steps = [step for step in sorted(values) if step > 0]
    if len(steps) < 2:
        return None
    lower = (better or metric_facts(metric).better) == "lower"
    best = (min if lower else max)(steps, key=lambda step: values[step])
    chosen, by = (steps[-1], "the last step") if selected is None else (selected, "validation")
    return {
        "metric": metric,
        "role": roles[-1],
        "steps": steps,
        "values": [values[step] for step in steps],
        "mean": sum(values[step] for step in steps) / len(steps),
        "best": {"step": best, "value": values[best], "label": best_label(len(steps), roles[-1])},
        "selected": {"step": chosen, "value": values[chosen], "by": by} if chosen in values else None,
    }


def best_label(num_steps: int, role: str) -> str:
    """Return the label of a maximum over checkpoints: which rows it was chosen on."""
    if role == "validation":
        return f"best of {num_steps} checkpoints, chosen on these validation rows"
    rows = {"test": "test rows", "training": "training rows"}.get(role, "rows")
    return f"best of {num_steps} checkpoints, chosen on these {rows} themselves: too good for new rows"


def words_of_steps(entry: Mapping[str, Any]) -> str:
    """Return an entry in words.

    Example: accuracy over 3 checkpoints: mean 0.610; 0.640 at step 200, which validation selected; 0.655 at step 300
        (best of 3 checkpoints, chosen on these test rows themselves: too good for new rows).
    """
    best, selected = entry["best"], entry["selected"]
    parts = [f"{entry['metric']} over {len(entry['steps'])} checkpoints: mean {entry['mean']:.3f}"]
    if selected is not None:
        by = selected["by"]
        which = {"validation": "which validation selected", ON_TEST: f"the best of a run {ON_TEST}"}.get(
            by, "the last one"
        )
        parts.append(f"{selected['value']:.3f} at step {selected['step']:,}, {which}")
    parts.append(f"{best['value']:.3f} at step {best['step']:,} ({best['label']})")
    return "; ".join(parts)


def picked_by_hand(folder: Path, run: Run | None) -> str:
    """Return a warning if an evaluation is one of several of the same rows, but not of the selected checkpoint; or "".

    Args:
        folder: the evaluation that the user named.
    """
    if run is None:
        return ""
    name, others = without_step(folder.name), _steps_by_name(layout.eval_dirs(run.dir))
    steps, own = others.get(name, {}), _steps_by_name([folder]).get(name, {})
    if len(steps) < 2 or not own:
        return ""
    (step, role), chosen = next(iter(own.items())), selected_step(run)
    if role == "validation" or step == (max(steps) if chosen is None else chosen):
        return ""
    rule = f"validation selected step {chosen:,}" if chosen is not None else f"the last one is step {max(steps):,}"
    return (
        f"{folder.name} is 1 of {len(steps)} checkpoints evaluated on these rows, and {rule}: "
        f"if step {step:,} was taken for its result here, that result is too good for new rows"
    )


def _steps_by_name(folders: Sequence[Path]) -> dict[str, dict[int, str]]:
    """Return evaluation without its step -> {step: role of its rows}."""
    steps: dict[str, dict[int, str]] = {}
    for folder in folders:
        try:
            summary = read_summary(folder)
        except StoreError:
            continue
        if (step := step_of(summary)) is not None:
            steps.setdefault(without_step(folder.name), {})[step] = role_of(summary.get("meta") or {})
    return steps


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
            kept = (n for n in sorted(values) if not (n.endswith("seed") or n.startswith(FREE_KEYS)))
            key = tuple((name, repr(values[name])) for name in kept)
        groups.setdefault(key, []).append(run)
    return list(groups.values())


def over_epochs(settings: Sequence[tuple[str, Sequence[RunEpochs]]]) -> list[dict[str, Any]]:
    """Return the results of settings over epochs, one entry per metric of a set and setting of sampling; JSON values.

    Args:
        settings: (label, validations of its runs).
    Returns: each entry has "metric": `<set>/<setting>/<metric>`, "role": test or validation, "settings":
        one mapping per setting that has the metric: {"label", "kind", "runs": names, "epochs": number of validations
        after the start, "base", "mean", "max", "selected": each a band {"mean", "sd", "runs"} over runs, or None, "at"
        and "selected_at": epoch of each run's maximum and of the selected one, "best_of": label of the maximum,
        "paper": column -> published number}.
    """
    names = dict.fromkeys(name for _, runs in settings for run in runs for name in run.values)
    entries = []
    for name in names:
        role = "test" if any(is_test_split(word) for word in name.split("/")[:-1]) else "validation"
        rows = [
            _of_setting(label, [run for run in runs if name in run.values], name, role)
            for label, runs in settings
            if any(name in run.values for run in runs)
        ]
        rows = [row for row in rows if row["mean"] is not None]
        if rows:
            entries.append({"metric": name, "role": role, "settings": rows})
    return entries


def notes_of_maxima(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return which rows the maxima of `over_epochs` were chosen on, and of how many epochs, for each setting."""
    labels: dict[str, dict[str, None]] = {}
    for setting in (setting for entry in entries for setting in entry["settings"]):
        labels.setdefault(setting["best_of"], {})[setting["label"]] = None
    return [f"{', '.join(settings)}: {label}" for label, settings in labels.items()]


def words_of_start(setting: Mapping[str, Any]) -> str:
    """Return the epochs that validation selected, if one is epoch 0; else "". Example: at epochs 0, 2."""
    at = dict.fromkeys(setting["selected_at"])
    return f"at epoch{'s' * (len(at) > 1)} {', '.join(f'{epoch:g}' for epoch in at)}" if 0 in at else ""


def _of_setting(label: str, runs: Sequence[RunEpochs], name: str, role: str) -> dict[str, Any]:
    """Return the numbers of one setting on one metric; see `over_epochs`."""
    base, mean, best, at, chosen = [], [], [], [], []
    for run in runs:
        values = zip(run.values[name], run.epochs, run.steps, strict=True)
        points = [(value, epoch, step) for value, epoch, step in values if value is not None]
        base += [value for value, epoch, _ in points if epoch == 0]
        if later := [value for value, epoch, _ in points if epoch > 0]:
            mean.append(fmean(later))
            top = max(points, key=lambda point: point[0])
            best.append(top[0])
            at.append(top[1])
        chosen += [(value, epoch) for value, epoch, step in points if step == run.selected]
    epochs = max(sum(epoch > 0 for epoch in run.epochs) for run in runs)
    counted = f"epoch{'s' * (epochs != 1)}{' and the start' * bool(base)}"
    return {
        "label": label,
        "kind": runs[0].kind,
        "runs": [run.name for run in runs],
        "epochs": epochs,
        "base": band_of(base),
        "mean": band_of(mean),
        "max": band_of(best),
        "selected": band_of([value for value, _ in chosen]),
        "at": at,
        "selected_at": [epoch for _, epoch in chosen],
        "best_of": best_label(epochs, role).replace("checkpoints", counted),
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
