"""Weights that correct for an engine whose log-probs are not the trainer's. Per token, no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from vlmrl.algo.losses import LOG_RATIO_LIMIT


@torch.no_grad()
def importance_weight(
    old_logp_K: Tensor, sampler_logp_K: Tensor, response_K: Tensor, *, mode: str, level: str, cap: float
) -> Tensor:
    """Trainer over engine: the probability ratio of what was sampled, limited. Shape [K].

    Args:
        old_logp_K: under the trainer's weights that sampled.
        sampler_logp_K: what the engine said; NaN where nobody sampled: such a token counts 1.
        response_K: index of each token's response, 0-based and dense.
        mode: "truncate": at most `cap`. "mask": 0 outside [1 / cap, cap], where the two disagree too much.
        level: "token": its own ratio. "sequence": the product over the response, the same on each of its tokens.
        cap: > 1; 2 is usual.
    Source: truncated importance sampling, Ionides (2008), used for engines by F. Yao et al. (2025, "Your efficient RL
        framework secretly brings you off-policy RL training"); two-sided mask: IcePop, arXiv:2510.18855 section 3.
    Example: log-ratios [ln 4, ln 0.8], cap 2: truncate -> [2, 0.8]; mask -> [0, 0.8]; sequence, truncate -> [2, 2].
    """
    change_K = torch.nan_to_num(old_logp_K - sampler_logp_K, nan=0.0)
    if level == "sequence":
        count = int(response_K.max()) + 1 if len(response_K) else 0
        total_S = torch.zeros(count, dtype=change_K.dtype, device=change_K.device)
        change_K = total_S.index_add(0, response_K, change_K)[response_K]
    elif level != "token":
        raise ValueError(f"unknown importance level {level!r}")
    weight_K = change_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "truncate":
        return weight_K.clamp(max=cap)
    if mode == "mask":
        return weight_K * ((weight_K <= cap) & (weight_K >= 1.0 / cap))
    raise ValueError(f"unknown importance mode {mode!r}")
