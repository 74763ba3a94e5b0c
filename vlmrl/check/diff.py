"""What another reward would have changed: values, the order within groups, advantages, and which groups are dead."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrl.algo.family import ALGORITHMS, Algorithm, algorithm_of, stand_in, without_greedy
from vlmrl.algo.inputs import scored_group, step_advantages, untrained_values
from vlmrl.check.rescore import correlation, describe_row
from vlmrl.check.saved import Saved
from vlmrl.types import Score


@dataclass(frozen=True)
class Estimate:
    """How the run turned scores into advantages: its row of the table, and the token limit of a response.

    `stand_in`: what is taken in place of what only training has, in words; "" = nothing.
    """

    algorithm: Algorithm
    max_tokens: int
    stand_in: str = ""

    @property
    def advantage(self) -> str:
        return self.algorithm.advantage


def estimate_of(saved: Saved) -> Estimate:
    """The run's own estimator; GRPO's when the rollouts belong to no run.

    Greedy answers (ReMax) are not saved: the group mean stands in for them; nor is what a critic said (PPO): 0 stands
    in. A KL in the reward is left out.
    """
    if saved.recipe is None:
        return Estimate(ALGORITHMS["grpo"], 0)
    asked = algorithm_of(saved.recipe.algo)
    return Estimate(without_greedy(asked), saved.recipe.rollout.max_new_tokens, stand_in(asked))


def advantages_of(saved: Saved, scores: Sequence[Score], estimate: Estimate) -> list[float]:
    """The advantage of every sample under these scores, by the rules of training, each step a batch of its own: failed
    rewards are left out, and truncated responses where the recipe drops them.
    """
    advantages = [0.0] * len(scores)
    steps: dict[int, list[list[int]]] = {}
    for group in saved.groups:
        steps.setdefault(saved.samples[group[0]].step, []).append(group)
    for groups in steps.values():
        inputs = [
            scored_group(
                [scores[i] for i in group], [saved.samples[i].input.finish for i in group], lengths, estimate.algorithm,
                max_tokens=estimate.max_tokens,
                weights=saved.records.get(saved.samples[group[0]].source, {}).get("weights") or {},
                values=untrained_values(lengths) if estimate.algorithm.needs_critic else (),
            )
            for group in groups
            for lengths in [[saved.samples[i].input.num_tokens for i in group]]
        ]  # fmt: skip
        for group, values in zip(groups, step_advantages(inputs, estimate.algorithm), strict=True):
            for index, value in zip(group, values, strict=True):
                advantages[index] = float(value.mean())
    return advantages


def diff_rewards(saved: Saved, first: Sequence[Score], second: Sequence[Score], most: int = 5) -> dict[str, Any]:
    """Compare two scorings of the same rollouts; `first` is what was, `second` what would have been.

    Returns a mapping with:
        value: mean of both, mean absolute difference, share of samples that change, correlation over all samples.
        parts: part -> mean in both (None where it does not exist), share of samples in which it changes.
        groups: number; dead in both scorings; died and revived; same_order = mean rank correlation (Spearman's) within
            groups alive in both; best_changes = groups alive in both whose best samples have none in common.
        advantages: correlation over samples; flipped = share of samples whose sign turns; moved = mean absolute
            difference; estimator; stand_in = what it takes in place of what only training has ("" = nothing).
        changed: the rows that change most in advantage (then in value), with their text.
    """
    estimate = estimate_of(saved)
    old = np.asarray(advantages_of(saved, first, estimate))
    new = np.asarray(advantages_of(saved, second, estimate))
    both = [i for i, (a, b) in enumerate(zip(first, second, strict=True)) if a.error is None and b.error is None]
    a, b = (np.asarray([s[i].value for i in both], dtype=np.float64) for s in (first, second))
    move = [(abs(new[i] - old[i]), abs(second[i].value - first[i].value), -i) for i in both]
    order = [-place for gap, delta, place in sorted(move, reverse=True)[:most] if gap > 0 or delta > 0]
    return {
        "samples": len(first),
        "compared": len(both),
        "failed": {"first": _failed(first), "second": _failed(second)},
        "value": {
            "first": _mean(a),
            "second": _mean(b),
            "moved": _mean(np.abs(b - a)),
            "changed_share": _mean(a != b),
            "correlation": correlation(a, b),
        },
        "parts": _parts(first, second, both),
        "groups": _groups(saved, first, second, old, new),
        "advantages": {
            "estimator": estimate.advantage,
            "stand_in": estimate.stand_in,
            "correlation": correlation(old, new),
            "flipped_share": _mean(old * new < 0),
            "moved": _mean(np.abs(new - old)),
        },
        "changed": [
            describe_row(
                saved.samples[i], new=second[i], first=first[i].value, advantage=[float(old[i]), float(new[i])]
            )
            for i in order
        ],
    }


def _groups(saved: Saved, first: Sequence[Score], second: Sequence[Score], old: Any, new: Any) -> dict[str, Any]:
    dead_first = dead_second = died = revived = best_changes = alive = 0
    ranks: list[float] = []
    for group in saved.groups:
        was, would = not np.any(old[group]), not np.any(new[group])
        dead_first, dead_second = dead_first + was, dead_second + would
        died, revived = died + (would and not was), revived + (was and not would)
        kept = [i for i in group if first[i].error is None and second[i].error is None]
        if was or would or len(kept) < 2:
            continue
        alive += 1
        a = np.asarray([first[i].value for i in kept])
        b = np.asarray([second[i].value for i in kept])
        best_changes += not np.any((a == a.max()) & (b == b.max()))
        rank = correlation(_ranks(a), _ranks(b))
        if rank is not None:
            ranks.append(rank)
    return {
        "number": len(saved.groups),
        "dead_first": dead_first,
        "dead_second": dead_second,
        "died": died,
        "revived": revived,
        "alive_in_both": alive,
        "best_changes": best_changes,
        "same_order": math.fsum(ranks) / len(ranks) if ranks else None,
    }


def _parts(first: Sequence[Score], second: Sequence[Score], both: Sequence[int]) -> dict[str, dict[str, Any]]:
    names = dict.fromkeys(name for scores in (first, second) for i in both for name in scores[i].parts)
    table: dict[str, dict[str, Any]] = {}
    for name in names:
        means = [[p for i in both if (p := s[i].parts.get(name)) is not None] for s in (first, second)]
        changed = [first[i].parts.get(name) != second[i].parts.get(name) for i in both]
        a, b = (math.fsum(m) / len(m) if m else None for m in means)
        table[name] = {"first": a, "second": b, "changed_share": _mean(np.asarray(changed))}
    return table


def _ranks(values: Any) -> Any:
    """Ranks from 0, ties at their mean."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[inverse]


def _mean(values: Any) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _failed(scores: Sequence[Score]) -> int:
    return sum(s.error is not None for s in scores)
