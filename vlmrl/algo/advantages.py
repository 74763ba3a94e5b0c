"""Advantage estimators: from the scores of a step to one advantage per sample, or per token. NumPy float64, no torch.

An advantage is a score minus a baseline (an `Estimator`), divided by a scale. Letters: G samples of one prompt, P
reward parts, T tokens of a response.

If all scores of a group are equal, its advantages are exactly 0, with every estimator but "gae". Without this rule, the
mean of n equal floats could differ from them in the last bit, and the division by a tiny standard deviation would turn
this difference into a large gradient. With "gae", a score is compared with the critic's values: one sample per prompt
is enough, and no group is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil

import numpy as np
from numpy.typing import NDArray

from vlmrl.algo.choices import CRITIC_SCALES, ESTIMATORS, SCALES

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


STD_EPSILON = 1e-6
"""Number added to a standard deviation before division (the same as in DeepSeekMath's code and code based on it)."""


@dataclass(frozen=True)
class ScoredGroup:
    """Scores of the samples of one prompt, with everything that an estimator may use.

    Args:
        scores: [G], one per sample; may be NaN if the sample is not included.
        included: [G], True = the sample is used for baselines and gets an advantage; other samples get exactly 0.
        lengths: [G], number of trained tokens of each sample; () = 1 each.
        parts: [G][P], the reward's parts; None = the part does not apply to that sample. () = the score is the only
            part.
        weights: [P], the weight of each part.
        shares: [G][P], the weight of each part in each sample, if the score is the sum of several rewards; () = a part
            that is None gives its weight to the sample's other parts.
        greedy: score of the greedy answer to the prompt; None = there is none.
        penalties: [G][T], numbers subtracted from each token's reward (the KL in the reward); () = none.
        values: [G][T], the critic's value before each token, for included samples; () = there is no critic.
        energies: [G][T], squared size of d log pi / d logits of each token; () = not known.
    """

    scores: Sequence[float]
    included: Sequence[bool]
    lengths: Sequence[int] = ()
    parts: Sequence[Sequence[float | None]] = ()
    weights: Sequence[float] = ()
    shares: Sequence[Sequence[float]] = field(default=(), kw_only=True)
    greedy: float | None = None
    penalties: Sequence[Array] = ()
    values: Sequence[Array] = ()
    energies: Sequence[Array] = field(default=(), kw_only=True)

    def token_rewards(self, index: int) -> Array:
        """Return each token's reward in a sample, [T]: minus the token's penalty; the last token adds the score."""
        rewards = np.zeros(int(self.lengths[index]) if self.lengths else 1)
        if len(self.penalties):
            rewards -= self.penalties[index]
        rewards[-1:] += float(self.scores[index])
        return rewards


@dataclass(frozen=True)
class _Kept:
    """Included samples of a group.

    Args:
        index: positions of the included samples in the group. G is the number of included samples here.
        totals_G: score of each sample minus the sum of its penalties.
        returns: per sample, the discounted return from each token on, [T]; [1] = the same for all tokens.
        lengths_G: number of trained tokens of each sample.
    """

    group: ScoredGroup
    index: list[int]
    totals_G: Array
    returns: list[Array]
    lengths_G: Array
    gamma: float
    lam: float


def group_mean(kept: _Kept) -> list[Array]:
    """Return score minus the group's mean.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2.
    Example: [1, 0] -> [0.5, -0.5].
    """
    return _column(kept.totals_G - kept.totals_G.mean())


def leave_one_out(kept: _Kept) -> list[Array]:
    """Return score minus the mean of the group's other scores.

    Source: RLOO, arXiv:2402.14740 eq. 5.
    Example: [1, 0, 0] -> [1, -0.5, -0.5].
    """
    # (n s - sum) / (n - 1) = s - (sum - s) / (n - 1)
    n = len(kept.totals_G)
    return _column((kept.totals_G - kept.totals_G.mean()) * n / (n - 1))


def length_weighted(kept: _Kept) -> list[Array]:
    """Return score minus the length-weighted mean of the group's scores.

    This baseline has the least variance if the size of a response's gradient grows with its length.

    Source: OPO, arXiv:2505.23585 (its practical form of the optimal baseline).
    Example: scores [1, 0], lengths [3, 1] -> baseline 0.75 -> [0.25, -0.75].
    """
    baseline = (kept.lengths_G * kept.totals_G).sum() / kept.lengths_G.sum()
    return _column(kept.totals_G - baseline)


def best_of_group(kept: _Kept) -> list[Array]:
    """Return, for the best sample, its score minus the second-best score, and 0 for all other samples.

    If two samples share the best score, all samples get 0.

    Source: Pass@k objective, arXiv:2503.19595 (the case k = G, which verl and RLLaVA implement).
    Example: [0.2, 1, 0.6] -> [0, 0.4, 0].
    """
    order = np.argsort(kept.totals_G, kind="stable")
    gains = np.zeros(len(order))
    gains[order[-1]] = kept.totals_G[order[-1]] - kept.totals_G[order[-2]]
    return _column(gains)


def no_baseline(kept: _Kept) -> list[Array]:
    """Return the discounted return of each token, without a baseline.

    Source: REINFORCE (Williams, 1992); REINFORCE++, arXiv:2501.03262.
    """
    return kept.returns


def nothing(kept: _Kept) -> list[Array]:
    """Return 0 for each sample: the policy learns from something else."""
    return _column(np.zeros(len(kept.index)))


def greedy_baseline(kept: _Kept) -> list[Array]:
    """Return the discounted return of each token minus the score of the prompt's greedy answer.

    Raises: ValueError when the group has no greedy score.
    Source: ReMax, arXiv:2310.10505 (its greedy baseline).
    Example: scores [1, 0], greedy 0.5 -> [0.5, -0.5].
    """
    if kept.group.greedy is None:
        raise ValueError("the greedy baseline needs the score of a greedy answer")
    return [r - kept.group.greedy for r in kept.returns]


def part_by_part(kept: _Kept) -> list[Array]:
    """Return the weighted sum of (part - group mean) / (unbiased standard deviation + 1e-6) over the reward's parts.

    If a part is None for a sample, its weight is distributed to the sample's other parts, as in the score. A part with
    fewer than two values, or with equal values, adds 0. With several rewards the weight stays within the reward: one
    that does not apply to a sample adds 0.

    Source: GDPO, arXiv:2601.05242; the scale "samples" is its batch-wise advantage normalisation.
    Example: parts [[1, 0], [0, 0]], weights [2, 1]: part 1 -> +-0.7071, part 2 -> 0 -> [1.4142, -1.4142].
    """
    parts_GP, weights_P = _parts(kept)
    applies_GP = ~np.isnan(parts_GP)  # bool, True = the part applies to the sample
    normal_GP = np.zeros_like(parts_GP)
    for p in range(parts_GP.shape[1]):
        rows = applies_GP[:, p]
        values = parts_GP[rows, p]
        if not is_dead(values.tolist()):
            normal_GP[rows, p] = (values - values.mean()) / (values.std(ddof=1) + STD_EPSILON)
    if len(kept.group.shares):
        shares_GP = np.array([kept.group.shares[i] for i in kept.index], dtype=np.float64)
        return _column((normal_GP * shares_GP).sum(1))
    # [G, P] -> [G]: total weight of the parts that apply; the factor replaces the weight of those that do not.
    present_G = (applies_GP * weights_P).sum(1)
    rescale_G = np.divide(weights_P.sum(), present_G, out=np.zeros(len(present_G)), where=present_G != 0)
    return _column((normal_GP * weights_P).sum(1) * rescale_G)


def generalised(kept: _Kept) -> list[Array]:
    """Return the generalised advantage of each token over the critic's value; see `returns.gae`.

    Raises: ValueError when the group has no values.
    Source: GAE, arXiv:1506.02438 eq. 16. Its use for tokens, with the score at a response's last token and the KL in
        the rewards: arXiv:1909.08593, section 2. Deviation: the code of that paper also divides the rewards by their
            standard deviation.
    """
    return [advantages for advantages, _ in _generalised(kept.group, kept.index, kept.gamma, kept.lam)]


def value_targets(group: ScoredGroup, *, gamma: float, lam: float) -> list[Array]:
    """Return the critic's target before each token: generalised advantage + value.

    Args:
        gamma, lam: see `returns.gae`.
    Returns: one array per sample, [T]; empty for samples that are not included.
    Raises: ValueError when the group has no values.
    """
    index = [i for i, use in enumerate(group.included) if use]
    targets = [np.zeros(0) for _ in group.scores]
    for i, (_, target) in zip(index, _generalised(group, index, gamma, lam), strict=True):
        targets[i] = target
    return targets


def _generalised(group: ScoredGroup, index: list[int], gamma: float, lam: float) -> list[tuple[Array, Array]]:
    if index and not len(group.values):
        raise ValueError("generalised advantages need the critic's value before every token")
    return [gae(group.token_rewards(i), group.values[i], gamma=gamma, lam=lam) for i in index]


def optimal_token(kept: _Kept) -> list[Array]:
    """Return each token's return minus the baseline of its position: the mean return, weighted by the path's energy.

    The mean is over the samples that reach the position. The energy of a path is the sum of its tokens' energies so
    far. Of all baselines per position, this one has the least variance. The last tokens of the longest sample have no
    other to be compared with: 0.

    Raises: ValueError when the group has no energies.
    Source: optimal token baseline, arXiv:2602.07078, with its logit-gradient proxy of the energy.
    Example: scores [1, 0], energies [0.5, 1] and [1.5] -> baseline (0.5 * 1 + 1.5 * 0) / 2 = 0.25 at the first position
        -> [0.75, 0] and [-0.25].
    """
    if not len(kept.group.energies):
        raise ValueError("the optimal token baseline needs the energy of every token")
    energies = [kept.group.energies[i] for i in kept.index]
    lengths = [max(1, len(e)) for e in energies]
    energy_GT, returns_GT = np.zeros((2, len(energies), max(lengths)))
    for g, (energy, returns) in enumerate(zip(energies, kept.returns, strict=True)):
        energy_GT[g, : len(energy)] = np.cumsum(energy)
        returns_GT[g, : lengths[g]] = returns
    total_T = energy_GT.sum(0)
    # sum_j W_j (G_i - G_j) / sum_j W_j is G_i - baseline, and exactly 0 where all G_j with a weight are equal.
    leads = [(energy_GT * (own_T - returns_GT)).sum(0) for own_T in returns_GT]
    advantages = [np.divide(lead, total_T, out=np.zeros_like(lead), where=total_T > 0) for lead in leads]
    return [a[:n] for a, n in zip(advantages, lengths, strict=True)]


BASELINES: dict[str, Callable[[_Kept], list[Array]]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean,
    "leave_one_out": leave_one_out,
    "length_weighted": length_weighted,
    "best_of_group": best_of_group,
    "part_by_part": part_by_part,
    "greedy": greedy_baseline,
    "none": no_baseline,
    "zero": nothing,
    "gae": generalised,
    "optimal_token": optimal_token,
}
"""Estimator -> function of the included samples that returns score (or return) minus baseline.

The function returns one array per sample: [1] = the same for all tokens, or [T].
"""


def is_dead(scores: Sequence[float]) -> bool:
    """Return whether a group is dead (teaches nothing): fewer than two scores, or all of them equal."""
    return len(scores) < 2 or min(scores) == max(scores)


def batch_advantages(
    groups: Sequence[ScoredGroup], estimator: str, *, scale: str | None = None, gamma: float = 1.0, lam: float = 1.0
) -> list[list[Array]]:
    """Return the advantages of all samples of a step.

    Args:
        groups: ALL groups of the step (of all ranks), because some scales are computed over the batch.
        estimator: key of `ESTIMATORS`.
        scale: one of `SCALES`; None = the default of the estimator.
        gamma: discount of the token returns; for estimators that have one return per token ("none", "greedy", "gae",
            "optimal_token").
        lam: lambda of "gae", in [0, 1]: 0 = one token's reward counts, then the critic's value; 1 = the rewards of all
            tokens to the end of the response count.
    Returns: one list per group, with one array per sample: [1] = the same for all its tokens, or [T] (with penalties,
        gamma < 1, a critic, or "optimal_token"). Advantages are exactly 0 for samples that are not included and for
        dead groups. A group is dead if its scores (minus penalties; for "part_by_part": the values of every part) are
        all equal, or if it has a single score and the estimator compares samples. With "gae" no group is dead.
    Raises: KeyError for an unknown estimator; ValueError when a score is not finite, for an unknown scale, and when
        "gae" is combined with a scale that is not in `CRITIC_SCALES`.
    """
    entry = ESTIMATORS[estimator]
    scale = scale if scale is not None else entry.scale
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}")
    if entry.critic and scale not in CRITIC_SCALES:
        raise ValueError(f"the scale {scale!r} is not for a critic; use one of: {', '.join(CRITIC_SCALES)}")
    all_kept = [_keep(g, gamma, lam) for g in groups]
    dead = [_is_dead_kept(k, estimator) for k in all_kept]
    centred: list[list[Array]] = []
    for kept, group_is_dead in zip(all_kept, dead, strict=True):
        # Dead groups remain in the statistics of the batch, as in the papers; their own advantage is set below.
        if not kept.index or (group_is_dead and entry.needs_group):
            centred.append([np.zeros(1) for _ in kept.index])
        else:
            centred.append(BASELINES[estimator](kept))
    scaled = _scaled(centred, all_kept, dead, scale)
    advantages: list[list[Array]] = []
    for group, kept, values, group_is_dead in zip(groups, all_kept, scaled, dead, strict=True):
        by_index = dict(zip(kept.index, values, strict=True))
        zero = [np.zeros(1) for _ in group.scores]
        advantages.append([zero[i] if group_is_dead else by_index.get(i, zero[i]) for i in range(len(group.scores))])
    return advantages


def _scaled(centred: list[list[Array]], all_kept: list[_Kept], dead: list[bool], scale: str) -> list[list[Array]]:
    """Return the centred advantages divided by the scale.

    "none": the number 1.
    "group": the group's unbiased standard deviation + 1e-6 (GRPO, arXiv:2402.03300 eq. 4).
    "batch": the unbiased standard deviation of all scores of the batch + 1e-6 (arXiv:2508.08221: group mean, batch
        std).
    "alive": the share of samples whose group is not dead (GPG's alpha = B / (B - M), arXiv:2504.02546).
    "samples": the unbiased standard deviation over all samples + 1e-6, after subtraction of their mean (GDPO,
        arXiv:2601.05242).
    "tokens", "tokens_keep_mean": whitened over all tokens (REINFORCE++, and PPO in arXiv:1909.08593's code; MAYE's code
        adds the mean back).
    """
    if scale == "none":
        return centred
    if scale == "group":
        return [
            [a / (k.totals_G.std(ddof=1) + STD_EPSILON) for a in values] if len(values) > 1 else values
            for values, k in zip(centred, all_kept, strict=True)
        ]
    if scale == "alive":
        samples = sum(len(k.index) for k in all_kept)
        alive = sum(len(k.index) for k, group_is_dead in zip(all_kept, dead, strict=True) if not group_is_dead)
        return [[a * samples / max(1, alive) for a in values] for values in centred]
    if scale == "batch":
        totals = np.concatenate([np.zeros(0), *(k.totals_G for k in all_kept)])
        deviation = totals.std(ddof=1) if len(totals) > 1 else 0.0
        return [[a / (deviation + STD_EPSILON) for a in values] for values in centred]
    # The scales below are computed over the whole batch: join the groups to one list of samples, then split it again.
    flat = [a for values in centred for a in values]
    if scale == "samples":
        means = np.array([a.mean() for a in flat])  # one number per sample, even if it has one per token
        deviation = means.std(ddof=1) if len(means) > 1 else 0.0
        normal = [(a - means.mean()) / (deviation + STD_EPSILON) for a in flat]
    else:
        lengths = [int(n) for k in all_kept for n in k.lengths_G]
        normal = whiten(flat, lengths, keep_mean=scale == "tokens_keep_mean")
    values = iter(normal)
    return [[next(values) for _ in group] for group in centred]


def _keep(group: ScoredGroup, gamma: float, lam: float) -> _Kept:
    index = [i for i, use in enumerate(group.included) if use]
    if len(group.included) != len(group.scores):
        raise ValueError(f"{len(group.scores)} scores but {len(group.included)} entries in `included`")
    scores = [float(group.scores[i]) for i in index]
    if not all(np.isfinite(scores)):
        raise ValueError(f"a score is not finite, so there are no advantages: {scores}")
    lengths = np.array([group.lengths[i] if group.lengths else 1 for i in index], dtype=np.float64)
    totals, returns = np.array(scores, dtype=np.float64), [np.array([s]) for s in scores]
    if len(group.penalties) or gamma != 1.0:
        for position, i in enumerate(index):
            rewards = group.token_rewards(i)
            totals[position] = rewards.sum()
            returns[position] = rewards_to_go(rewards, gamma)
    return _Kept(group, index, totals, returns, lengths, gamma, lam)


def _is_dead_kept(kept: _Kept, estimator: str) -> bool:
    if not kept.index:
        return True
    if ESTIMATORS[estimator].critic:
        return False
    if estimator == "part_by_part":
        parts_GP, _ = _parts(kept)
        columns = [parts_GP[~np.isnan(parts_GP[:, p]), p].tolist() for p in range(parts_GP.shape[1])]
        return all(is_dead(column) for column in columns)
    if len(kept.index) == 1:
        return ESTIMATORS[estimator].needs_group
    return is_dead(kept.totals_G.tolist())


def _parts(kept: _Kept) -> tuple[Array, Array]:
    """Return (parts_GP of the included samples, NaN where a part does not apply; weights_P)."""
    if not len(kept.group.parts):
        return kept.totals_G[:, None], np.ones(1)  # [G] -> [G, 1]: the score is the only part
    rows = [[np.nan if v is None else float(v) for v in kept.group.parts[i]] for i in kept.index]
    return np.array(rows, dtype=np.float64), np.array(kept.group.weights, dtype=np.float64)


def share_of(share: float, number: int) -> int:
    """Return a share of a number of tokens, rounded up, at least 1. Example: 0.07 of 100 -> 7."""
    return max(1, ceil(share * number - 1e-9))  # the product 0.07 * 100 is above 7


def visual_weights(gains: Sequence[Array], *, share: float, weight: float, temperature: float) -> list[Array]:
    """Return the weight of each token of a prompt's responses, from what the images' details gain it.

    Responses are weighed by the softmax of their mean gains, in standard deviations of the prompt's responses. Within a
    response of n tokens, the ceil(share * n) tokens of the largest gains have `weight` together, and the others the
    rest; where there is no gain at all, all are equal. The weights are factors for a mean of each response first: the
    means over the responses are 1 on average.

    Args:
        gains: [G][T], the teacher's log-prob of each token minus that without details, in nats; negative ones count 0.
        share: in (0, 1].
        weight: in [0, 1]; in a response whose tokens are all among the largest, they have the whole weight.
        temperature: of the softmax, > 0.
    Source: VA-OPD, arXiv:2605.21924 eq. 2-6.
    Example: one response, gains [2, 0, -1, 0, 0], share 0.2, weight 0.5 -> [2.5, 0.625, 0.625, 0.625, 0.625].
    """
    kept = [np.maximum(gain, 0.0) for gain in gains]
    means = np.array([gain.mean() if len(gain) else 0.0 for gain in kept])
    scaled = (means - means.mean()) / (means.std() + STD_EPSILON) / temperature
    shares = np.exp(scaled - scaled.max())
    weights: list[Array] = []
    for gain, factor in zip(kept, len(kept) * shares / shares.sum(), strict=True):
        if not gain.any():  # no token is more visual than another
            weights.append(np.full(len(gain), factor))
            continue
        count = share_of(share, len(gain))
        visual = np.argsort(-gain, kind="stable")[:count]
        others = len(gain) - count
        own = np.full(len(gain), (1.0 - weight) / others if others else 0.0)
        own[visual] = (weight if others else 1.0) / count
        weights.append(factor * len(gain) * own)
    return weights


def _column(values_G: Array) -> list[Array]:
    return [values_G[i : i + 1] for i in range(len(values_G))]
