"""Scores of a step -> advantages, by a row of the table: for training, `vlmrl try` and `reward-check`. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vlmrl.algo.advantages import Array, ScoredGroup, batch_advantages
from vlmrl.algo.family import Algorithm
from vlmrl.algo.shaping import shaped_score, spread
from vlmrl.types import Score


def scored_group(
    scores: Sequence[Score], finishes: Sequence[str], lengths: Sequence[int], algorithm: Algorithm, *, max_tokens: int,
    weights: Mapping[str, float] | None = None, greedy: float | None = None, penalties: Sequence[Array] = (),
    values: Sequence[Array] = (),
) -> ScoredGroup:  # fmt: skip
    """What the estimators see of a group: failed rewards left out, length rules applied.

    Args:
        finishes: "stop" or "length" of each sample.     lengths: their trained tokens.
        max_tokens: the token limit of a response.
        weights: part -> weight; None or empty: `reward` counts if there is one, else every part.
        greedy: score of the prompt's greedy answer; a group without one is left out where the estimator needs it.
        penalties: what each token of each sample costs.
        values: what the critic said before each token of each sample.
    """
    # A critic compares nothing within a group: what is not trained on has no part in its advantages.
    out = ("drop", "mask") if algorithm.needs_critic else ("drop",)
    included = [
        score.error is None and not (finish == "length" and algorithm.truncated in out)
        for score, finish in zip(scores, finishes, strict=True)
    ]
    if algorithm.advantage == "greedy" and greedy is None:
        included = [False] * len(scores)
    shaped = [
        shaped_score(
            score.value, num_tokens=length, was_cut=finish == "length", max_tokens=max_tokens,
            overlong_tokens=algorithm.overlong_tokens, overlong_weight=algorithm.overlong_penalty,
            truncated_score=algorithm.truncated_score,
        )
        for score, finish, length in zip(scores, finishes, lengths, strict=True)
    ]  # fmt: skip
    names = _part_names(scores, weights or {})
    return ScoredGroup(
        shaped, included, lengths, [[score.parts.get(name) for name in names] for score in scores] if names else (),
        list(names.values()), greedy, penalties, values,
    )  # fmt: skip


def passes_filter(group: ScoredGroup, algorithm: Algorithm) -> bool:
    """Whether the spread of a group's scores is above the row's `min_spread`. True without a filter."""
    if algorithm.filter == "none":
        return True
    return spread([s for s, use in zip(group.scores, group.included, strict=True) if use]) > algorithm.min_spread


def step_advantages(groups: Sequence[ScoredGroup], algorithm: Algorithm) -> list[list[Array]]:
    """Advantages of all groups of a step; see `batch_advantages`. Groups that the filter refuses get 0, and count in
    no statistic of the batch.
    """
    passed = [passes_filter(g, algorithm) for g in groups]
    found = iter(
        batch_advantages(
            [g for g, ok in zip(groups, passed, strict=True) if ok],
            algorithm.advantage, scale=algorithm.scale, gamma=algorithm.gamma,
            lam=algorithm.gae_lambda,
        )
    )  # fmt: skip
    return [next(found) if ok else [np.zeros(1) for _ in g.scores] for g, ok in zip(groups, passed, strict=True)]


def untrained_values(lengths: Sequence[int]) -> list[Array]:
    """The values of a critic that has learned nothing: 0 before each token of each sample."""
    return [np.zeros(n) for n in lengths]


def _part_names(scores: Sequence[Score], weights: Mapping[str, float]) -> dict[str, float]:
    """Part -> weight, for the parts that any score of the group has; as rewards/base.py combines them."""
    known = dict.fromkeys(name for score in scores for name in score.parts)
    given = {name: weight for name, weight in weights.items() if name in known}
    if given:
        return given
    return {"reward": 1.0} if "reward" in known else dict.fromkeys(known, 1.0)
