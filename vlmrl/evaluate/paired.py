"""Paired differences of two evaluations: every metric that both have, on the rows that they share."""

from __future__ import annotations

from typing import Any

from vlmrl.evaluate.metrics import joined_by, joined_ranges, paired_differences
from vlmrl.evaluate.records import Evaluation
from vlmrl.evaluate.sets import set_differences


def differences(after: Evaluation, before: Evaluation) -> dict[str, dict[str, Any]]:
    """Return metric -> after minus before, with its interval; see `metrics.paired_differences`.

    Metrics of a whole split are there where both are of the very same rows.
    """
    summaries = (before.summary, after.summary)
    of_rows = paired_differences(after.rows, before.rows, joined_ranges(*summaries), joined_by(*summaries))
    found = of_rows | set_differences(after.summary, before.summary)
    for name, difference in found.items():
        ways = {(s["metrics"].get(name) or {}).get("better") for s in summaries}
        difference["better"] = ways.pop() if len(ways) == 1 else None
    return found
