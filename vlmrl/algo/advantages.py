"""Advantage estimators: the scores of a group become one number a sample. NumPy float64, no torch.

Letters: G samples of one prompt. A group whose scores are all equal has exactly zero advantage, in every estimator: the
mean of n equal floats can differ from them in the last bit, and dividing by a tiny spread would turn that into a push.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
STD_EPSILON = 1e-6
"""Added to the standard deviation (DeepSeekMath's code and its descendants use the same)."""


def group_mean(scores_G: Array) -> Array:
    """Score minus the group's mean. Source: Dr. GRPO, arXiv:2503.20783, section 3.2. Example: [1, 0] -> [0.5, -0.5]."""
    return scores_G - scores_G.mean()


def group_mean_std(scores_G: Array) -> Array:
    """Score minus the mean, over the unbiased standard deviation + 1e-6.

    Source: GRPO, arXiv:2402.03300, eq. 4. Example: [1, 0] -> mean 0.5, std sqrt(0.5) = 0.7071 -> [0.7071, -0.7071].
    """
    return (scores_G - scores_G.mean()) / (scores_G.std(ddof=1) + STD_EPSILON)


def leave_one_out(scores_G: Array) -> Array:
    """Score minus the mean of the others. Source: RLOO, arXiv:2402.14740 eq. 5. [1, 0, 0] -> [1, -0.5, -0.5]."""
    n = len(scores_G)
    return (scores_G - scores_G.mean()) * n / (n - 1)


ESTIMATORS: dict[str, Callable[[Array], Array]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "leave_one_out": leave_one_out,
}


def is_dead(scores: Sequence[float]) -> bool:
    """Whether a group teaches nothing: fewer than two scores, or all of them equal."""
    return len(scores) < 2 or min(scores) == max(scores)


def group_advantages(scores: Sequence[float], included: Sequence[bool], estimator: str) -> list[float]:
    """Advantages of one group.

    Args:
        scores: one value a sample; may be NaN where not included.
        included: True = the sample counts for the baseline and gets an advantage; the others get exactly 0.
        estimator: key of `ESTIMATORS`.
    Returns: one advantage a sample; all exactly 0.0 when the included scores are equal or fewer than two.
    Raises: KeyError for an unknown estimator; ValueError when an included score is not finite.
    """
    estimate = ESTIMATORS[estimator]
    kept = [float(s) for s, use in zip(scores, included, strict=True) if use]
    if not all(np.isfinite(kept)):
        raise ValueError(f"a score that is not finite reached the advantages: {kept}")
    if is_dead(kept):
        return [0.0] * len(scores)
    values = iter(estimate(np.asarray(kept, dtype=np.float64)).tolist())
    return [next(values) if use else 0.0 for use in included]
