"""Statistics of a scoring: tables of parts, notes and groups, and the rows on which reward and accuracy disagree."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from vlmrl.redaction.redact import excerpt, redact_said
from vlmrl.reward_check.responses import ResponseColumns
from vlmrl.reward_check.scores import Flags, Floats, Scores, same_scores
from vlmrl.reward_check.scoring import SavedSample
from vlmrl.rewards.base import RIGHT, is_binary
from vlmrl.types import Score

MAX_TEXT_CHARS = 2000
MOST_REASONS = 10


def compare_stored(facts: ResponseColumns, stored: Scores, scores: Scores, most: int = 5) -> dict[str, Any]:
    """Compare the new scores with the stored ones for exact equality: value, every part, and failures.

    If a service was down for a row, in training or now, the row counts as equal, because it does not test the reward.

    Returns: `equal`, `different`: numbers of rows; `largest_difference` of two values; `failed_then`, `failed_now`:
        numbers of rows that failed in training and now; `worst`: the rows that differ most.
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
    """Return statistics of each part and of the whole score (`value`).

    They are: mean, minimum, maximum, share of samples at the minimum and at the maximum, number of samples to which the
    part does not apply (None), and Pearson's correlation with the value over the samples to which it applies (None if
    the part or the value is constant).
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
    """Return kinds of notes and errors, the most frequent first; `example` is the first text of a kind.

    Two texts are of one kind if they differ only in quoted texts and numbers.
    """
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
    """Count the dead groups (at most one score, or all scores equal), in total and per step.

    Returns: `number` of groups, `dead`: number of dead groups, `dead_share`, `by_step`: [step, number of groups, share
        of dead groups] for each step.
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
    """Return (dead_G, steps_G): whether all scores of a group are equal (without failed rows), and the group's step."""
    order, starts = facts.group_bounds()
    values = scores.values_N[order]
    low = np.minimum.reduceat(np.where(np.isnan(values), np.inf, values), starts)
    high = np.maximum.reduceat(np.where(np.isnan(values), -np.inf, values), starts)
    return high <= low, facts.steps_N[order[starts]]


def disagreements(facts: ResponseColumns, scores: Scores, right_N: Floats, most: int = 5) -> dict[str, Any] | None:
    """Compare the reward with the accuracy. Return None if the accuracy is not known.

    A wrong response is "paid" if it earns more than the minimum of its source (0, or the lowest score if that is below
    0). A right response is "unpaid" if it earns less than the highest score of its source.

    Returns: `accuracy`: the mean; `binary`: whether every accuracy is 0 or 1 (if not, no row counts as right or wrong);
        `agreement`: share of pairs of a right and a wrong response of one group in which the right one earns more (a
        tie counts half; None if there is no such pair); `wrong`, `right`: number of these rows, mean value, and number
        of paid wrong or unpaid right rows; `wrong_but_paid`, `right_but_unpaid`: the worst rows of each kind.
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
    """Return `paid_most` and `paid_least`: the rows with the highest scores and, of the remaining rows, the lowest."""
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
    """Return the share of pairs (right, wrong) of a group in which the right row scores higher: the AUC over groups.

    In a group with u right and d wrong rows, the ranks of the right rows (from 0, equal values get their mean rank) add
    up to u (u - 1) / 2 plus the number of pairs in which the right row scores higher (a tie counts half).
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
    """Return a row for the report; `fill_rows` adds its text.

    `index` is the position among the scored rows; `row` of the result is the position in the whole input.
    """
    return {"row": int(facts.rows_N[index]), "new": score_json(new[index]), **more}


def describe(sample: SavedSample) -> dict[str, Any]:
    """Return the fields of a report's row that come from the input: where, text, truth, the stored score."""
    return {
        "where": sample.where,
        "text": excerpt(sample.input.response, MAX_TEXT_CHARS, hide=redact_said),
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
    """Return the mean of the values that are not NaN; None if there are none. The sum is exact in any order."""
    there = values[~np.isnan(values)].tolist()
    if not there:
        return None
    try:
        return math.fsum(there) / len(there)
    except OverflowError:  # the sum is too large for a float, the mean is not
        return math.fsum(value / len(there) for value in there)


def correlation(a: Any, b: Any) -> float | None:
    """Return Pearson's correlation of two arrays; None if one of them is constant or has fewer than two values."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def ranks(values: Any) -> Any:
    """Return the ranks of the values, from 0; equal values get the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def fill_rows(rows: list[dict[str, Any]], samples: Mapping[int, SavedSample]) -> None:
    """Add the texts and stored scores from the input to the report's rows."""
    for row in rows:
        row |= describe(samples[row["row"]])
