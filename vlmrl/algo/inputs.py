"""Computation of a step's advantages from its scores, by a row of the algorithm table. Imports no torch.

Training, `vlmrl try` and `vlmrl reward-check` use this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vlmrl.algo.advantages import Array, ScoredGroup, batch_advantages
from vlmrl.algo.algorithm import Algorithm
from vlmrl.algo.shaping import shaped_score, spread
from vlmrl.types import Score


def scored_group(
    scores: Sequence[Score],
    finishes: Sequence[str],
    lengths: Sequence[int],
    algorithm: Algorithm,
    *,
    max_tokens: int,
    weights: Mapping[str, float] | None = None,
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
            part, every part has the weight 1.
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
    names = _part_names(scores, weights or {})
    return ScoredGroup(
        shaped,
        included,
        lengths,
        [[score.parts.get(name) for name in names] for score in scores] if names else (),
        list(names.values()),
        greedy,
        penalties,
        values,
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
