"""Average precision of boxes with confidences, as COCO's evaluation computes it for all sizes of objects.

Each response is matched once, at ten IoU thresholds. Resamples only accumulate the matches again. Where all confidences
differ, the numbers are those of pycocotools, for resamples too (tests/unit/tasks/test_average_precision.py).
Boxes of equal confidence (answers without confidences) count together, so that the order of the rows does not matter;
pycocotools takes them in the order of the rows.

Source: Lin et al. (2014), Microsoft COCO, and its evaluation code: greedy matching by confidence, at most 100 boxes per
    response, precision made monotone and read at 101 recalls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vlmrl.rewards.boxes.planes import Box, iou
from vlmrl.tasks.perception.answer import NAMES, OF_CATEGORY, Detection

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
THRESHOLDS: Floats = np.linspace(0.5, 0.95, 10)
"""IoU thresholds, [T]."""
RECALLS: Floats = np.linspace(0.0, 1.0, 101)
MOST_DETECTIONS = 100
"""Largest number of boxes of a response that count, the surest ones."""
MOST_CATEGORIES = 20
"""Largest number of categories for which each has a metric of its own."""
TINY = float(np.spacing(1))


@dataclass(frozen=True)
class Matched:
    """Boxes of one response, matched with the true boxes of its row at each threshold.

    Args:
        confidence_D: in descending order; equal ones in the order of the response.
        is_right_TD: whether a box has a true box of its own.
    """

    category: str
    confidence_D: Floats
    is_right_TD: NDArray[np.bool_]
    num_truths: int


def match(category: str, detections: Sequence[Detection], truths: Sequence[Box]) -> Matched:
    """Return the boxes of a response, matched.

    The surest box chooses first: the true box with the largest IoU, of equal ones the last, if the IoU reaches the
    threshold and no surer box has taken it.
    """
    kept = sorted(detections, key=lambda one: -one.confidence)[:MOST_DETECTIONS]
    iou_DG = np.array([[iou(one.box, truth) for truth in truths] for one in kept]).reshape(len(kept), len(truths))
    is_right_TD = np.zeros((len(THRESHOLDS), len(kept)), dtype=bool)
    if truths:
        for is_right_D, threshold in zip(is_right_TD, THRESHOLDS, strict=True):
            free_G = np.ones(len(truths), dtype=bool)
            for d, iou_G in enumerate(iou_DG):
                left_G = np.where(free_G, iou_G, -1.0)
                best = len(truths) - 1 - int(np.argmax(left_G[::-1]))
                if left_G[best] >= min(threshold, 1 - 1e-10):
                    is_right_D[d], free_G[best] = True, False
    return Matched(category, np.array([one.confidence for one in kept]), is_right_TD, len(truths))


def accumulate(results: Sequence[Matched | None]) -> Callable[[Counts], Mapping[str, float | None]]:
    """Return a function from how often each response is taken, [N], to the metrics.

    The metrics are means over categories of which at least one object is there; without objects they are None. `map` is
    the mean over all thresholds, `ap50` and `ap75` are those at 0.5 and 0.75. With 2 to 20 categories, `map/<category>`
    is that of each.

    Args:
        results: None = a response that cannot be matched, which is left out.
    """
    rows: dict[str, list[int]] = {}
    for row, result in enumerate(results):
        if result is not None:
            rows.setdefault(result.category, []).append(row)
    tables = [_Table.of(category, results, rows[category]) for category in sorted(rows)]
    has_own = 2 <= len(tables) <= MOST_CATEGORIES

    def metrics(count_N: Counts) -> Mapping[str, float | None]:
        precisions = {table.category: table.precisions(count_N) for table in tables}
        defined = [ap_T for ap_T in precisions.values() if ap_T is not None]
        of_all: dict[str, float | None] = dict.fromkeys(NAMES)
        if defined:
            ap_CT = np.array(defined)
            of_all = dict(zip(NAMES, (_mean(ap_CT), _mean(ap_CT[:, 0]), _mean(ap_CT[:, 5])), strict=True))
        if not has_own:
            return of_all
        return of_all | {
            OF_CATEGORY + category: None if ap_T is None else _mean(ap_T) for category, ap_T in precisions.items()
        }

    return metrics


@dataclass(frozen=True)
class _Table:
    """Boxes of all responses of a category, in the order of the responses.

    Args:
        rows_R: responses of the category.
        size_R: number of their boxes; `start_R` is the position of the first one.
    """

    category: str
    rows_R: Counts
    size_R: Counts
    start_R: Counts
    num_truths_R: Counts
    confidence_D: Floats
    is_right_TD: NDArray[np.bool_]

    @classmethod
    def of(cls, category: str, results: Sequence[Matched | None], rows: Sequence[int]) -> _Table:
        own = [result for row in rows if (result := results[row]) is not None]
        size_R = _counts(len(one.confidence_D) for one in own)
        return cls(
            category,
            _counts(rows),
            size_R,
            np.cumsum(size_R) - size_R,
            _counts(one.num_truths for one in own),
            np.concatenate([one.confidence_D for one in own]),
            np.concatenate([one.is_right_TD for one in own], axis=1),
        )

    def precisions(self, count_N: Counts) -> Floats | None:
        """Return the average precision at each threshold, [T]; None without objects."""
        count_R = count_N[self.rows_R]
        num_truths = int(count_R @ self.num_truths_R)
        if not num_truths:
            return None
        taken_D = self._taken(count_R)
        order_D = taken_D[np.argsort(-self.confidence_D[taken_D], kind="stable")]
        right_TD = np.cumsum(self.is_right_TD[:, order_D], axis=1, dtype=np.float64)
        # Boxes of equal confidence count together: [T, D] -> [T, distinct confidences], the state after each of them.
        sure_D = self.confidence_D[order_D]
        last_D = np.flatnonzero(np.append(sure_D[1:] != sure_D[:-1], True)) if len(sure_D) else np.arange(0)
        right_TD, stated_D = right_TD[:, last_D], np.arange(1, len(order_D) + 1)[last_D]
        precision_TD = right_TD / (stated_D + TINY)
        precision_TD = np.maximum.accumulate(precision_TD[:, ::-1], axis=1)[:, ::-1]
        recall_TD = right_TD / num_truths
        return np.array([_at_recalls(*one) for one in zip(recall_TD, precision_TD, strict=True)])

    def _taken(self, count_R: Counts) -> Counts:
        """Return the positions of the boxes of a resample: a response is there whole, as often as it is taken."""
        size_K = np.repeat(self.size_R, count_R)  # [R] -> [K]: one number per taken response
        start_K = np.repeat(self.start_R, count_R)
        own_K = np.cumsum(size_K) - size_K
        return np.repeat(start_K - own_K, size_K) + np.arange(int(size_K.sum()))


def _at_recalls(recall_D: Floats, precision_D: Floats) -> float:
    """Return the mean precision at the recalls `RECALLS`; 0 at a recall that is not reached."""
    place_K = np.searchsorted(recall_D, RECALLS, side="left")
    reached_K = place_K[place_K < len(recall_D)]  # recalls rise, so the first ones are reached
    at_K = np.zeros(len(RECALLS))
    at_K[: len(reached_K)] = precision_D[reached_K]
    return float(at_K.mean())


def _counts(numbers: Iterable[int]) -> Counts:
    return np.fromiter(numbers, dtype=np.int64)


def _mean(values: Floats) -> float:
    return float(np.mean(values))
