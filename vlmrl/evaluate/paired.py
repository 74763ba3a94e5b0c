"""Two evaluations row by row: the rows and prompts that both have, and the differences on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vlmrl.evaluate.estimates import difference_interval
from vlmrl.evaluate.interval import UNIT_RANGE, Clusters, Range
from vlmrl.evaluate.metrics import (
    LENGTHS,
    OLD_BY,
    Record,
    as_json,
    clusters_of,
    picks,
    prompt_samples,
    range_holding,
    range_of_metric,
)
from vlmrl.evaluate.repeated import estimates_per_prompt, shown_estimates


class PairedColumn(NamedTuple):
    """Values of one metric on the rows, or prompts, that two evaluations share.

    `before` and `after`: values of the other evaluation and of this one. `declared`: range of the metric.
    """

    before: list[float]
    after: list[float]
    clusters: Clusters
    declared: Range | None


def paired_columns(
    rows: Sequence[Record],
    others: Sequence[Record],
    ranges: Mapping[str, Range] | None = None,
    by: Sequence[str] = (),
) -> dict[str, PairedColumn]:
    """Return metric name -> its values on the rows that both have; see `paired_differences`.

    pass@k, maj@k and mean@k have one value per prompt; the prompts are those that both have with the same truth.
    """
    pairs, _ = shared_rows(rows, others)
    columns = {}
    for name, pick in picks([r for r, _ in pairs], by).items():
        both = [(r, a, b) for r, o in pairs if (a := pick(r)) is not None and (b := pick(o)) is not None]
        if not both:
            continue
        mine, theirs = [x for _, x, _ in both], [x for _, _, x in both]
        declared = range_holding(range_of_metric(name, ranges or {}), [*mine, *theirs])
        columns[name] = PairedColumn(theirs, mine, clusters_of([r for r, _, _ in both]), declared)
    return columns | _paired_prompts(rows, others, {str(r["prompt_id"]) for r, _ in pairs})


def _paired_prompts(rows: Sequence[Record], others: Sequence[Record], shared: set[str]) -> dict[str, PairedColumn]:
    """Return pass@k, maj@k and mean@k of the prompts that two evaluations share, as far as both have them."""
    mine, theirs = (prompt_samples([r for r in side if str(r["prompt_id"]) in shared]) for side in (rows, others))
    ids = [i for i in mine if i in theirs]
    after, before = [mine[i] for i in ids], [theirs[i] for i in ids]
    known = shown_estimates(before)
    return {
        f"{metric}@{k}": PairedColumn(
            estimates_per_prompt(before, metric, k),
            estimates_per_prompt(after, metric, k),
            [p.cluster for p in after],
            UNIT_RANGE,
        )
        for metric, k in shown_estimates(after)
        if (metric, k) in known
    }


def paired_differences(
    rows: Sequence[Record],
    others: Sequence[Record],
    ranges: Mapping[str, Range] | None = None,
    by: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Return the mean of (rows - others) for every number that both have, on the rows they share.

    Rows are the same if their prompt id, sample and truth are: an answer to another question is no pair.

    Args:
        ranges, by: as of `summarise`.
    Returns: metric name -> {"value", "low", "high", "n", "clusters", "range" (of the metric), "a", "b": the means of
        `others` and of `rows` on these rows}; names as in `summarise`. Empty when no row is shared.
    """
    differences = {}
    for name, column in paired_columns(rows, others, ranges, by).items():
        mine, theirs, declared = column.after, column.before, column.declared
        difference = difference_interval(mine, theirs, column.clusters, declared, length=name in LENGTHS)
        means = {"a": math.fsum(theirs) / len(theirs), "b": math.fsum(mine) / len(mine)}
        differences[name] = as_json(difference, declared) | means
    return differences


def shared_rows(rows: Sequence[Record], others: Sequence[Record]) -> tuple[list[tuple[Record, Record]], int]:
    """Return (pairs of a row and the other's row with the same prompt, sample and truth; number with another truth)."""
    before = {(r["prompt_id"], r["sample"]): r for r in others}
    pairs = [(r, o) for r in rows if (o := before.get((r["prompt_id"], r["sample"]))) is not None]
    same = [(r, o) for r, o in pairs if r["truth"] == o["truth"]]
    return same, len(pairs) - len(same)


def declared_ranges(summary: Mapping[str, Any]) -> dict[str, Range]:
    """Return the declared ranges of a summary's metrics. Older evaluations have none."""
    return {n: (float(r[0]), float(r[1])) for n, m in summary["metrics"].items() if (r := m.get("range"))}


def joined_ranges(*summaries: Mapping[str, Any]) -> dict[str, Range]:
    """Return the widest range of each metric for which all of these summaries declare one."""
    ranges_of_summaries = [declared_ranges(s) for s in summaries]
    names = set.intersection(*(set(ranges) for ranges in ranges_of_summaries)) if ranges_of_summaries else set()
    return {
        n: (min(ranges[n][0] for ranges in ranges_of_summaries), max(ranges[n][1] for ranges in ranges_of_summaries))
        for n in names
    }


def joined_by(*summaries: Mapping[str, Any]) -> list[str]:
    """Return the fields of the truth by which all of these summaries also average accuracy."""
    fields_of_summaries = [s.get("by", OLD_BY) for s in summaries]
    return [field for field in fields_of_summaries[0] if all(field in others for others in fields_of_summaries)]
