"""Batches scored as the published functions of TaxonRL score them: each sample also has the numbers of its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vlmrl.rewards.base import combine
from vlmrl.tasks.taxonrl.rewards import FUNCTIONS


def score_batch(
    function: str, samples: Iterable[tuple[str, Any]], format_weight: float | None = None
) -> list[dict[str, float]]:
    """Return the result of a published function for a batch of (response, ground truth): parts and `overall` of each.

    If the original writes the batch's precision, f1 and `macro_accuracy` into every sample, this function does so, too.
    Answers that cannot be read do not count in these three numbers.
    """
    published = FUNCTIONS[function]
    weights = published.shares(format_weight)
    scored = [published.parts(response, truth) for response, truth in samples]
    cells = Counter(cell for _, cell, _ in scored if cell)
    shared = batch_metrics(cells) if function.endswith(":compute_score") else {}
    return [{"overall": combine(parts, weights)[0]} | parts | shared for parts, *_ in scored]


def batch_metrics(cells: Mapping[str, int]) -> dict[str, float]:
    """Return precision, f1 and macro_accuracy from the counts of tp, fp, fn and tn; 0 / 0 is 0.

    Despite its name, macro_accuracy is the usual accuracy.
    """
    tp, fp, fn, tn = (cells.get(cell, 0) for cell in ("tp", "fp", "fn", "tn"))
    precision = tp / (tp + fp) if tp + fp else 0.0
    recall = tp / (tp + fn) if tp + fn else 0.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    total = tp + fp + fn + tn
    return {"precision": precision, "f1": f1, "macro_accuracy": (tp + tn) / total if total else 0.0}
