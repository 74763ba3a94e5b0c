"""Results over epochs in a report: a table of settings, and curves whose bands are the spread between runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.over_epochs import EPOCH_MEANS, RunEpochs, group_runs, is_finite, over_epochs, read_epochs
from vlmrl.report.curves import SMALL, Chart, training_title
from vlmrl.report.plots import EPOCH, Series, line_chart
from vlmrl.store.metrics import counted
from vlmrl.store.runs import Run
from vlmrl.tasks.reflection import PREFIXES, RATE, RATIOS

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
        colour: index of its colour.
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
        rows: one per metric: {"metric", "role", "label", "base", "paper_base", "cells": one per group}.
        charts: results over epochs.
        training: training metrics over epochs, then over steps.
        source: of the published numbers; "" without any.
        bands: whether a setting has several runs.
    """

    groups: Sequence[RunGroup]
    rows: Sequence[Mapping[str, Any]]
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
    names = [entry["metric"] for entry in entries]
    return EpochView(
        groups,
        [_row(entry, groups) for entry in entries],
        [_epoch_chart(name, groups, _base(entry)) for name, entry in zip(names, entries, strict=True)],
        [*_training_by_epoch(groups), *_training_by_step(groups)],
        next((one.source for group in groups for one in group.epochs if one.numbers and one.source), ""),
        any(len(group.epochs) > 1 for group in groups),
    )


def _row(entry: Mapping[str, Any], groups: Sequence[RunGroup]) -> dict[str, Any]:
    """Return a row of the table; the results before training are those of the first setting that has some."""
    by_label = {setting["label"]: setting for setting in entry["settings"]}
    paper = next((s["paper"]["base"] for s in entry["settings"] if "base" in s["paper"]), None)
    return {
        "metric": entry["metric"],
        "role": entry["role"],
        "label": entry["label"],
        "base": next((s["base"] for s in entry["settings"] if s["base"]), None),
        "paper_base": paper,
        "cells": [by_label.get(group.label) for group in groups],
    }


def _base(entry: Mapping[str, Any]) -> float | None:
    return next((s["base"]["mean"] for s in entry["settings"] if s["base"]), None)


def _epoch_chart(name: str, groups: Sequence[RunGroup], base: float | None) -> Chart:
    series = [
        _band(group, [dict(_points(run, run.values[name])) for run in group.epochs if name in run.values])
        for group in groups
    ]
    drawn = [one for one in series if one is not None]
    svg = line_chart(name, drawn, line=base, line_text="before training", axis=EPOCH, width=SMALL[0], height=SMALL[1])
    return Chart(name, svg, name)


def _training_by_epoch(groups: Sequence[RunGroup]) -> list[Chart]:
    charts = []
    for name in EPOCH_MEANS:
        series = [
            _band(group, [dict(_points(run, run.training[name])) for run in group.epochs if name in run.training])
            for group in groups
        ]
        if drawn := [one for one in series if one is not None]:
            title = f"{training_title(name)}, mean over the epoch"
            charts.append(Chart(title, line_chart(title, drawn, axis=EPOCH, width=SMALL[0], height=SMALL[1]), name))
    return charts


def _training_by_step(groups: Sequence[RunGroup]) -> list[Chart]:
    """Return curves over steps of settings with several runs; the page has those of single runs elsewhere."""
    charts = []
    several = [group for group in groups if len(group.train) > 1]
    for name in STEP_CURVES:
        series = []
        for group in several:
            points = [
                {float(counted(line["step"])): float(line[name]) for line in lines if is_finite(line.get(name))}
                for lines in group.train
            ]
            series.append(_band(group, points, smooth=True))
        if drawn := [one for one in series if one is not None]:
            title = f"{training_title(name)}, mean over runs"
            charts.append(Chart(title, line_chart(title, drawn, width=SMALL[0], height=SMALL[1]), name))
    return charts


def _points(run: RunEpochs, values: Sequence[float | None]) -> list[tuple[float, float]]:
    return [(epoch, value) for epoch, value in zip(run.epochs, values, strict=True) if value is not None]


def _band(group: RunGroup, runs: Sequence[Mapping[float, float]], *, smooth: bool = False) -> Series | None:
    """Return the mean over runs at each x that any run has, with one standard deviation around it; None without one."""
    xs = sorted({x for points in runs for x in points})
    if not xs:
        return None
    columns = [[points[x] for points in runs if x in points] for x in xs]
    means = [fmean(values) for values in columns]
    spreads = [stdev(values) if len(values) > 1 else math.nan for values in columns]
    low = [mean - spread for mean, spread in zip(means, spreads, strict=True)] if len(runs) > 1 else []
    high = [mean + spread for mean, spread in zip(means, spreads, strict=True)] if len(runs) > 1 else []
    return Series(group.label, xs, means, low, high, group.colour, smooth=smooth and len(runs) == 1)
