"""Policy losses of the GRPO family per token, estimators of the KL, and their aggregation into one number.

Letters: K trained tokens, flat over all responses of a microbatch; S responses of the whole update. float32, log-probs
in nats. On policy, the gradient of every surrogate with respect to a token's log-prob is -advantage, except for tokens
that "clip_cov" picked. The denominator is fixed before the first backward, so the gradient does not depend on how an
update is split into microbatches. The KL estimator "full" needs hidden states: see algo/divergence.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmrl.algo.advantages import share_of
from vlmrl.algo.algo_keys import Algorithm

LOG_RATIO_LIMIT = 20.0
"""Limit of a log-ratio before exp, +-20. The ratio exp(20) = 5e8 is beyond any clip; larger ones would overflow the
KL."""


def log_ratio(logp_K: Tensor, old_logp_K: Tensor, sequence_K: Tensor, level: str) -> Tensor:
    """Return the log of the probability ratio new / old, per token or per response.

    Args:
        sequence_K: index of each token's response, 0-based and dense.
        level: "token": logp - old_logp. "sequence": the mean of these over the response; its gradient is spread evenly
            over the tokens. "sequence_token": the same value, but a token's gradient is only that of its own log-prob.
    Returns: [K], nats, limited to +-20.
    Raises: ValueError for an unknown level.
    Source: PPO, arXiv:1707.06347 eq. 6; GSPO, arXiv:2507.18071 eq. 7; GSPO-token: its eq. 14.
    """
    if level == "token":
        return (logp_K - old_logp_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if level not in ("sequence", "sequence_token"):
        raise ValueError(f"unknown ratio level {level!r}")
    # [K] -> [K]: every token of a response has the response's mean.
    mean_K = _response_mean(logp_K - old_logp_K, sequence_K).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # logp - logp.detach() is 0: it only adds the gradient of each token's own log-prob.
    return mean_K if level == "sequence" else mean_K.detach() + (logp_K - logp_K.detach())


def _response_mean(values_K: Tensor, response_K: Tensor) -> Tensor:
    """Return, for each token, the mean of the values over its response.

    Args:
        response_K: index of each token's response, 0-based and dense, like `Tokens.response`.
    Returns: [K].
    """
    return _response_sum(values_K, response_K) / _response_sum(torch.ones_like(values_K), response_K)


def _response_sum(values_K: Tensor, response_K: Tensor) -> Tensor:
    """Return, for each token, the sum of the values over its response. [K]."""
    # K entries are used, because S <= K: reading the true S would make the CPU wait for the GPU. [K] -> [S] -> [K]
    return torch.zeros_like(values_K).index_add(0, response_K, values_K)[response_K]


def clipped_surrogate(
    log_ratio_K: Tensor, advantage_K: Tensor, *, clip_low: float | None, clip_high: float | None
) -> Tensor:
    """Return PPO's clipped objective per token, as a loss (lower is better).

    Args:
        log_ratio_K: result of `log_ratio`; the only input with gradient.
        advantage_K: positive = better than its group.
        clip_low, clip_high: the ratio is clipped to [1 - clip_low, 1 + clip_high]; None = no bound on that side; both
            None = no clip.
    Returns: [K], not reduced.
    Source: PPO, arXiv:1707.06347 eq. 7; separate bounds: DAPO, arXiv:2503.14476 (Clip-Higher).
    Example: ratio 1.5, advantage +1, clip_high 0.28 -> -1.28.
    """
    ratio_K = log_ratio_K.exp()
    if clip_low is None and clip_high is None:
        return -advantage_K * ratio_K
    low = 1.0 - clip_low if clip_low is not None else 0.0
    high = 1.0 + clip_high if clip_high is not None else float("inf")
    # The minimum keeps the gradient of a token whose ratio is outside the bounds, if the gradient moves it back.
    return -torch.minimum(advantage_K * ratio_K, advantage_K * ratio_K.clamp(low, high))


def dual_clipped(loss_K: Tensor, advantage_K: Tensor, limit: float) -> Tensor:
    """Return the loss, limited to limit * |advantage| for tokens with negative advantage.

    Above the limit a token has no gradient, so a huge ratio cannot dominate the update.

    Args:
        loss_K: result of `clipped_surrogate`.
        limit: > 1; 3 is usual.
    Returns: [K].
    Source: dual-clip PPO, arXiv:1912.09729. Example: ratio 10, advantage -1, limit 3 -> 3 instead of 10.
    """
    return torch.where(advantage_K < 0, torch.minimum(loss_K, -advantage_K * limit), loss_K)


def clipped_share(
    log_ratio_K: Tensor, advantage_K: Tensor, *, clip_low: float | None, clip_high: float | None
) -> Tensor:
    """Return 1.0 for each token whose gradient the clip removes, else 0.0.

    Returns: [K] float32, without gradient.
    """
    ratio_K = log_ratio_K.detach().exp()
    over = (advantage_K > 0) & (ratio_K > 1.0 + (clip_high if clip_high is not None else float("inf")))
    under = (advantage_K < 0) & (ratio_K < 1.0 - (clip_low if clip_low is not None else float("inf")))
    return (over | under).float()


def cross_entropy(logp_K: Tensor) -> Tensor:
    """Return the negative log-likelihood per token, the loss of supervised training. [K], nats."""
    return -logp_K


@torch.no_grad()
def importance_weight(
    old_logp_K: Tensor, sampler_logp_K: Tensor, response_K: Tensor, *, mode: str, level: str, cap: float
) -> Tensor:
    """Return the probability ratio trainer / engine of the sampled tokens, limited.

    Args:
        old_logp_K: log-probs of the trainer before the first update, in nats.
        sampler_logp_K: the engine's log-probs, in nats; NaN = the token was not sampled, and its weight is 1.
        response_K: index of each token's response, 0-based and dense.
        mode: "truncate": the weight is at most `cap`. "mask": the weight is 0 if the ratio is outside [1 / cap, cap].
        level: "token": each token has its own ratio. "sequence": all tokens have the product over their response.
        cap: > 1; 2 is usual.
    Returns: [K], without gradient.
    Raises: ValueError for an unknown mode or level.
    Source: truncated importance sampling, Ionides (2008), used for engines by F. Yao et al. (2025, "Your efficient RL
        framework secretly brings you off-policy RL training"); two-sided mask: IcePop, arXiv:2510.18855.
    Example: log-ratios [ln 4, ln 0.8], cap 2: truncate -> [2, 0.8]; mask -> [0, 0.8]; sequence, truncate -> [2, 2].
    """
    change_K = torch.nan_to_num(old_logp_K - sampler_logp_K, nan=0.0)
    if level == "sequence":
        change_K = _response_sum(change_K, response_K)  # the log of the product
    elif level != "token":
        raise ValueError(f"unknown importance level {level!r}")
    weight_K = change_K.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "truncate":
        return weight_K.clamp(max=cap)
    if mode == "mask":
        return weight_K * ((weight_K <= cap) & (weight_K >= 1.0 / cap))
    raise ValueError(f"unknown importance mode {mode!r}")


WEIGHT_FLOOR = 1e-10
"""Number added to a weight before its logarithm is taken, because the weight may be 0 (as in verl's code)."""


@torch.no_grad()
def applied_weight(algorithm: Algorithm, weight_K: Tensor, response_K: Tensor) -> Tensor:
    """Return the factor of each token's loss, given the importance weight of each token.

    The factor is the weight itself. For "gmpo", which has one loss per response, it is the geometric mean of the
    weights over the response.

    Returns: [K], without gradient.
    Source: verl's code of GMPO (`geo_mean`), including its floor of 1e-10. In a response of n tokens, one token with
        weight 0 (mode "mask") multiplies the factor by 1e-10^(1 / n).
    Example: "gmpo", weights [2, 0.5] and [0.8] of two responses -> [1, 1] and [0.8].
    """
    if algorithm.surrogate != "gmpo":
        return weight_K
    return _response_mean((weight_K + WEIGHT_FLOOR).log(), response_K).exp()


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of a microbatch, as the surrogates need them. All tensors are [K].

    Args:
        logp: log-probs under the policy being trained, in nats; the only tensor with gradient.
        old_logp: log-probs before the first update of the step, in nats.
        advantage: positive = better than its group.
        response: index of each token's response, 0-based and dense; a response is never split over microbatches.
        selected: bool, True = `select_tokens` picked the token; None = the surrogate picks no tokens.
        demonstrated: bool, True = a demonstration wrote the token, not the policy; None = the policy wrote all.
    """

    logp: Tensor
    old_logp: Tensor
    advantage: Tensor
    response: Tensor
    selected: Tensor | None = None
    demonstrated: Tensor | None = None


Loss = tuple[Tensor, Tensor]
"""(loss_K with gradient, clipped_K without gradient).

clipped_K is 1.0 for each token whose loss is changed by a bound of the ratio, else 0.0. Such a token has no gradient,
except with "cispo": there it has one, and the bound limits its weight.
"""


def clip(a: Algorithm, x: Tokens) -> Loss:
    """Return PPO's clipped surrogate with separate bounds, at the algorithm's ratio level, and the dual clip.

    Source: PPO, arXiv:1707.06347 eq. 7; DAPO, arXiv:2503.14476 eq. 8; GSPO, arXiv:2507.18071 eq. 5; dual clip:
        arXiv:1912.09729.
    """
    change = log_ratio(x.logp, x.old_logp, x.response, a.ratio)
    bounds = {"clip_low": a.clip_low, "clip_high": a.clip_high}
    loss, clipped = clipped_surrogate(change, x.advantage, **bounds), clipped_share(change, x.advantage, **bounds)
    if a.dual_clip is None:
        return loss, clipped
    limited = dual_clipped(loss, x.advantage, a.dual_clip)
    return limited, torch.maximum(clipped, (limited.detach() != loss.detach()).float())


def reinforce(a: Algorithm, x: Tokens) -> Loss:
    """Return -advantage * log-prob, the plain policy gradient without a ratio.

    Source: REINFORCE (Williams, 1992); GPG, arXiv:2504.02546; ReMax, arXiv:2310.10505.
    Example: probability 0.5, advantage 2 -> 1.386.
    """
    return -x.advantage * x.logp, torch.zeros_like(x.advantage)


def cispo(a: Algorithm, x: Tokens) -> Loss:
    """Return -clipped ratio * advantage * log-prob. The clipped ratio is detached, so every token keeps a gradient.

    A token counts as clipped if its ratio is outside the bounds, whatever the sign of its advantage (as in verl's code;
    TRL's code counts only tokens with positive advantage).

    Source: CISPO, MiniMax-M1, arXiv:2506.13585 eq. 4-5, without a lower bound. The paper does not state the upper
        bound: 5 is from arXiv:2510.13786.
    Example: probability 0.6, old 0.1 (ratio 6, clipped to 5), advantage 1 -> -5 * ln 0.6 = 2.554.
    """
    ratio = log_ratio(x.logp.detach(), x.old_logp, x.response, a.ratio).exp()
    low = 1.0 - a.clip_low if a.clip_low is not None else 0.0
    high = 1.0 + a.clip_high if a.clip_high is not None else float("inf")
    limited = ratio.clamp(low, high)
    return -limited * x.advantage * x.logp, (limited != ratio).to(x.advantage.dtype)


def gmpo(a: Algorithm, x: Tokens) -> Loss:
    """Return -advantage * geometric mean of the response's token ratios.

    Each log-ratio is limited on the side on which PPO limits the ratio. All tokens of a response have the same value,
    so with aggregation "sequence_mean" a response counts once.

    Source: GMPO, arXiv:2507.20673.
    Example: log-ratios [0.6, 0.2], advantage 1, bounds +-0.4 -> exp((0.4 + 0.2) / 2) = 1.350 -> -1.350 on both.
    """
    change = (x.logp - x.old_logp).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    low = -a.clip_low if a.clip_low is not None else -LOG_RATIO_LIMIT
    high = a.clip_high if a.clip_high is not None else LOG_RATIO_LIMIT
    limited = change.clamp(low, high)
    # As in PPO's minimum: the upper bound applies if the advantage is positive, the lower bound if it is negative.
    bounded = torch.where(x.advantage >= 0, torch.minimum(change, limited), torch.maximum(change, limited))
    mean = log_ratio(bounded, torch.zeros_like(bounded), x.response, "sequence")
    return -x.advantage * mean.exp(), ((bounded != change) & (x.advantage != 0)).detach().float()


def sapo(a: Algorithm, x: Tokens) -> Loss:
    """Return -advantage * (4 / tau) * sigmoid(tau * (ratio - 1)); tau depends on the sign of the advantage.

    Source: SAPO, arXiv:2511.20347. Example: ratio 1, advantage 1, tau 1 -> -2, with gradient -1.
    """
    ratio = log_ratio(x.logp, x.old_logp, x.response, a.ratio).exp()
    tau = torch.full_like(ratio, a.tau_negative).masked_fill(x.advantage > 0, a.tau_positive)
    return -x.advantage * torch.sigmoid(tau * (ratio - 1.0)) * 4.0 / tau, torch.zeros_like(x.advantage)


def clip_cov(a: Algorithm, x: Tokens) -> Loss:
    """Return the clipped surrogate, with loss and gradient 0 for the tokens that `select_tokens` picked.

    Source: Clip-Cov, arXiv:2505.22617.
    """
    loss, clipped = clip(a, x)
    if x.selected is None:
        return loss, clipped
    return loss.masked_fill(x.selected, 0.0), torch.maximum(clipped, x.selected.float())


def kl_cov(a: Algorithm, x: Tokens) -> Loss:
    """Return -advantage * ratio without a clip; tokens that `select_tokens` picked add cov_kl_coef * |log-ratio|.

    Source: KL-Cov, arXiv:2505.22617.
    Example: ratio 1.5, advantage 1, coefficient 1 -> -1.5 + ln 1.5 = -1.095.
    """
    change = log_ratio(x.logp, x.old_logp, x.response, a.ratio)
    loss = -x.advantage * change.exp()
    if x.selected is not None:
        loss = loss + a.cov_kl_coef * change.abs() * x.selected
    return loss, torch.zeros_like(x.advantage)


def vespo(a: Algorithm, x: Tokens) -> Loss:
    """Return -W^k exp(d (1 - W)) * advantage * log-prob, where W is the ratio of the whole response.

    W is the product of the token ratios, without a mean over the length. The factor in front is detached. It is 1 on
    policy, largest at W = k / d, and falls to 0 on both sides. Power k and decay d depend on the sign of the advantage.

    Source: VESPO, arXiv:2602.10693 (its kernel W^c1 exp(c2 (1 - W))); k and d: the authors' code.
    Example: ratios 2 and 0.75, advantage 1: W = 1.5 -> 1.5^2 exp(3 (1 - 1.5)) = 0.502; gradient -0.502 on both tokens.
    """
    change = log_ratio(x.logp.detach(), x.old_logp, x.response, "token")
    log_w = _response_sum(change, x.response)
    is_good = x.advantage >= 0
    power = torch.full_like(log_w, a.power_negative).masked_fill(is_good, a.power_positive)
    decay = torch.full_like(log_w, a.decay_negative).masked_fill(is_good, a.decay_positive)
    weight = (power * log_w + decay * (1.0 - log_w.exp())).exp()
    return -weight * x.advantage * x.logp, torch.zeros_like(x.advantage)


SURROGATE_LOSSES: dict[str, Callable[[Algorithm, Tokens], Loss]] = {
    "clip": clip,
    "reinforce": reinforce,
    "cispo": cispo,
    "gmpo": gmpo,
    "sapo": sapo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "vespo": vespo,
}
"""Name in the algorithm table -> surrogate function. choices.py lists the names that a recipe may use, with facts."""


def shaped_demonstration(logp_K: Tensor, advantage_K: Tensor, shaping: float) -> Tensor:
    """Return -advantage * p / (p + shaping): a demonstration's policy gradient that does not fade at unlikely tokens.

    Returns: [K], not reduced.
    Source: LUFFY, arXiv:2504.14945, with p as in its folder `luffy/` (`ExGRPO/` takes p over the old one).
    Example: p 0.4, advantage 1, shaping 0.1 -> -0.8, with the gradient -0.1 * 0.4 / 0.5^2 = -0.16 for log p.
    """
    p_K = logp_K.exp()
    return -advantage_K * p_K / (p_K + shaping)


def unsure_weight(logp_K: Tensor) -> Tensor:
    """Return p (1 - p): 0 for tokens that the policy is sure of, or sure against. [K], without gradient.

    Source: CHORD, arXiv:2508.11408. Example: p 0.4 -> 0.24.
    """
    p_K = logp_K.detach().exp()
    return p_K * (1.0 - p_K)


def own_demonstration_loss(a: Algorithm, logp_K: Tensor, mean_entropy: float) -> Tensor | None:
    """Return the loss of demonstrations that has a mean of its own; None if the algorithm has none.

    Args:
        mean_entropy: H of `both`, in nats.
    Returns: [K], not reduced, without `demonstration_coef`.
    Source: UFT, arXiv:2505.16984; HPT, arXiv:2509.04419; CHORD, arXiv:2508.11408; SRFT, arXiv:2506.19767.
    Example: p 0.4 -> 0.9163; "unsure" 0.24 * 0.9163 = 0.2199; "both" with H 0.5 -> 0.6065 * 0.9163 = 0.5558.
    """
    loss_K = cross_entropy(logp_K)
    if a.demonstration_loss == "nll":
        return loss_K
    if a.demonstration_loss == "unsure":
        return unsure_weight(logp_K) * loss_K
    return math.exp(-mean_entropy) * loss_K if a.demonstration_loss == "both" else None


def clipped_value_loss(value_K: Tensor, old_value_K: Tensor, target_K: Tensor, *, clip_range: float) -> Tensor:
    """Return 0.5 * max((value - target)^2, (limited value - target)^2) per token.

    There is no gradient if the value has moved from the old value towards its target by more than `clip_range`.

    Args:
        value_K: the critic's values; the only tensor with gradient.
        old_value_K: the critic's values before the first update of the step.
        target_K: value targets, see `returns.gae`.
        clip_range: > 0; the limited value is the value, limited to old value +- clip_range.
    Returns: [K], not reduced.
    Source: squared error: arXiv:1707.06347 eq. 9; clip: OpenAI's code, described in arXiv:2005.12729, section 3; factor
        0.5: the code of arXiv:1909.08593.
    Example: old 0, target 1, range 0.2: value 0.1 -> 0.405; value 0.5 -> max(0.25, 0.64) / 2 = 0.32, without gradient.
    """
    limited_K = old_value_K + (value_K - old_value_K).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((value_K - target_K).square(), (limited_K - target_K).square())


def policy_loss(algorithm: Algorithm, tokens: Tokens) -> Loss:
    """Return the loss of the algorithm's surrogate, for demonstrated tokens that of `shaped_demonstration` or 0.

    Raises: ValueError for an unknown surrogate.
    """
    if algorithm.surrogate not in SURROGATE_LOSSES:
        raise ValueError(f"unknown surrogate {algorithm.surrogate!r}")
    loss, clipped = SURROGATE_LOSSES[algorithm.surrogate](algorithm, tokens)
    if tokens.demonstrated is None:
        return loss, clipped
    others = torch.zeros_like(loss)
    if algorithm.one_mean:
        others = shaped_demonstration(tokens.logp, tokens.advantage, algorithm.shaping)
    return torch.where(tokens.demonstrated, others, loss), clipped.masked_fill(tokens.demonstrated, 0.0)


@torch.no_grad()
def select_tokens(
    algorithm: Algorithm, logps: Sequence[Tensor], old_logps: Sequence[Tensor], advantages: Sequence[Tensor], seed: int
) -> list[Tensor]:
    """Pick the tokens of an update that "clip_cov" or "kl_cov" treats differently.

    The covariance of a token is (log-prob - mean) * (advantage - mean), with both means over all tokens of the update.
    So tokens are picked once per update, before the first backward, from all responses together. The choice depends on
    the order of the responses (the trajectory index), but not on how they are packed in rows or microbatches.

    Args:
        logps, old_logps, advantages: lists over the responses of the update, each entry [tokens].
        seed: seed of Clip-Cov's random choice.
    Returns: one bool tensor [tokens] per response, True = picked. "clip_cov" picks max(1, cov_share * tokens) random
        tokens among those that the clip does not change and whose covariance is between cov_low and cov_high. "kl_cov"
        picks the same number of tokens: those with the highest covariance.
    Source: arXiv:2505.22617. Deviations: the random choice has a seed, and tokens are picked from whole updates, not
        microbatches.
    """
    # One flat tensor over all tokens of the update, in float64 on the CPU, where the random choice is made.
    logp, old, advantage = (torch.cat(list(x)).double().cpu() for x in (logps, old_logps, advantages))
    covariance = (logp - logp.mean()) * (advantage - advantage.mean())
    count = max(1, int(algorithm.cov_share * len(logp)))
    chosen = torch.zeros(len(logp), dtype=torch.bool)
    if algorithm.surrogate == "kl_cov":
        chosen[torch.argsort(covariance, descending=True, stable=True)[:count]] = True
    else:
        response = torch.repeat_interleave(
            torch.arange(len(logps), device="cpu"), torch.tensor([len(x) for x in logps], device="cpu")
        )
        ratio = log_ratio(logp, old, response, algorithm.ratio)
        clipped = clipped_share(ratio, advantage, clip_low=algorithm.clip_low, clip_high=algorithm.clip_high) > 0
        eligible = ~clipped & (covariance > algorithm.cov_low) & (covariance < algorithm.cov_high)
        indices = eligible.nonzero()[:, 0]  # indices of the tokens that may be picked
        generator = torch.Generator().manual_seed(seed)
        chosen[indices[torch.randperm(len(indices), generator=generator)[:count]]] = True
    return list(chosen.split([len(x) for x in logps]))


@dataclass(frozen=True)
class Denominator:
    """Denominator of the loss, computed once from ALL responses of an update, on all ranks.

    Args:
        aggregation: "token_mean" (all trained tokens count the same), "sequence_mean" (all responses count the
            same), "sequence_sum" (responses: a response counts by its length), or "constant" (responses x
            `max_tokens`). In the last two, a token's weight does not depend on the length of its response.
        num_tokens: number of trained tokens in the whole update.
        num_sequences: number of responses with at least one trained token in the whole update.
        max_tokens: token limit of a response; used by "constant".
        num_dead_tokens: number of those `num_tokens` that never enter a forward pass, because their loss is exactly 0.
    """

    aggregation: str
    num_tokens: int
    num_sequences: int
    max_tokens: int
    num_dead_tokens: int = 0

    @classmethod
    def of(
        cls, aggregation: str, tokens_S: Sequence[int], max_tokens: int, dead_tokens_S: Sequence[int] = ()
    ) -> Denominator:
        """Return the denominator of an update with these responses.

        Args:
            tokens_S: number of trained tokens of each response that enters a forward pass.
            dead_tokens_S: number of trained tokens of each response that enters no forward pass, but counts in the
                denominator.
        """
        trained = [n for n in tokens_S if n > 0]
        dead = [n for n in dead_tokens_S if n > 0]
        return cls(aggregation, sum(trained) + sum(dead), len(trained) + len(dead), max_tokens, sum(dead))


def aggregate(loss_K: Tensor, sequence_tokens_K: Tensor, total: Denominator) -> Tensor:
    """Return this microbatch's share of the loss of its update; the shares of all microbatches add up to the loss.

    Args:
        sequence_tokens_K: number of trained tokens in the response of each token.
    Returns: a scalar.
    Raises: ValueError for an unknown aggregation.
    Source of "sequence_sum": LUSPO, arXiv:2602.05261, which multiplies the loss of a response by its length.
    Example: responses with losses [1, 1, 1] and [4]: token_mean (3 + 4) / 4 = 1.75; sequence_mean (1 + 4) / 2 = 2.5;
        sequence_sum (3 + 4) / 2 = 3.5; constant with max_tokens 10: 7 / 20 = 0.35.
    """
    # max(1, ...): an update without a trained token has the loss 0, not NaN.
    if total.aggregation == "token_mean":
        return loss_K.sum() / max(1, total.num_tokens)
    if total.aggregation == "sequence_mean":
        # Each token is weighted with 1 / (length of its response), so a response's sum is its mean. [K] -> scalar
        return (loss_K / sequence_tokens_K.to(loss_K.dtype)).sum() / max(1, total.num_sequences)
    if total.aggregation == "sequence_sum":
        return loss_K.sum() / max(1, total.num_sequences)
    if total.aggregation == "constant":
        return loss_K.sum() / max(1, total.num_sequences * total.max_tokens)
    raise ValueError(f"unknown aggregation {total.aggregation!r}")


def global_mean(values_K: Tensor, total: Denominator) -> Tensor:
    """Return this microbatch's share of a mean over the tokens of its update that enter a forward pass.

    Returns: a scalar, float64, without gradient.
    """
    return values_K.detach().to(torch.float64).sum() / max(1, total.num_tokens - total.num_dead_tokens)


MAX_VALUE = 10.0
"""Largest value of `low_var_kl`, in nats."""


def _difference(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return ref_logp - logp, limited to +-20: for a token that the reference excludes, estimates would overflow."""
    return (ref_logp_K - logp_K).clamp(-20.0, 20.0)


def k1(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return logp - ref_logp: unbiased in value, may be negative.

    It is meant for the KL in the reward. As a term of the loss, its expected gradient is zero.

    Returns: [K], nats.
    Source: J. Schulman, "Approximating KL divergence" (2020), k1. Example: ref 0.5, policy 0.25 -> -0.6931.
    """
    return -_difference(logp_K, ref_logp_K)


def k2(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return (ref_logp - logp)^2 / 2: biased in value; as a loss, its expected gradient is the KL's.

    Returns: [K], nats.
    Source: J. Schulman (2020), k2. Example: ref 0.5, policy 0.25 -> 0.6931^2 / 2 = 0.2402.
    """
    return 0.5 * _difference(logp_K, ref_logp_K).square()


def k3(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = ref_logp - logp: unbiased in value, never negative.

    Returns: [K], nats.
    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3; GRPO, arXiv:2402.03300 eq. 4.
    Example: logp = ref_logp -> 0; ref 0.5, policy 0.25 -> d = ln 2 -> 2 - 0.6931 - 1 = 0.3069.
    """
    d = _difference(logp_K, ref_logp_K)
    return d.exp() - d - 1.0


def low_var_kl(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return k3 with its value limited to 10: a token above the limit has no gradient.

    Returns: [K], nats.
    Source: EasyR1's and verl's code.
    Example: ref 1, policy e^-5 -> exp(5) - 5 - 1 = 142.4 -> 10.
    """
    return k3(logp_K, ref_logp_K).clamp(max=MAX_VALUE)


def absolute(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return |logp - ref_logp|, whose gradient has the same size at any distance.

    Returns: [K], nats.
    Example: ref 0.5, policy 0.25 -> 0.6931.
    """
    return _difference(logp_K, ref_logp_K).abs()


KL_LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
}
"""Name in the algorithm table -> function (policy log-probs [K], reference log-probs [K]) -> KL estimates [K]."""


def perception_loss(a: Algorithm, logp_K: Tensor, masked_logp_K: Tensor, entropy_K: Tensor) -> tuple[Tensor, Tensor]:
    """Return the perception terms of the pass behind the images, and the KL to the policy behind masked images.

    The terms are -perception_coef * KL + perception_entropy * entropy. The entropy is the exact one if both passes get
    a gradient, else -log p, to which "loss" adds the constant of the masked pass.

    Args:
        masked_logp_K: log-probs of the same tokens behind masked images; never with gradient here.
        entropy_K: entropies, with gradient if both passes get one.
    Returns: ([K] not reduced, [K] nats, without gradient).
    Source: PAPO, arXiv:2507.06448; k3 of its code, at most 10.
    Example: p 0.5, masked 0.25: k3 = 0.5 + 0.6931 - 1 = 0.1931; with the coefficient 0.01 the term is -0.00193.
    """
    kl_K = low_var_kl(logp_K, masked_logp_K.detach())
    loss_K = -a.perception_coef * kl_K if a.perception == "loss" else torch.zeros_like(kl_K)
    if a.perception_entropy:
        penalty_K = entropy_K if a.masks_both else -logp_K
        if a.perception == "loss" and not a.masks_both:
            penalty_K = penalty_K - masked_logp_K.detach()
        loss_K = loss_K + a.perception_entropy * penalty_K
    return loss_K, kl_K.detach()


def masked_perception_loss(a: Algorithm, logp_K: Tensor, masked_logp_K: Tensor, entropy_K: Tensor) -> Tensor:
    """Return the perception terms of the pass behind masked images, for a gradient of its own.

    The value of the KL is already in `perception_loss`, so here it is 0; its gradient is that through this pass.

    Args:
        logp_K: log-probs behind the images; never with gradient here.
        masked_logp_K, entropy_K: of the pass behind masked images, with gradient.
    Returns: [K], not reduced.
    Source: PAPO, arXiv:2507.06448.
    Example: p 0.5, masked 0.25: d k3 / d log(masked) = 0.5 - 1 = -0.5; with the coefficient 0.01 the gradient is 0.005.
    """
    kl_K = low_var_kl(logp_K.detach(), masked_logp_K)
    loss_K = -a.perception_coef * (kl_K - kl_K.detach())
    return loss_K + a.perception_entropy * entropy_K if a.perception_entropy else loss_K


def most_dependent(dependency_T: Tensor, share: float) -> Tensor:
    """Return which tokens of a response have the highest dependency: ceil(share * T), of equal ones the first.

    Returns: bool [T].
    Source: VPPO, arXiv:2510.09285. Example: five tokens, share 0.2 -> one.
    """
    count = share_of(share, len(dependency_T))
    chosen = torch.zeros_like(dependency_T, dtype=torch.bool)
    chosen[torch.argsort(dependency_T, descending=True, stable=True)[:count]] = True
    return chosen


def response_weights(means: Sequence[float], floor: float) -> list[float]:
    """Return a weight of each response of an update: its mean dependency, from `floor` for the least, with the mean 1.

    Source: VPPO, arXiv:2510.09285, and its code: all have 1 if they differ by no more than 1e-6.
    Example: 0.1, 0.3, 0.5 and the floor 0.9 -> 0.9, 1, 1.1.
    """
    low, high = min(means), max(means)
    if high - low <= 1e-6:
        return [1.0] * len(means)
    normal = [(mean - low) / (high - low) for mean in means]
    slope = (1.0 - floor) * len(normal) / math.fsum(normal)
    return [floor + slope * x for x in normal]
