"""Advantages of a single group, for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vlmrl.algo.advantages import ScoredGroup, batch_advantages


def group_advantages(scores: Sequence[float], included: Sequence[bool], estimator: str) -> list[float]:
    """Return the advantages of one group, one number per sample: `batch_advantages` of a batch with one group.

    A single sample gets 0 with every estimator. The score of the greedy answer is taken to be the group's mean.

    Raises: ValueError for "gae", because there are no values.
    """
    kept = [float(s) for s, use in zip(scores, included, strict=True) if use]
    greedy = float(np.mean(kept)) if estimator == "greedy" and kept else None
    (advantages,) = batch_advantages([ScoredGroup(scores, included, greedy=greedy)], estimator)
    return [float(a[0]) for a in advantages] if len(kept) > 1 else [0.0] * len(scores)
