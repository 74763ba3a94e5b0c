"""Paired differences of two evaluations: every metric that both have, on the rows that they share."""

from __future__ import annotations

from typing import Any

from vlmrl.evaluate.metrics import joined_ranges, paired_differences
from vlmrl.evaluate.records import Evaluation
from vlmrl.evaluate.sets import set_differences


def differences(after: Evaluation, before: Evaluation) -> dict[str, dict[str, Any]]:
    """Return metric -> after minus before, with its interval; see `metrics.paired_differences`.

    Metrics of a whole split are there where both are of the very same rows.
    """
    ranges = joined_ranges(before.summary, after.summary)
    return paired_differences(after.rows, before.rows, ranges) | set_differences(after.summary, before.summary)
