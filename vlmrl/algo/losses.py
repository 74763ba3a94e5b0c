"""Per-token loss terms. Tensors in, tensors out; nothing is masked or reduced here (aggregate.py does both).

Letters: K trained tokens, flat over all responses of a microbatch. float32, log-probs in nats.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are limited to +-20 before exp: a ratio of 5e8 is past any clip and would overflow the KL."""


def log_ratio(logp_K: Tensor, old_logp_K: Tensor, sequence_K: Tensor, level: str) -> Tensor:
    """log of the probability ratio new / old, per token or per response.

    Args:
        sequence_K: index of each token's response, 0-based and dense.
        level: "token": logp - old_logp. "sequence": its mean over the response, the gradient spread evenly.
            "sequence_token": the value of that mean, with the gradient of each token's own log-prob.
    Source: PPO, arXiv:1707.06347 eq. 6; GSPO, arXiv:2507.18071 eq. 7; GSPO-token: its eq. 14.
    """
    if level == "token":
        return (logp_K - old_logp_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level not in ("sequence", "sequence_token"):
        raise ValueError(f"unknown ratio level {level!r}")
    count = int(sequence_K.max()) + 1 if len(sequence_K) else 0
    total_S = torch.zeros(count, dtype=logp_K.dtype, device=logp_K.device)
    total_S = total_S.index_add(0, sequence_K, logp_K - old_logp_K)
    length_S = torch.bincount(sequence_K, minlength=count).clamp(min=1)
    mean_K = (total_S / length_S)[sequence_K].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return mean_K if level == "sequence" else mean_K.detach() + (logp_K - logp_K.detach())


def clipped_surrogate(
    log_ratio_K: Tensor, advantage_K: Tensor, *, clip_low: float | None, clip_high: float | None
) -> Tensor:
    """PPO's clipped objective per token, as a loss (lower is better).

    Args:
        log_ratio_K: from `log_ratio`; the only input with gradient.
        advantage_K: positive = better than its group.
        clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high]; both None = no clip.
    Source: PPO, arXiv:1707.06347 eq. 7; separate bounds: DAPO, arXiv:2503.14476 (Clip-Higher).
    Example: ratio 1.5, advantage +1, clip_high 0.28 -> -1.28.
    """
    ratio_K = log_ratio_K.exp()
    if clip_low is None and clip_high is None:
        return -advantage_K * ratio_K
    low = 1.0 - clip_low if clip_low is not None else 0.0
    high = 1.0 + clip_high if clip_high is not None else float("inf")
    return -torch.minimum(advantage_K * ratio_K, advantage_K * ratio_K.clamp(low, high))


def dual_clipped(loss_K: Tensor, advantage_K: Tensor, limit: float) -> Tensor:
    """The loss, at most limit * |advantage| where the advantage is negative: a huge ratio stops pushing.

    Args: loss_K: from `clipped_surrogate`. limit: > 1; 3 is usual.
    Source: dual-clip PPO, arXiv:1912.09729 eq. 5. Example: ratio 10, advantage -1, limit 3 -> 3 in place of 10.
    """
    return torch.where(advantage_K < 0, torch.minimum(loss_K, -advantage_K * limit), loss_K)


def clipped_share(
    log_ratio_K: Tensor, advantage_K: Tensor, *, clip_low: float | None, clip_high: float | None
) -> Tensor:
    """1.0 for each token whose gradient the clip removes, else 0.0. No gradient. Shape [K]."""
    ratio_K = log_ratio_K.detach().exp()
    over = (advantage_K > 0) & (ratio_K > 1.0 + (clip_high if clip_high is not None else float("inf")))
    under = (advantage_K < 0) & (ratio_K < 1.0 - (clip_low if clip_low is not None else float("inf")))
    return (over | under).float()


def cross_entropy(logp_K: Tensor) -> Tensor:
    """Negative log-likelihood per token: the loss of supervised training. Shape [K]."""
    return -logp_K
