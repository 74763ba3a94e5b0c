"""Statistics of a scoring: tables of parts, reasons and groups, and rows where reward and accuracy disagree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from vlmrl.reward_check.response_columns import ResponseColumns
from vlmrl.reward_check.saved_responses import SavedSample
from vlmrl.reward_check.scores import Flags, Floats, Scores, same_scores
from vlmrl.rewards.accuracy_part import RIGHT, is_binary
from vlmrl.types import Score

MAX_TEXT_CHARS = 2000
MOST_REASONS = 10


def compare_stored(facts: ResponseColumns, stored: Scores, scores: Scores, most: int = 5) -> dict[str, Any]:
    """Compare the new scores with the stored ones exactly: value, every part, and which rows failed.

    Rows for which a service was down, then or now, say nothing about the reward and count as equal.

    Returns: `equal`, `different` (number of rows), `largest_difference` (of values), `failed_then`, `failed_now`, and
        `worst`, the rows that differ most.
    """
    different = np.flatnonzero(~(same_scores(stored, scores) | stored.unavailable_N | scores.unavailable_N))
    gaps = np.abs(stored.values_N[different] - scores.values_N[different])
    gaps[np.isnan(gaps)] = math.inf
    order = np.lexsort((different, -gaps))[:most]
    return {
        "equal": not len(different),
        "different": len(different),
        "largest_difference": float(np.max(gaps[np.isfinite(gaps)], initial=0.0)),
        "failed_then": int(stored.failed_N.sum()),
        "failed_now": int(scores.failed_N.sum()),
        "worst": [row_of(facts, int(i), scores) for i in different[order]],
    }


def part_table(scores: Scores) -> dict[str, dict[str, Any]]:
    """Return part (and `value`) -> mean, min, max, share at min and at max, how often None, correlation with the value.

    Correlation is Pearson's over the samples where the part applies; None when either side is constant.
    """
    scored = scores.at(~scores.failed_N)
    table = {"value": _summary(scored.values_N, None)}
    for name, column in scored.parts.items():
        applies = ~np.isnan(column)
        if not len(scored):
            continue
        summary = _summary(column[applies], scored.values_N[applies])
        table[name] = {**summary, "none": int((~applies).sum())}
    return table


def reasons(scores: Scores) -> list[dict[str, Any]]:
    """Return notes and errors by frequency, without quoted texts and numbers; `example` is the first of each kind."""
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}
    failed = scores.failed_N
    for coded, mask, prefix in ((scores.errors, failed, "failed: "), (scores.notes, ~failed, "")):
        used = np.bincount(coded.codes_N[mask & ~coded.missing_N], minlength=len(coded.words))
        for word, count in zip(coded.words, used.tolist(), strict=True):
            if count and word:
                kind = re.sub(r"'[^']*'|(?<![A-Za-z])-?\d[\d.]*", "...", prefix + word)
                counts[kind] += count
                examples.setdefault(kind, prefix + word)
    return [{"count": n, "share": n / len(scores), "example": examples[k]} for k, n in counts.most_common(MOST_REASONS)]


def group_table(facts: ResponseColumns, scores: Scores) -> dict[str, Any]:
    """Return how many groups have no signal (one score at most, or all equal), in total and by step.

    Returns: `number`, `dead`, `dead_share`, `by_step` = [step, groups, share of dead ones] of each step.
    """
    dead_G, steps_G = dead_groups(facts, scores)
    steps = np.unique(steps_G)
    by_step = [[int(s), int((steps_G == s).sum()), float(dead_G[steps_G == s].mean())] for s in steps]
    return {
        "number": len(dead_G),
        "dead": int(dead_G.sum()),
        "dead_share": float(dead_G.mean()) if len(dead_G) else None,
        "by_step": by_step,
    }


def dead_groups(facts: ResponseColumns, scores: Scores) -> tuple[Flags, Any]:
    """Return (dead_G, steps_G): whether each group's scores, without failed rows, are all equal; and its step."""
    order, starts = facts.group_bounds()
    values = scores.values_N[order]
    low = np.minimum.reduceat(np.where(np.isnan(values), np.inf, values), starts)
    high = np.maximum.reduceat(np.where(np.isnan(values), -np.inf, values), starts)
    return high <= low, facts.steps_N[order[starts]]


def disagreements(facts: ResponseColumns, scores: Scores, right_N: Floats, most: int = 5) -> dict[str, Any] | None:
    """Compare the reward with the accuracy. Return None where there is no accuracy.

    A wrong row is paid when it earns more than the least of its source (0, or the lowest score where that is below 0);
    a right one is unpaid when it earns less than the highest score of its source.

    Returns: `accuracy` (the mean); `binary`: whether every accuracy is right or wrong and nothing in between, else no
        row counts as either; `agreement`: share of (right, wrong) pairs of one group in which the right one has the
        higher value (ties count half, None without such pairs); `wrong`, `right`: their number, mean value, and how
        many of them are paid or unpaid; `wrong_but_paid` and `right_but_unpaid`: the worst rows of both kinds.
    """
    measured = np.flatnonzero(~np.isnan(right_N) & ~scores.failed_N)
    if not len(measured):
        return None
    binary = is_binary(np.unique(right_N[measured]).tolist())
    rows = measured if binary else measured[:0]
    is_right = (right_N == RIGHT).astype(np.float64)
    values, sources_N = scores.values_N, facts.sources.codes_N
    least_S, most_S = np.zeros(len(facts.sources.words)), np.full(len(facts.sources.words), -np.inf)
    np.minimum.at(least_S, sources_N[rows], values[rows])
    np.maximum.at(most_S, sources_N[rows], values[rows])
    wrong, correct = rows[is_right[rows] == 0], rows[is_right[rows] == 1]
    paid = wrong[values[wrong] > least_S[sources_N[wrong]]]
    unpaid = correct[values[correct] < most_S[sources_N[correct]]]
    return {
        "accuracy": float(np.mean(right_N[measured])),
        "binary": binary,
        "agreement": _agreement(facts.groups_N[rows], values[rows], is_right[rows]) if binary else None,
        "wrong": {"number": len(wrong), "mean": mean(values[wrong]), "paid": len(paid)},
        "right": {"number": len(correct), "mean": mean(values[correct]), "unpaid": len(unpaid)},
        "wrong_but_paid": [row_of(facts, i, scores) for i in _first(paid, -values[paid], most)],
        "right_but_unpaid": [row_of(facts, i, scores) for i in _first(unpaid, values[unpaid], most)],
    }


def extremes(facts: ResponseColumns, scores: Scores, most: int = 5) -> dict[str, list[dict[str, Any]]]:
    """Return `paid_most` and `paid_least`: the scored rows with the highest and, of the others, the lowest values."""
    rows = np.flatnonzero(~scores.failed_N)
    high = _first(rows, -scores.values_N[rows], most)
    rest = np.setdiff1d(rows, high, assume_unique=True)
    low = _first(rest, scores.values_N[rest], most)
    return {
        "paid_most": [row_of(facts, i, scores) for i in high],
        "paid_least": [row_of(facts, i, scores) for i in low],
    }


def _first(rows: Any, keys: Any, most: int) -> list[int]:
    """Return the rows with the smallest keys, sorted by key; rows with equal keys keep their order."""
    return rows[np.argsort(keys, kind="stable")[:most]].tolist()


def _agreement(groups: Any, values: Floats, right: Floats) -> float | None:
    """Return the share of (right, wrong) pairs of a group in which the right one is higher: the AUC over all groups.

    In a group with u right and d wrong rows, the ranks of the right ones (ties at their mean) add up to the number of
    pairs won plus u (u - 1) / 2.
    """
    order = np.lexsort((values, groups))
    groups, values, right = groups[order], values[order], right[order]
    starts = np.flatnonzero(np.diff(groups, prepend=groups[0] - 1) != 0)
    sizes = np.diff(np.append(starts, len(groups)))
    tied = np.flatnonzero(np.diff(values, prepend=np.inf) != 0)
    firsts = np.unique(np.concatenate([starts, tied]))
    counts = np.diff(np.append(firsts, len(groups)))
    ranks = np.repeat(firsts + (counts - 1) / 2, counts) - np.repeat(starts, sizes)
    ups = np.add.reduceat(right, starts)
    won = np.add.reduceat(ranks * right, starts) - ups * (ups - 1) / 2
    pairs = float(np.sum(ups * (sizes - ups)))
    return float(np.sum(won)) / pairs if pairs else None


def row_of(facts: ResponseColumns, index: int, new: Scores, **more: Any) -> dict[str, Any]:
    """Return a row for display; `fill_rows` adds its text. `index` counts the scored rows, `row` those of the input."""
    return {"row": int(facts.rows_N[index]), "new": score_json(new[index]), **more}


def describe(sample: SavedSample) -> dict[str, Any]:
    """Return what a row for display takes from the input: where, text, truth, the stored score."""
    return {
        "where": sample.where,
        "text": sample.input.response[:MAX_TEXT_CHARS],
        "truth": dict(sample.input.truth),
        "stored": score_json(sample.score) if sample.score is not None else None,
    }


def score_json(score: Score) -> dict[str, Any]:
    value = score.value if math.isfinite(score.value) else None
    return {"value": value, "parts": dict(score.parts), "note": score.note, "error": score.error}


def _summary(values: Floats, beside: Floats | None) -> dict[str, Any]:
    if not len(values):
        return dict.fromkeys(("mean", "min", "max", "share_at_min", "share_at_max", "correlation"))
    low, high = float(values.min()), float(values.max())
    return {
        "mean": mean(values),
        "min": low,
        "max": high,
        "share_at_min": float(np.mean(values == low)),
        "share_at_max": float(np.mean(values == high)),
        "correlation": correlation(values, beside) if beside is not None else None,
    }


def mean(values: Any) -> float | None:
    """Return the mean of an array without NaN, summed exactly so that order has no effect; None if nothing is left."""
    there = values[~np.isnan(values)].tolist()
    if not there:
        return None
    try:
        return math.fsum(there) / len(there)
    except OverflowError:  # the sum alone is beyond what a float holds
        return math.fsum(value / len(there) for value in there)


def correlation(a: Any, b: Any) -> float | None:
    """Return Pearson's correlation of two arrays; None when either is constant or shorter than two."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def ranks(values: Any) -> Any:
    """Return ranks from 0, ties at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def fill_rows(rows: list[dict[str, Any]], samples: Mapping[int, SavedSample]) -> None:
    """Add the texts and stored scores of the input to rows for display."""
    for row in rows:
        row |= describe(samples[row["row"]])
