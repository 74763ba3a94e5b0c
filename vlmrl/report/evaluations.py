"""The evaluations of a report: tables with intervals and paired differences, and how sure the answers are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.evaluate.metrics import paired_differences
from vlmrl.evaluate.records import read_evaluation, read_summary
from vlmrl.report.curves import Chart
from vlmrl.report.plots import interval_bar, mirrored_histogram
from vlmrl.store import layout
from vlmrl.store.runs import Run

DIFFERENCES = ("reward", "accuracy", "brier", "parse_failure")
"""Metrics whose paired difference is shown, with every `accuracy/<level>`."""
MAX_CONFIDENCE_CHARTS = 4
STEP = re.compile(r"-step-\d+$")


@dataclass(frozen=True)
class EvalColumn:
    """One evaluation: a column of the table of its name."""

    label: str
    colour: int
    summary: Mapping[str, Any]
    folder: Path

    @property
    def meta(self) -> Mapping[str, Any]:
        """What was evaluated; empty when the summary does not say."""
        return self.summary.get("meta") or {}


def eval_columns(run: Run, label: str, colour: int) -> tuple[list[EvalColumn], list[str]]:
    """(columns, what could not be read). Of the validations during training only the best (else the last) step's."""
    found: list[EvalColumn] = []
    during: dict[str, EvalColumn] = {}
    problems: list[str] = []
    best = run.manifest.best.step if run.manifest.best else None
    for folder in layout.eval_dirs(run.dir):
        try:
            column = EvalColumn(label, colour, read_summary(folder), folder)
        except StoreError as error:
            problems.append(f"Evaluation {folder.name}: {error.message}.")
            continue
        if not column.meta.get("during"):
            found.append(column)
            continue
        # Names end in the step and come in order: a later one replaces an earlier one, but never the best.
        kind = _kind_of(column)
        if kind not in during or during[kind].meta.get("step") != best:
            during[kind] = column
    return [*found, *during.values()], problems


def eval_tables(columns: Sequence[EvalColumn]) -> list[dict[str, Any]]:
    """One table a kind of evaluation (split, source, sampling): metrics down, runs across, paired differences last."""
    groups: dict[str, list[EvalColumn]] = {}
    for column in columns:
        groups.setdefault(_kind_of(column), []).append(column)
    tables = []
    for kind, group in groups.items():
        names = list(dict.fromkeys(n for c in group for n in c.summary["metrics"]))
        differences = _differences(group)
        paper = next((p for c in group if (p := c.meta.get("paper"))), {})
        baselines = next((b for c in group if (b := c.summary.get("baselines"))), {})
        numbers = paper.get("numbers") or {}
        rows = [_eval_row(n, group, differences, numbers, baselines) for n in names]
        tables.append(
            {
                "kind": kind, "columns": group, "rows": rows, "paper": paper if numbers else {},
                "baselines": bool(baselines), "differences": bool(differences),
                "against": f"{group[-1].label} - {group[0].label}" if differences else "",
                "confidence": _confidence_charts(group) if not group[0].meta.get("during") else [],
            }
        )  # fmt: skip
    return sorted(tables, key=lambda t: "validation" in t["kind"])


def _kind_of(column: EvalColumn) -> str:
    """What evaluations of one table have in common. Validations during training go by the name of their folder."""
    meta, sampling = column.meta, column.meta.get("sampling") or {}
    if not meta.get("split"):
        return STEP.sub("", column.folder.name) + (", during training" if meta.get("during") else "")
    words = [str(meta["split"]), str(meta.get("source") or "")]
    how = "greedy" if meta.get("greedy", True) else f"T={sampling.get('temperature')}, n={sampling.get('samples')}"
    rows = f"first {meta['max_rows']} rows" if meta.get("max_rows") else ""
    return ", ".join(w for w in (*words, how, rows, "during training" if meta.get("during") else "") if w)


def _confidence_charts(group: Sequence[EvalColumn]) -> list[Chart]:
    """For tasks whose answer is a probability: what was answered to pairs that are the same, and to those that differ.

    A model that hedges has all its bars in the middle; one that knows has them at opposite ends.
    """
    charts = []
    for column in group[:MAX_CONFIDENCE_CHARTS]:
        try:
            rows = read_evaluation(column.folder).rows
        except StoreError:
            continue
        said = [(r["outcome"].get("label"), r["outcome"].get("confidence")) for r in rows]
        same, different = ([c for y, c in said if y == label and c is not None] for label in (1.0, 0.0))
        if same and different:
            title = f"{column.label}: probability answered"
            texts = ("truly the same", "truly different")
            axis = "probability that both are the same"
            drawn = mirrored_histogram(title, same, different, texts=texts, axis=axis, colour=column.colour)
            charts.append(Chart(title, drawn))
    return charts


def _differences(group: Sequence[EvalColumn]) -> dict[str, dict[str, Any]]:
    """Paired differences of the last evaluation to the first, when they are of two runs and share rows."""
    if len(group) < 2 or group[0].label == group[-1].label:
        return {}
    try:
        first, last = (read_evaluation(c.folder).rows for c in (group[0], group[-1]))
    except StoreError:
        return {}
    found = paired_differences(last, first)
    return {n: d for n, d in found.items() if n in DIFFERENCES or n.startswith("accuracy/")}


def _eval_row(
    name: str, group: Sequence[EvalColumn], differences: Mapping[str, Any], numbers: Mapping[str, Any],
    baselines: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    found = [(c, c.summary["metrics"].get(name)) for c in group]
    values = [v for _, m in found if m for v in (m["value"], m["low"], m["high"]) if v is not None]
    share = bool(values) and min(values) >= 0 and max(values) <= 1
    scale = (0.0, 1.0) if share else (min(values), max(values)) if values else (0.0, 1.0)
    cells = [
        None if m is None or m["value"] is None
        else {**m, "bar": interval_bar(m["value"], m["low"], m["high"], scale, c.colour)}
        for c, m in found
    ]  # fmt: skip
    difference = differences.get(name)
    sure = bool(difference and difference["low"] is not None and (difference["low"] > 0 or difference["high"] < 0))
    return {
        "name": name, "cells": cells, "difference": difference, "sure": sure, "paper": numbers.get(name),
        "baseline": baselines.get(name),
    }  # fmt: skip
