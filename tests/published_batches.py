"""Batches scored as the published functions of TaxonRL score them: each sample also has the numbers of its batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from vlmrl.rewards.base import combine
from vlmrl.tasks.taxonrl.published import FUNCTIONS, batch_metrics


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
    shared = batch_metrics(cells) if published.batch else {}
    return [{"overall": combine(parts, weights)[0]} | parts | shared for parts, *_ in scored]
