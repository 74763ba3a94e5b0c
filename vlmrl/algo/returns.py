"""Token returns and advantages over time, and normalisation over a whole batch. NumPy float64, no torch.

Letters: T tokens of one response.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
VARIANCE_EPSILON = 1e-8
"""Number added to the variance in `whiten` (the same as in TRL's, verl's and MAYE's code)."""


def rewards_to_go(rewards_T: Array, gamma: float) -> Array:
    """Return the discounted return of every token: G_t = r_t + gamma * G_{t+1}.

    Returns: [T].
    Source: REINFORCE++, arXiv:2501.03262; MAYE, arXiv:2504.02587 eq. 1.
    Example: rewards [0, 0, 1], gamma 0.5 -> [0.25, 0.5, 1].
    """
    returns = np.zeros(len(rewards_T))
    after = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        after = float(rewards_T[t]) + gamma * after
        returns[t] = after
    return returns


def gae(rewards_T: Array, values_T: Array, *, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return the generalised advantage estimates and the value targets of one response.

    delta_t = r_t + gamma * V_{t+1} - V_t;  A_t = delta_t + gamma * lam * A_{t+1};  target_t = A_t + V_t.
    The value after the last token is taken as 0, even if the token limit cut the response (as in TRL's and verl's
    code).

    Args:
        rewards_T: the reward of each token.
        values_T: the critic's value before each token.
        gamma: discount, in [0, 1].
        lam: in [0, 1]: 0 = one-step estimates, 1 = returns to the end of the response.
    Returns: (advantages [T], targets [T]).
    Raises: ValueError when the lengths differ.
    Source: GAE, arXiv:1506.02438 eq. 16.
    Example: rewards [0, 1], values [0.5, 0.25], gamma 1, lam 0.5 -> deltas [-0.25, 0.75] -> advantages [0.125, 0.75].
    """
    if len(rewards_T) != len(values_T):
        raise ValueError(f"{len(rewards_T)} rewards but {len(values_T)} values")
    following = np.append(values_T, 0.0)[1:]  # V_{t+1}, [T]
    delta = rewards_T + gamma * following - values_T
    advantages = rewards_to_go(delta, gamma * lam)
    return advantages, advantages + values_T


def explained_variance(values_N: Array, targets_N: Array) -> float | None:
    """Return 1 - variance(target - value) / variance(target).

    Returns: 1 = a perfect critic, 0 = as good as a constant prediction, < 0 = worse. None if there are no targets, or
        if all are equal, so that there is no variance to explain.
    Example: targets [0, 2], values [0, 1]: residuals [0, 1], variances 1 and 0.25 -> 0.75.
    """
    if len(targets_N) == 0 or targets_N.min() == targets_N.max():
        return None
    return float(1.0 - np.var(targets_N - values_N) / np.var(targets_N))


def whiten(values: Sequence[Array], lengths: Sequence[int], *, keep_mean: bool) -> list[Array]:
    """Return (value - mean) / sqrt(variance + 1e-8), with mean and unbiased variance over all tokens of a batch.

    Args:
        values: one array per response: [T], or [1] = the same number for all its tokens.
        lengths: tokens of each response.
        keep_mean: whether to add the mean back after the division, as MAYE's code does.
    Returns: arrays with the same shapes; exactly 0 when all values are equal or there are fewer than two tokens.
    Source: REINFORCE++, arXiv:2501.03262 (advantages normalised over the global batch).
    Example: [1] and [0] with 1 and 3 tokens: mean 0.25, variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25 -> [1.5] and [-0.5].
    """
    # A single number for n tokens is weighted n times. Below, both arrays contain the whole batch: [all values].
    weights = [np.full(len(v), n / len(v)) for v, n in zip(values, lengths, strict=True)]
    flat = np.concatenate([np.zeros(0), *values])
    weight = np.concatenate([np.zeros(0), *weights])
    total = weight.sum()
    if total < 2 or flat.min() == flat.max():
        return [np.zeros(len(v)) for v in values]
    mean = (weight * flat).sum() / total
    variance = (weight * (flat - mean) ** 2).sum() / (total - 1)
    scale = np.sqrt(variance + VARIANCE_EPSILON)
    return [(v - mean) / scale + (mean if keep_mean else 0.0) for v in values]
