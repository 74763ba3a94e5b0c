"""Credit of a step: from its scores to its advantages, by a row of the algorithm table. Imports no torch.

Before the advantages, scores are shaped by length and truncation, and groups without spread can be found (DAPO's
filter). After the step, the KL coefficient is controlled. Training, `vlmrl try` and `vlmrl reward-check` use this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum
from typing import Any

import numpy as np

from vlmrl.algo.advantages import Array, ScoredGroup, batch_advantages, value_targets
from vlmrl.algo.algo_keys import Algorithm
from vlmrl.types import Group, Score, ScoredSample

MAX_KL_ERROR = 0.2
"""Maximum relative error of the KL that its controller uses; larger errors are limited to it."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return the penalty for a long response: 0 up to `max_tokens - buffer` tokens, then linear down to -penalty.

    Args:
        buffer: number of tokens before the limit in which the penalty grows; 0 or less = no penalty.
        penalty: size of the penalty at the limit, >= 0.
    Returns: a number in [-penalty, 0], to be added to the score.
    Source: DAPO, arXiv:2503.14476 eq. 13 (soft overlong punishment).
    Example: limit 100, buffer 20, penalty 1: 80 tokens -> 0, 90 -> -0.5, 100 and more -> -1.
    """
    if buffer <= 0:
        return 0.0
    over = num_tokens - (max_tokens - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0) if over > 0 else 0.0


def shaped_score(
    score: float,
    *,
    num_tokens: int,
    was_cut: bool,
    max_tokens: int,
    overlong_tokens: int = 0,
    overlong_weight: float = 1.0,
    truncated_score: float | None = None,
) -> float:
    """Return the score for the advantages: the reward's score, changed by the recipe's length rules.

    Args:
        was_cut: whether the token limit ended the response.
        overlong_tokens: length of DAPO's buffer before the limit, in tokens; 0 = off.
        overlong_weight: maximum that a long response loses.
        truncated_score: score of a cut response instead of the reward's, like MAYE's penalty for a missing end token;
            None = off.
    """
    if was_cut and truncated_score is not None:
        return truncated_score
    return score + overlong_penalty(num_tokens, max_tokens=max_tokens, buffer=overlong_tokens, penalty=overlong_weight)


def spread(scores: Sequence[float]) -> float:
    """Return the largest minus the smallest finite score; 0 for fewer than two finite scores.

    DAPO's filter uses the spread, not the mean: with scores between 0 and 1, a dead group can have any mean.

    Source: DAPO, arXiv:2503.14476 eq. 11. For scores of 0 and 1, its condition 0 < number correct < G means spread > 0.
    """
    finite = [s for s in scores if np.isfinite(s)]
    return max(finite) - min(finite) if len(finite) > 1 else 0.0


def next_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """Return the KL coefficient for the next step: larger when the KL is above its target, smaller when below.

    It is coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Args:
        kl: mean KL per token of this step, in nats.
        target: the KL to steer to, in nats per token, > 0.
        horizon: number of responses; the larger, the slower the coefficient changes.
        samples: responses of this step.
    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    Example: coef 0.1, kl 0.2, target 0.1, horizon 1000, 100 samples -> 0.1 * (1 + 0.2 * 0.1) = 0.102.
    """
    error = min(max(kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1.0 + error * samples / horizon)


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weights of one of several rewards.

    Args:
        label: beginning of the names of its parts: `label.part`, or `label` for a plain number.
        parts: part -> its weight within the reward's own score. Empty: the part `label` is the only one with a weight;
            if there is no such part, every part has the weight 1.
        gate: the part that is 0 where the reward's gate was closed; "" = it has no gate.
    """

    label: str
    weight: float
    parts: Mapping[str, float]
    gate: str = ""

    def among(self, names: Sequence[str]) -> dict[str, float]:
        """Return part -> weight of its parts among these names."""
        own = [n for n in names if n != self.gate and (n == self.label or n.startswith(f"{self.label}."))]
        given = {name: self.parts[name] for name in own if name in self.parts}
        return given or ({self.label: 1.0} if self.label in own else dict.fromkeys(own, 1.0))


Weights = Mapping[str, float] | Sequence[RewardWeights]
"""Part -> weight of a single reward; or the weights of several rewards."""


def scored_group(
    scores: Sequence[Score],
    finishes: Sequence[str],
    lengths: Sequence[int],
    algorithm: Algorithm,
    *,
    max_tokens: int,
    weights: Weights | None = None,
    greedy: float | None = None,
    penalties: Sequence[Array] = (),
    values: Sequence[Array] = (),
    energies: Sequence[Array] = (),
) -> ScoredGroup:
    """Return a group for the estimators: samples with failed rewards are excluded, length rules are applied.

    Args:
        scores: [G], one per sample.
        finishes: [G], "stop" or "length".
        lengths: [G], number of trained tokens of each sample.
        algorithm: its rules for cut and long responses are applied.
        weights: part -> weight. None or empty: the part `reward` is the only one with a weight; if there is no such
            part, every part has the weight 1. Several rewards: the weights of each.
        greedy: score of the prompt's greedy answer. If it is None although the estimator needs it, no sample is
            included.
        penalties: [G][T], numbers subtracted from each token's reward.
        values: [G][T], the critic's value before each token.
        energies: [G][T], the energy of each token; see `ScoredGroup`.
    """
    # A critic compares no samples, so a masked response must not count in the advantages of others. Estimators that
    # compare samples keep the score of a masked response in the baseline; only "drop" removes it from there.
    excluded = ("drop", "mask") if algorithm.needs_critic else ("drop",)
    included = [
        score.error is None and not (finish == "length" and algorithm.truncated in excluded)
        for score, finish in zip(scores, finishes, strict=True)
    ]
    if algorithm.advantage == "greedy" and greedy is None:
        included = [False] * len(scores)
    shaped = [
        shaped_score(
            score.value,
            num_tokens=length,
            was_cut=finish == "length",
            max_tokens=max_tokens,
            overlong_tokens=algorithm.overlong_tokens,
            overlong_weight=algorithm.overlong_penalty,
            truncated_score=algorithm.truncated_score,
        )
        for score, finish, length in zip(scores, finishes, lengths, strict=True)
    ]
    parts: Sequence[Sequence[float | None]]
    part_weights: Sequence[float]
    shares: Sequence[Sequence[float]] = ()
    if weights is None or isinstance(weights, Mapping):
        names = _part_names(scores, weights or {})
        parts = [[score.parts.get(name) for name in names] for score in scores] if names else ()
        part_weights = list(names.values())
    else:
        parts, shares = _of_several(scores, weights)
        part_weights = ()
    return ScoredGroup(
        shaped, included, lengths, parts, part_weights, greedy, penalties, values, shares=shares, energies=energies
    )


def passes_filter(group: ScoredGroup, algorithm: Algorithm) -> bool:
    """Return whether the group passes the filter: its spread of scores exceeds `min_spread`. True without a filter."""
    if algorithm.filter == "none":
        return True
    return spread([s for s, use in zip(group.scores, group.included, strict=True) if use]) > algorithm.min_spread


def step_advantages(groups: Sequence[ScoredGroup], algorithm: Algorithm) -> list[list[Array]]:
    """Return the advantages of all groups of a step; see `batch_advantages`.

    Groups that do not pass the filter get 0 and are not included in any statistic of the batch.
    """
    passed = [passes_filter(g, algorithm) for g in groups]
    advantages = iter(
        batch_advantages(
            [g for g, ok in zip(groups, passed, strict=True) if ok],
            algorithm.advantage,
            scale=algorithm.scale,
            gamma=algorithm.gamma,
            lam=algorithm.gae_lambda,
        )
    )
    return [next(advantages) if ok else [np.zeros(1) for _ in g.scores] for g, ok in zip(groups, passed, strict=True)]


def add_advantages(
    groups: Sequence[Group],
    algorithm: Algorithm,
    *,
    max_tokens: int,
    weights: Mapping[str, Weights] | None = None,
    greedy: Sequence[float | None] | None = None,
    penalties: Sequence[Sequence[Any]] | None = None,
    values: Sequence[Sequence[Any]] | None = None,
    energies: Sequence[Sequence[Any]] | None = None,
) -> list[Group]:
    """Return the groups of a step with their advantages and a critic's targets; mask what is not trained on.

    Args:
        groups: all groups of the step. With `algorithm.filter`, those of too little spread keep advantage 0 and are
            left out of all statistics.
        algorithm: its `truncated`: "keep" = a cut response is treated like any other; "mask" = it counts for the
            baseline but is not trained on; "drop" = neither. With a critic there is no baseline, and the two are the
            same.
        max_tokens: the token limit of a response, for the length penalty.
        weights: source -> weights of the parts of its reward; for the estimator that normalises part by part.
        greedy: score of each group's greedy answer (None = its reward failed: the group gets 0).
        penalties: per sample of each group the penalty of its tokens, float64 [tokens] (the KL in the reward).
        values: per sample of each group the critic's values before its tokens, float64 [tokens]. Where the algorithm
            has a critic, they are required for the samples that are trained on.
        energies: per sample of each group the energy of its tokens, float64 [tokens]; required by "optimal_token".
    """
    inputs = [
        _scored(
            g,
            algorithm,
            max_tokens,
            weights=(weights or {}).get(g.row.source, {}),
            greedy=greedy[i] if greedy else None,
            penalties=penalties[i] if penalties else (),
            values=values[i] if values else (),
            energies=energies[i] if energies else (),
        )
        for i, g in enumerate(groups)
    ]
    advantages = step_advantages(inputs, algorithm)
    with_advantages = [
        replace(g, samples=tuple(_with_advantages(g.samples, x, group_advantages, algorithm.truncated)))
        for g, x, group_advantages in zip(groups, inputs, advantages, strict=True)
    ]
    return (
        [_with_targets(g, x, algorithm) for g, x in zip(with_advantages, inputs, strict=True)]
        if values
        else with_advantages
    )


SOLVED = 1.0 - 1e-9
"""Least accuracy of a sample that solves its prompt; without an accuracy, the least score."""


def solved(groups: Sequence[Group], accuracies: Sequence[Sequence[float | None]]) -> list[list[bool]]:
    """Return whether each sample of each group solves its prompt."""
    return [
        [(s.score.value if a is None else a) >= SOLVED for s, a in zip(group.samples, values, strict=True)]
        for group, values in zip(groups, accuracies, strict=True)
    ]


def add_credit(
    groups: Sequence[Group], algorithm: Algorithm, is_solved: Sequence[Sequence[bool]], **options: Any
) -> list[Group]:
    """Return the groups with the advantages of their samples and of their demonstrations.

    A demonstration whose loss needs no advantage keeps 0. It is trained on even if its reward failed.

    Args:
        is_solved: of each sample of each group; [] without demonstrations.
        options: of `add_advantages`.
    """
    if not any(g.demonstrations for g in groups):
        credited = add_advantages(groups, algorithm, **options)
    elif algorithm.demonstrations != "mixed":
        kept = [replace(g, demonstrations=tuple(replace(s, masked=False) for s in g.demonstrations)) for g in groups]
        credited = add_advantages(kept, algorithm, **options)
        if algorithm.demonstrations == "failed":  # it stands in the place of the samples, which count nowhere
            credited = [_without_samples(g) if g.demonstrations else g for g in credited]
    else:
        credited = []
        joined = [replace(g, samples=g.everything, demonstrations=()) for g in groups]
        for group, whole in zip(groups, add_advantages(joined, algorithm, **options), strict=True):
            samples, others = whole.samples[: len(group.samples)], whole.samples[len(group.samples) :]
            # In a group of equal scores it teaches nothing, like the samples, unless its tokens are learned anyway.
            masks = [not algorithm.weighs_by_entropy and (s.masked or whole.is_dead) for s in others]
            others = tuple(replace(s, masked=m) for s, m in zip(others, masks, strict=True))
            credited.append(replace(whole, samples=samples, demonstrations=others))
    if algorithm.weighs_by_entropy:
        credited = [_signed(g, [1.0 if x else -1.0 for x in own]) for g, own in zip(credited, is_solved, strict=True)]
    return credited


def add_gains(groups: Sequence[Group], gains: Sequence[Sequence[Array]]) -> list[Group]:
    """Return the groups with a number added to the advantage of each trained token of their samples.

    Masked samples stay as they are.

    Args:
        gains: group -> sample -> [trained tokens].
    """

    def gained(sample: ScoredSample, gain: Array) -> ScoredSample:
        if sample.masked:
            return sample
        own = sample.advantage if sample.token_advantages is None else np.asarray(sample.token_advantages)
        return replace(sample, token_advantages=tuple((own + gain).tolist()))

    return [
        replace(g, samples=tuple(gained(s, x) for s, x in zip(g.samples, of_group, strict=True)))
        for g, of_group in zip(groups, gains, strict=True)
    ]


def _without_samples(group: Group) -> Group:
    """Return a group whose samples are not trained on."""
    samples = (replace(s, advantage=0.0, token_advantages=None, masked=True) for s in group.samples)
    return replace(group, samples=tuple(samples))


def _signed(group: Group, advantages: Sequence[float]) -> Group:
    """Return a group whose samples have these advantages, unless they are masked."""
    pairs = zip(group.samples, advantages, strict=True)
    samples = (s if s.masked else replace(s, advantage=a, token_advantages=None) for s, a in pairs)
    return replace(group, samples=tuple(samples))


def mark_masked(groups: Sequence[Group], algorithm: Algorithm) -> list[Group]:
    """Mask the samples that will not be trained on, before advantages exist.

    These are samples with a failed reward, and cut responses unless `algorithm.truncated` keeps them.
    """

    def is_masked(s: ScoredSample) -> bool:
        return s.score.error is not None or (s.trajectory.finish == "length" and algorithm.truncated != "keep")

    return [replace(g, samples=tuple(replace(s, masked=is_masked(s)) for s in g.samples)) for g in groups]


def has_spread(group: Group, algorithm: Algorithm, max_tokens: int) -> bool:
    """Return whether DAPO's filter keeps a group: its scores, with length rules, differ by more than `min_spread`."""
    return passes_filter(_scored(group, algorithm, max_tokens), algorithm)


def _scored(group: Group, algorithm: Algorithm, max_tokens: int, **more: Any) -> ScoredGroup:
    """Return the numbers of a group. `more`: further arguments of `scored_group`."""
    scores = [s.score for s in group.samples]
    finishes = [s.trajectory.finish for s in group.samples]
    lengths = [s.trajectory.num_trained_tokens for s in group.samples]
    return scored_group(scores, finishes, lengths, algorithm, max_tokens=max_tokens, **more)


def _with_advantages(
    samples: Sequence[ScoredSample], group: ScoredGroup, advantages: Sequence[Any], truncated: str
) -> list[ScoredSample]:
    cut = [s.trajectory.finish == "length" for s in samples]
    masked = [not use or (c and truncated != "keep") for use, c in zip(group.included, cut, strict=True)]
    return [
        replace(s, advantage=float(a.mean()), token_advantages=tuple(a.tolist()) if len(a) > 1 else None, masked=m)
        for s, a, m in zip(samples, advantages, masked, strict=True)
    ]


def _with_targets(group: Group, scored: ScoredGroup, algorithm: Algorithm) -> Group:
    targets = value_targets(scored, gamma=algorithm.gamma, lam=algorithm.gae_lambda)
    pairs = zip(group.samples, targets, strict=True)
    return replace(
        group, samples=tuple(s if s.masked else replace(s, value_targets=tuple(t.tolist())) for s, t in pairs)
    )


def untrained_values(lengths: Sequence[int]) -> list[Array]:
    """Return the values of an untrained critic: 0 before each token of each sample, [T] per sample."""
    return [np.zeros(n) for n in lengths]


def _part_names(scores: Sequence[Score], weights: Mapping[str, float]) -> dict[str, float]:
    """Return part -> weight of all parts that occur in the group's scores, with the weights of rewards/base.py."""
    known = dict.fromkeys(name for score in scores for name in score.parts)
    given = {name: weight for name, weight in weights.items() if name in known}
    if given:
        return given
    return {"reward": 1.0} if "reward" in known else dict.fromkeys(known, 1.0)


def _of_several(
    scores: Sequence[Score], rewards: Sequence[RewardWeights]
) -> tuple[list[list[float | None]], list[list[float]]]:
    """Return the parts of all rewards, [G][P], and their weights in each sample, [G][P].

    If a part is None for a sample, its weight is distributed to the other parts of its reward. A reward without a part
    for a sample has the weight 0 there. If its gate was closed, its parts count as 0.
    """
    known = list(dict.fromkeys(name for score in scores for name in score.parts))
    parts: list[list[float | None]] = [[] for _ in scores]
    shares: list[list[float]] = [[] for _ in scores]
    for reward in rewards:
        weights = reward.among(known)
        for g, score in enumerate(scores):
            is_closed = bool(reward.gate) and score.parts.get(reward.gate) == 0
            values = [0.0 if is_closed else score.parts.get(name) for name in weights]
            present = fsum(w for w, value in zip(weights.values(), values, strict=True) if value is not None)
            scale = reward.weight * fsum(weights.values()) / present if present else 0.0
            parts[g] += values
            shares[g] += [0.0 if v is None else scale * w for w, v in zip(weights.values(), values, strict=True)]
    return (parts, shares) if any(parts) else ([], [])
