"""Evaluations in a report: tables with intervals and paired differences, figures of tasks, results over epochs.

Those over epochs are a table of settings, and curves whose bands are the spread between runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.evaluate.blind_probe import probe_of
from vlmrl.evaluate.compare import differences, matched, one_reward
from vlmrl.evaluate.estimates import excludes_zero, range_of
from vlmrl.evaluate.measures import absent_words, measure_lines, measured_names
from vlmrl.evaluate.metrics import task_problems
from vlmrl.evaluate.over_training import (
    EPOCH_MEANS,
    RunEpochs,
    group_runs,
    is_finite,
    notes_of_maxima,
    over_checkpoints,
    over_epochs,
    published_here,
    read_epochs,
    step_of,
    words_of_start,
    words_of_steps,
)
from vlmrl.evaluate.paired import OTHER_REWARDS, Comparison, comparison, sampled_apart, scored_by
from vlmrl.evaluate.records import Evaluation, read_evaluation
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.evaluate.set_metrics import set_metrics_of
from vlmrl.evaluate.significance import LEADING, rows_needed_of, tests_of, words_of_power, words_of_test
from vlmrl.recipe.load import recipe_from_resolved
from vlmrl.report.curves import SMALL, Chart, training_title
from vlmrl.report.plots import EPOCH, FigureView, Series, confidence_figures, figure_views, interval_bar, line_chart
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import (
    ROLES,
    image_condition,
    made_in_training,
    method_of,
    read_summary,
    role_label,
    role_of,
    sampling_words,
    set_method_of,
    shown_label,
    without_step,
)
from vlmrl.store.kept_recipe import read_resolved
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run
from vlmrl.tasks.reflection import PREFIXES, RATE, RATIOS

DIFFERENCES = ("reward", "accuracy", "brier", "parse_failure")
"""Metrics whose paired difference is displayed, besides every `accuracy/<level>`."""
MAX_FIGURE_COLUMNS = 4
"""Maximum number of evaluations per table whose figures are displayed."""


@dataclass(frozen=True)
class EvalColumn:
    """One evaluation, which is a column of a table. `is_selected`: of the checkpoint that validation selected."""

    label: str
    colour: int
    summary: Mapping[str, Any]
    folder: Path
    is_selected: bool = False
    run: Run | None = None

    @property
    def meta(self) -> Mapping[str, Any]:
        """Description of the evaluation; empty if the summary has none."""
        return self.summary.get("meta") or {}


def eval_columns(run: Run, label: str, colour: int) -> tuple[list[EvalColumn], list[str]]:
    """Return (columns, problems).

    Of the validations during training, only the one of the best step (if there is none, of the last step) is used.
    """
    columns: list[EvalColumn] = []
    during: dict[str, EvalColumn] = {}
    problems: list[str] = []
    best = run.manifest.best.step if run.manifest.best else None
    for folder in layout.eval_dirs(run.dir):
        try:
            summary = read_summary(folder)
            column = EvalColumn(label, colour, summary, folder, best is not None and step_of(summary) == best, run)
        except StoreError as error:
            problems.append(f"Evaluation {folder.name}: {error.message}.")
            continue
        if not column.meta.get("during"):
            columns.append(column)
            continue
        # Names end with the step and are sorted: a later validation replaces an earlier one, but never the best one.
        kind = _kind_of(column)
        if kind not in during or during[kind].meta.get("step") != best:
            during[kind] = column
    return [*columns, *during.values()], problems


def eval_tables(columns: Sequence[EvalColumn]) -> list[dict[str, Any]]:
    """Return one table per kind of evaluation (split, source, sampling).

    The metrics are its rows, the runs its columns, and paired differences are the last column.
    """
    groups: dict[str, list[EvalColumn]] = {}
    for column in columns:
        groups.setdefault(_kind_of(column), []).append(column)
    tables = []
    for kind, same in groups.items():
        group = _told_apart(same)
        names = list(
            dict.fromkeys(n for c in group for n in c.summary["metrics"] if n not in measured_names(c.summary))
        )
        compared = _compared(group)
        differences, tests = _differences(compared) if compared else ({}, [])
        paper = next((p for c in group if (p := c.meta.get("paper"))), {})
        baselines = next((b for c in group if (b := c.summary.get("baselines"))), {})
        numbers = published_here(paper, group[0].meta)
        rows = [_eval_row(n, group, differences, numbers, baselines) for n in names]
        tables.append(
            {
                "kind": kind,
                "notes": [*_notes(group), *tests],
                "columns": group,
                "rows": rows,
                "paper": paper if numbers else {},
                "baselines": bool(baselines),
                "differences": bool(differences),
                "against": f"{compared[1].label} - {compared[0].label}" if compared and differences else "",
                "measures": _measures(group),
                "figures": _figures(group) if not group[0].meta.get("during") else [],
            }
        )
    return sorted(tables, key=_rank)


def _told_apart(group: Sequence[EvalColumn]) -> list[EvalColumn]:
    """Return the columns of a table; those of one run and one step have the evaluation's name in their label."""
    keys = [(c.folder.parent, c.meta.get("step")) for c in group]
    names = [f"{c.label}, {without_step(c.folder.name)}" for c in group]
    return [
        replace(c, label=name) if keys.count(key) > 1 else c for c, key, name in zip(group, keys, names, strict=True)
    ]


def _measures(group: Sequence[EvalColumn]) -> list[dict[str, Any]]:
    """Return the measures of each evaluation of a table that has any, or that lacks some."""
    views = [
        {"label": c.label, "lines": measure_lines(c.summary), "absent": absent_words(c.summary)}
        for c in group
        if not c.meta.get("during")
    ]
    return [view for view in views if view["lines"] or view["absent"]]


def _rank(table: Mapping[str, Any]) -> tuple[int, bool]:
    """Return a sort key: tables whose rows measure best the performance on new rows come first.

    For the same rows, evaluations by `vlmrl eval` come before validations during training.
    """
    metas = [c.meta for c in table["columns"]]
    return max(ROLES.index(role_of(m)) for m in metas), any(m.get("during") for m in metas)


def _notes(group: Sequence[EvalColumn]) -> list[str]:
    """Return notes about the rows of a table, such as their role, and the method of its intervals."""
    labels = {c.label: role_label(c.meta) for c in group}
    notes = [f"{name}: {label}." for name, label in labels.items() if label]
    if len(set(labels.values())) == 1:
        notes = [f"These are {label}." for label in {*labels.values()} if label]
    if ways := sampled_apart([c.meta for c in group]):
        notes.append(f"These were evaluated with different {', '.join(ways)}.")
    if not all(one_reward(group[0], c) for c in group):
        notes += [f"{c.label}: scored by {words}." for c in group if (words := scored_by(c.meta))]
    notes += [
        f"{c.label}: pictures of {n:,} responses were not kept, because they were too large."
        for c in group
        if (n := c.summary.get("artifacts_left_out"))
    ]
    notes += [f"{c.label}, blind probe: {text}" for c in group for text in _probe_texts(c)]
    notes += [f"{c.label}: {problem}" for c in group for problem in task_problems({**c.summary, "figures_problem": ""})]
    sets = {f"Intervals {words}." for c in group if (words := set_method_of(c.summary))}
    return [*notes, *(f"Intervals: {m}." for m in dict.fromkeys(method_of(c.summary) for c in group)), *sorted(sets)]


def _probe_texts(column: EvalColumn) -> list[str]:
    """Return how much the model needs the images, if the column was made with changed ones; [] for others."""
    if image_condition(column.meta) is None:
        return []
    try:
        probe = probe_of(column.folder, read_evaluation(column.folder))
    except StoreError as error:
        return [f"{error.message}."]
    return ["The normal evaluation that belongs to it is gone."] if probe is None else probe["conclusion"]


def _kind_of(column: EvalColumn) -> str:
    """Return a key that is equal for evaluations in one table. For validations in training, it is the folder name."""
    meta = column.meta
    if not meta.get("split") or meta.get("during"):
        return without_step(column.folder.name) + (", during training" if meta.get("during") else "")
    words = [str(meta["split"]), str(meta.get("source") or "")]
    sampling_text = sampling_words(meta)
    rows = f"first {meta['max_rows']} rows" if meta.get("max_rows") else ""
    return ", ".join(w for w in (*words, sampling_text, rows, shown_label(meta)) if w)


def _figures(group: Sequence[EvalColumn]) -> list[FigureView]:
    """Return the figures of the evaluations of a table."""
    views: list[FigureView] = []
    for column in group[:MAX_FIGURE_COLUMNS]:
        figures = column.summary.get("figures")
        if figures is None:
            try:
                figures = confidence_figures(read_evaluation(column.folder).rows)
            except StoreError:
                continue
        views += figure_views(figures, column.label, column.colour)
        if problem := column.summary.get("figures_problem"):
            views.append(FigureView(f"{column.label}: figures", f"They could not be made: {problem}"))
    return views


def _compared(group: Sequence[EvalColumn]) -> tuple[EvalColumn, EvalColumn] | None:
    """Return one column of the first and one of the last run: at the step that validation selected, else the last.

    Two that one reward scored come before others.

    It is None for columns of a single run.
    """
    places = group[0].folder.parent, group[-1].folder.parent
    if places[0] == places[1]:
        return None
    own = [
        sorted([c for c in group if c.folder.parent == place], key=lambda c: (c.is_selected, group.index(c)))[::-1]
        for place in places
    ]
    a, b = matched(own, "AB")
    return (a, b) if a and b else (own[0][0], own[1][0])


def _differences(compared: tuple[EvalColumn, EvalColumn]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return (the paired differences that are shown, notes) of the second evaluation to the first.

    Both are empty if the two share no rows. The notes have the tests of the differences, and the number of rows that
    would show a small one.
    """
    pair = _read_pair(*(c.folder for c in compared))
    if not pair:
        return {}, []
    before, after = pair
    alike, of_reward = one_reward(*compared), any("accuracy_of" in e.summary for e in pair)
    columns, every = differences(after, before)
    of_metrics = {n: d for n, d in every.items() if comparison(n, d, alike, of_reward) != "other reward"}
    columns = {n: c for n, c in columns.items() if n in of_metrics and n in LEADING}
    steps = [f", step {c.meta['step']}" if c.meta.get("step") is not None else "" for c in compared]
    letters = f"A = {compared[0].label}{steps[0]}; B = {compared[1].label}{steps[1]}"
    notes = [] if alike else [f"{OTHER_REWARDS} ({letters}): what comes from the reward is not compared."]
    notes += [f"Paired test ({letters}): {words_of_test(name, test)}." for name, test in tests_of(columns).items()]
    if power := rows_needed_of(columns):
        notes.append(f"Rows needed {words_of_power(power)}.")
    shown = {*DIFFERENCES, *set_metrics_of(after.summary)}
    return {n: d for n, d in of_metrics.items() if n in shown or n.startswith(("accuracy/", *BEGINNINGS))}, notes


def _read_pair(first: Path, last: Path) -> tuple[Evaluation, Evaluation] | None:
    try:
        return read_evaluation(first), read_evaluation(last)
    except StoreError:
        return None


def step_notes(run: Run, label: str) -> list[str]:
    """Return the results over the checkpoints of a run, on other rows than those of validation.

    A maximum over checkpoints has the label of the rows that it was chosen on.
    """
    entries = [entry for entry in over_checkpoints(run) if entry["role"] != "validation"]
    return [f"{label}, {entry['evaluation']}: {words_of_steps(entry)}." for entry in entries]


def validation_changes(run: Run, first: int, last: int) -> dict[str, tuple[dict[str, Any], Comparison]]:
    """Return leading metric -> (paired difference between the validations at two steps, its comparison).

    They are the validations that choose the best checkpoint. If there are several sources or settings, a name begins
    with its own. Return {} if one of them is missing or cannot be read.
    """
    try:
        chosen, _ = recipe_from_resolved(read_resolved(run.dir), where=str(run.dir)).eval.selecting
    except VlmrlError:  # where the recipe is shown, its damage is reported
        chosen = ""
    folders: dict[str, dict[int, Path]] = {}
    for folder in filter(made_in_training, layout.eval_dirs(run.dir)):
        summary = read_summary(folder)
        meta, step = summary["meta"], step_of(summary)
        if role_of(meta) == "validation" and meta.get("setting", "") == chosen and step in (first, last):
            folders.setdefault(str(meta.get("source")), {})[step] = folder
    changes: dict[str, tuple[dict[str, Any], Comparison]] = {}
    for source, at in folders.items():
        pair = _read_pair(at[first], at[last]) if len(at) == 2 else None
        if not pair:
            return {}
        columns, of_metrics = differences(pair[1], pair[0])
        tests, words = tests_of(columns), [source] * (len(folders) > 1) + [chosen] * bool(chosen)
        leading = {n: d for n, d in of_metrics.items() if n in LEADING}
        changes |= {" ".join([*words, n]): (d, comparison(n, d, test=tests.get(n))) for n, d in leading.items()}
    return changes


def _eval_row(
    name: str,
    group: Sequence[EvalColumn],
    differences: Mapping[str, Any],
    numbers: Mapping[str, Any],
    baselines: Mapping[str, Any],
) -> dict[str, Any]:
    metrics = [(c, c.summary["metrics"].get(name)) for c in group]
    values = [v for _, m in metrics if m for v in (m["value"], m["low"], m["high"]) if v is not None]
    share = bool(values) and min(values) >= 0 and max(values) <= 1
    scale = (0.0, 1.0) if share else (min(values), max(values)) if values else (0.0, 1.0)
    cells = [
        None
        if m is None or m["value"] is None
        else {**m, "bar": interval_bar(m["value"], m["low"], m["high"], scale, c.colour)}
        for c, m in metrics
    ]
    difference = differences.get(name)
    sure = bool(difference and excludes_zero(difference["low"], difference["high"]))
    return {
        "name": name,
        "cells": cells,
        "difference": difference,
        "sure": sure,
        "paper": numbers.get(name),
        "baseline": baselines.get(name),
    }


STEP_CURVES = (
    *EPOCH_MEANS,
    *(f"{prefix}{name}" for prefix in PREFIXES.values() for name in (*RATIOS, RATE)),
)
"""Training metrics whose mean over the runs of a setting is drawn per step, with a band."""
KINDS = {"rl": "RL", "sft": "SFT"}


@dataclass(frozen=True)
class RunGroup:
    """Runs that differ only in their seed, which a page shows as one setting.

    Args:
        label: kind and names of its runs.
        kind: "RL" or "SFT".
        epochs: validations of its runs.
        train: the training lines of its runs.
    """

    label: str
    kind: str
    colour: int
    epochs: Sequence[RunEpochs]
    train: Sequence[Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class EpochView:
    """Part of a page about results over epochs.

    Args:
        groups: the settings, in the order of the columns.
        rows: one per metric: {"metric", "cells": one per group, or None}.
        notes: about the maxima.
        charts: results over epochs.
        training: training metrics over epochs, then over steps.
        source: of the published numbers; "" without any.
        bands: whether a setting has several runs.
    """

    groups: Sequence[RunGroup]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str]
    charts: Sequence[Chart]
    training: Sequence[Chart]
    source: str
    bands: bool


def view_epochs(runs: Sequence[Run]) -> EpochView | None:
    """Return the part about epochs; None if no run was validated at epochs. Runs with damaged metrics are left out."""
    groups: list[RunGroup] = []
    for members in group_runs(runs):
        epochs: list[RunEpochs] = []
        train: list[Sequence[Mapping[str, Any]]] = []
        for run in members:
            try:
                read = read_epochs(run)
                lines = run.metrics("train") if read else []
            except StoreError:  # the page lists damaged files elsewhere
                continue
            if read:
                epochs.append(read)
                train.append(lines)
        if epochs:
            kind = KINDS.get(epochs[0].kind, epochs[0].kind)
            label = f"{kind}: {', '.join(one.name for one in epochs)}"
            groups.append(RunGroup(label, kind, len(groups), epochs, train))
    if not groups:
        return None
    entries = over_epochs([(group.label, group.epochs) for group in groups])
    rows = [_row(entry, groups) for entry in entries]
    return EpochView(
        groups,
        rows,
        notes_of_maxima(entries),
        [_epoch_chart(row["metric"], groups, row["cells"]) for row in rows],
        [*_training_by_epoch(groups), *_training_by_step(groups)],
        next((one.source for group in groups for one in group.epochs if one.numbers and one.source), ""),
        any(len(group.epochs) > 1 for group in groups),
    )


def _row(entry: Mapping[str, Any], groups: Sequence[RunGroup]) -> dict[str, Any]:
    by_label = {s["label"]: {**s, "selected_note": words_of_start(s)} for s in entry["settings"]}
    return {"metric": entry["metric"], "cells": [by_label.get(group.label) for group in groups]}


def _epoch_chart(name: str, groups: Sequence[RunGroup], cells: Sequence[Mapping[str, Any] | None]) -> Chart:
    """Return the curves of a metric, with a line at the mean of all runs before training."""
    series = _bands((g, [_points(run, run.values[name]) for run in g.epochs if name in run.values]) for g in groups)
    starts = [value for cell in cells if cell and cell["base"] for value in cell["base"]["runs"]]
    line = fmean(starts) if starts else None
    svg = line_chart(name, series, line=line, line_text="before training", axis=EPOCH, width=SMALL[0], height=SMALL[1])
    return Chart(name, svg, name)


def _training_by_epoch(groups: Sequence[RunGroup]) -> list[Chart]:
    charts = []
    for name in EPOCH_MEANS:
        runs = ((g, [_points(run, run.training[name]) for run in g.epochs if name in run.training]) for g in groups)
        if series := _bands(runs):
            title = f"{training_title(name)}, mean over the epoch"
            charts.append(Chart(title, line_chart(title, series, axis=EPOCH, width=SMALL[0], height=SMALL[1]), name))
    return charts


def _training_by_step(groups: Sequence[RunGroup]) -> list[Chart]:
    """Return curves over steps of settings with several runs; the page has those of single runs elsewhere."""
    charts = []
    for name in STEP_CURVES:
        runs = (
            (
                group,
                [{float(counted(n["step"])): float(n[name]) for n in t if is_finite(n.get(name))} for t in group.train],
            )
            for group in groups
            if len(group.train) > 1
        )
        if series := _bands(runs, smooth=True):
            title = f"{training_title(name)}, mean over runs"
            charts.append(Chart(title, line_chart(title, series, width=SMALL[0], height=SMALL[1]), name))
    return charts


def _points(run: RunEpochs, values: Sequence[float | None]) -> dict[float, float]:
    return {epoch: value for epoch, value in zip(run.epochs, values, strict=True) if value is not None}


def _bands(groups: Iterable[tuple[RunGroup, Sequence[Mapping[float, float]]]], *, smooth: bool = False) -> list[Series]:
    """Return the curves of the groups that have any point."""
    curves = (_band(group, runs, smooth=smooth) for group, runs in groups)
    return [one for one in curves if one is not None]


def _band(group: RunGroup, runs: Sequence[Mapping[float, float]], *, smooth: bool) -> Series | None:
    """Return the mean over runs at each x that any run has, with one standard deviation around it; None without one."""
    xs = sorted({x for points in runs for x in points})
    if not xs:
        return None
    columns = [[points[x] for points in runs if x in points] for x in xs]
    means = [fmean(values) for values in columns]
    spreads = [stdev(values) if len(values) > 1 else math.nan for values in columns]
    least, most = range_of(None, *columns) or (-math.inf, math.inf)  # of the band; NaN = a gap stays NaN
    low = [max(mean - spread, least) for mean, spread in zip(means, spreads, strict=True)] if len(runs) > 1 else []
    high = [min(mean + spread, most) for mean, spread in zip(means, spreads, strict=True)] if len(runs) > 1 else []
    return Series(group.label, xs, means, low, high, group.colour, smooth=smooth and len(runs) == 1)
