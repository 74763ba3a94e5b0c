"""Computation of a step's advantages from its scores, by a row of the algorithm table. Imports no torch.

Training, `vlmrl try` and `vlmrl reward-check` use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from vlmrl.algo.advantages import Array, ScoredGroup, batch_advantages
from vlmrl.algo.algorithm import Algorithm
from vlmrl.algo.shaping import shaped_score, spread
from vlmrl.types import Score


@dataclass(frozen=True, slots=True)
class RewardWeights:
    """Weights of one of several rewards.

    Args:
        label: beginning of the names of its parts: `label.part`, or `label` for a plain number.
        weight: weight of the reward in the score.
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
) -> ScoredGroup:
    """Return a group for the estimators: samples with failed rewards are excluded, length rules are applied.

    Args:
        scores: [G], one per sample.
        finishes: [G], "stop" or "length".
        lengths: [G], number of trained tokens of each sample.
        algorithm: its rules for cut and long responses are applied.
        max_tokens: token limit of a response.
        weights: part -> weight. None or empty: the part `reward` is the only one with a weight; if there is no such
            part, every part has the weight 1. Several rewards: the weights of each.
        greedy: score of the prompt's greedy answer. If it is None although the estimator needs it, no sample is
            included.
        penalties: [G][T], numbers subtracted from each token's reward.
        values: [G][T], the critic's value before each token.
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
        shaped,
        included,
        lengths,
        parts,
        part_weights,
        greedy,
        penalties,
        values,
        shares=shares,
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
