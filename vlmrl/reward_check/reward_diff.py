"""Effect of another reward on the scores, the order within groups, the advantages, and the dead groups."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrl.algo.algorithms import ALGORITHMS, Algorithm, algorithm_of, stand_in, without_greedy
from vlmrl.algo.credit import RewardWeights, Weights, scored_group, step_advantages, untrained_values
from vlmrl.reward_check.response_columns import ResponseColumns
from vlmrl.reward_check.saved_responses import SavedResponses
from vlmrl.reward_check.scores import Flags, Floats, Scores, same_part
from vlmrl.reward_check.statistics import correlation, mean, ranks, row_of, score_json
from vlmrl.rewards.base import VALUE_PART
from vlmrl.rewards.identity import single_records
from vlmrl.rewards.several import GATE_PART


@dataclass(frozen=True)
class Estimate:
    """Advantage estimator of the run: its row of the algorithm table, and the token limit of a response.

    Args:
        stand_in: sentence about the values that replace those that only training has, such as a critic's; "" if no
            value is replaced.
    """

    algorithm: Algorithm
    max_tokens: int
    stand_in: str = ""

    @property
    def advantage(self) -> str:
        return self.algorithm.advantage


def estimate_of(saved: SavedResponses) -> Estimate:
    """Return the run's own estimator; GRPO's if the rollouts belong to no run.

    Some inputs of an estimator are not saved with the rollouts. The group mean replaces the score of a greedy answer
    (ReMax), and 0 replaces the values of a critic (PPO). A KL term in the reward is left out.
    """
    if saved.recipe is None:
        return Estimate(ALGORITHMS["grpo"], 0)
    own_algorithm = algorithm_of(saved.recipe.algo)
    return Estimate(without_greedy(own_algorithm), saved.recipe.rollout.max_new_tokens, stand_in(own_algorithm))


def advantages_of(saved: SavedResponses, facts: ResponseColumns, scores: Scores, estimate: Estimate) -> Floats:
    """Return the advantage of every sample for `scores`, computed as in training.

    Each step is a batch of its own. Samples whose reward failed are left out. Truncated responses are left out if the
    recipe drops them.
    """
    advantages = np.zeros(len(scores))
    steps: dict[int, list[list[int]]] = {}
    for group in groups_of(facts):
        steps.setdefault(int(facts.steps_N[group[0]]), []).append(group)
    needs_critic = estimate.algorithm.needs_critic
    for groups in steps.values():
        inputs = []
        for group in groups:
            lengths = facts.tokens_N[group].tolist()
            record = saved.records.get(facts.sources[group[0]] or "", {})
            finishes = ["length" if cut else "stop" for cut in facts.cut_N[group].tolist()]
            inputs.append(
                scored_group(
                    [scores[i] for i in group],
                    finishes,
                    lengths,
                    estimate.algorithm,
                    max_tokens=estimate.max_tokens,
                    weights=_weights(record),
                    values=untrained_values(lengths) if needs_critic else (),
                )
            )
        for group, values in zip(groups, step_advantages(inputs, estimate.algorithm), strict=True):
            advantages[group] = [float(value.mean()) for value in values]
    return advantages


def _weights(record: Mapping[str, Any]) -> Weights:
    """Return the weights of a recorded reward's parts; of several rewards, those of each.

    A reward of several has one part that is called like its label, if it returns a plain number or a single part.
    """
    singles = single_records(record)
    if singles == [record]:
        return record.get("weights") or {}
    rewards = []
    for single in singles:
        label, weights = str(single.get("label")), dict(single.get("weights") or {})
        parts = {f"{label}.{part}": weight for part, weight in weights.items()}
        for part, weight in weights.items():
            if len(weights) == 1 or part in VALUE_PART.values():
                parts[label] = weight
        gate = f"{label}.{GATE_PART}" if single.get("gate") else ""
        rewards.append(RewardWeights(label, float(single.get("weight", 1.0)), parts, gate))
    return rewards


def groups_of(facts: ResponseColumns) -> list[list[int]]:
    """Return the sample indices of each group. Groups are ordered by their first sample."""
    order, starts = facts.group_bounds()
    groups = [g.tolist() for g in np.split(order, starts[1:])]
    return sorted(groups, key=lambda g: g[0]) if len(order) else []


def diff_rewards(
    saved: SavedResponses, facts: ResponseColumns, first: Scores, second: Scores, most: int = 5
) -> dict[str, Any]:
    """Compare two scorings of the same responses: `first`, the old one, and `second`, the new one.

    Returns a mapping with:
        value: mean score in each scoring, mean absolute difference, number (changed) and share (changed_share) of rows
            whose score changes, correlation over all samples, rank correlation (Spearman's).
        parts: part -> its mean in each scoring (None if a scoring lacks the part), and the share of samples in which
            the part changes.
        groups: number of groups; number of dead groups in each scoring; died and revived = groups that are dead only in
            the second or only in the first scoring; same_order = mean rank correlation (Spearman's) within groups that
            are dead in neither; best_changes = number of such groups in which no sample is best in both scorings.
        advantages: correlation over samples; flipped = share of samples whose advantage changes its sign; moved = mean
            absolute difference; estimator; stand_in = see `Estimate`.
        changed: the rows whose advantage (then score) changes most; see `row_of`.
        `groups` and `advantages` are None if the input does not tell which rows belong to one prompt.
    """
    estimate = estimate_of(saved)
    both = ~(first.failed_N | second.failed_N)
    a, b = first.values_N[both], second.values_N[both]
    old = advantages_of(saved, facts, first, estimate) if saved.grouped else np.zeros(len(first))
    new = advantages_of(saved, facts, second, estimate) if saved.grouped else np.zeros(len(first))
    moved = np.abs(new - old)
    delta = np.where(both, np.abs(second.values_N - first.values_N), 0.0)
    order = np.lexsort((np.arange(len(first)), -delta, -moved))
    order = order[(both & ((moved > 0) | (delta > 0)))[order]][:most].tolist()
    return {
        "samples": len(first),
        "compared": int(both.sum()),
        "failed": {"first": int(first.failed_N.sum()), "second": int(second.failed_N.sum())},
        "value": {
            "first": mean(a),
            "second": mean(b),
            "moved": mean(np.abs(b - a)),
            "changed": int(np.sum(a != b)),
            "changed_share": mean(a != b),
            "correlation": correlation(a, b),
            "rank_correlation": correlation(ranks(a), ranks(b)),
        },
        "parts": _parts(first, second, both),
        "groups": _groups(facts, first, second, old, new) if saved.grouped else None,
        "advantages": {
            "estimator": estimate.advantage,
            "stand_in": estimate.stand_in,
            "correlation": correlation(old, new),
            "flipped_share": mean(old * new < 0),
            "moved": mean(moved),
        }
        if saved.grouped
        else None,
        "changed": [
            row_of(facts, i, second, old=score_json(first[i]), advantage=[float(old[i]), float(new[i])]) for i in order
        ],
    }


def _groups(facts: ResponseColumns, first: Scores, second: Scores, old: Floats, new: Floats) -> dict[str, Any]:
    dead_first = dead_second = died = revived = best_changes = alive = 0
    rank_correlations: list[float] = []
    failed = first.failed_N | second.failed_N
    groups = groups_of(facts)
    for group in groups:
        was, would = not np.any(old[group]), not np.any(new[group])
        dead_first, dead_second = dead_first + was, dead_second + would
        died, revived = died + (would and not was), revived + (was and not would)
        kept = np.asarray(group)[~failed[group]]
        if was or would or len(kept) < 2:
            continue
        alive += 1
        a, b = first.values_N[kept], second.values_N[kept]
        best_changes += not np.any((a == a.max()) & (b == b.max()))
        rank = correlation(ranks(a), ranks(b))
        if rank is not None:
            rank_correlations.append(rank)
    return {
        "number": len(groups),
        "dead_first": dead_first,
        "dead_second": dead_second,
        "died": died,
        "revived": revived,
        "alive_in_both": alive,
        "best_changes": best_changes,
        "same_order": math.fsum(rank_correlations) / len(rank_correlations) if rank_correlations else None,
    }


def _parts(first: Scores, second: Scores, both: Flags) -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys([*first.parts, *second.parts]):
        columns = [side.parts[name][both] if name in side.parts else None for side in (first, second)]
        a, b = (None if c is None else mean(c) for c in columns)
        same = same_part(columns[0], columns[1], int(both.sum()))
        table[name] = {"first": a, "second": b, "changed_share": mean(~same)}
    return table
