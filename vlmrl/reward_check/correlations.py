"""Correlations of the score with length, parts and step; n-grams that became more frequent and earn higher scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from vlmrl.reward_check.ngrams import paid_ngrams
from vlmrl.reward_check.response_columns import ResponseColumns
from vlmrl.reward_check.scores import Floats, Scores
from vlmrl.reward_check.statistics import correlation, mean, ranks


def correlations(facts: ResponseColumns, scores: Scores, texts: Mapping[int, str]) -> dict[str, Any]:
    """Return Pearson's and rank correlations (Spearman's) of the score, over the rows that have a score.

    Returns: `length` (in characters), `tokens` (None if the numbers of tokens are not known) and `step`: for each,
        {"pearson", "spearman"} with the score; `cut`: share of responses that the token limit ended, their mean score,
        and the mean score of all other responses; `parts`: part -> part -> Pearson's correlation; `ngrams`: see
        `paid_ngrams`; `by_step`: [step, mean score, mean characters, rank correlation of score and length within the
        step].
    """
    there = ~scores.failed_N
    values, chars = scores.values_N[there], facts.chars_N[there].astype(np.float64)
    tokens = facts.tokens_N[there].astype(np.float64)
    cut, steps = facts.cut_N[there], facts.steps_N[there]
    return {
        "length": _both(chars, values),
        "tokens": _both(tokens, values) if np.any(tokens) else None,
        "step": _both(steps.astype(np.float64), values),
        "cut": {"share": mean(cut), "score_cut": mean(values[cut]), "score_whole": mean(values[~cut])},
        "parts": _between(scores.at(there)),
        "by_step": _by_step(steps, values, chars),
        "ngrams": paid_ngrams(facts, scores, texts),
    }


def _both(a: Floats, b: Floats) -> dict[str, float | None]:
    return {"pearson": correlation(a, b), "spearman": correlation(ranks(a), ranks(b)) if len(a) else None}


def _between(scores: Scores) -> dict[str, dict[str, float | None]]:
    """Return Pearson's correlation of each pair of parts, over the rows to which both parts apply."""
    table: dict[str, dict[str, float | None]] = {}
    names = list(scores.parts)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            a, b = scores.parts[one], scores.parts[other]
            both = ~np.isnan(a) & ~np.isnan(b)
            table.setdefault(one, {})[other] = correlation(a[both], b[both])
    return table


def _by_step(steps: Any, values: Floats, chars: Floats) -> list[list[Any]]:
    order = np.argsort(steps, kind="stable")
    starts = np.flatnonzero(np.diff(steps[order], prepend=-1) != 0)
    return [
        [int(steps[rows[0]]), mean(values[rows]), mean(chars[rows]), _both(chars[rows], values[rows])["spearman"]]
        for rows in np.split(order, starts[1:])
        if len(rows)
    ]
