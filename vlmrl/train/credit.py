"""Second part of a step of reinforcement learning: scores -> advantages -> the batch that an update trains on.

Some algorithms need the models first: one forward pass over the step's trajectories gives the critic's values, and the
KL to the reference where that is part of the reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from vlmrl.algo.advantages import Array, explained_variance
from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.losses import ESTIMATORS as KL_ESTIMATORS
from vlmrl.dist.world import World
from vlmrl.rollout.sample import Weights, add_advantages, mark_masked
from vlmrl.train.collect import Collected
from vlmrl.train.forward_passes import fill_logps, fill_reference, fill_stats
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import StepBatch, split_updates, step_batch
from vlmrl.train.step_metrics import Clock
from vlmrl.train.tally import on_cpu
from vlmrl.types import Group


@dataclass
class Before:
    """Token statistics of the step's trajectories before its first update, by trajectory; {} = not computed.

    Args:
        logp: log-probs of the policy in nats, float32 [trained tokens].
        value: values of the critic, float32 [trained tokens].
        kl: the policy's KL to the reference in nats, by the algorithm's estimator, [trained tokens].
    """

    logp: dict[int, torch.Tensor] = field(default_factory=dict)
    value: dict[int, torch.Tensor] = field(default_factory=dict)
    kl: dict[int, torch.Tensor] = field(default_factory=dict)

    def joined(self, world: World) -> Before:
        """Merge the statistics of all ranks. With several ranks the result is on the CPU."""
        if world.size == 1:
            return self
        parts = world.gather([on_cpu(of_each) for of_each in (self.logp, self.value, self.kl)])
        return Before(*({i: part[k][i] for part in parts for i in part[k]} for k in range(3)))


def assign_credit(
    learner: Learner,
    collected: Collected,
    algorithm: Algorithm,
    kl_coef: float,
    clock: Clock,
    weights: Weights,
) -> Before:
    """Give every sample of the step its advantage, and its value targets where there is a critic.

    Args:
        learner: the policy, with its critic and reference.
        collected: the scored groups; their advantages and metrics are added in place.
        algorithm: the row of the algorithm table.
        kl_coef: weight of the KL in the reward; 0 = it is in the loss, or off.
        clock: the clock of the step.
        weights: source -> weights of the parts of its reward.
    Returns: the token statistics from before the first update.
    """
    before, penalties, values = Before(), None, None
    if kl_coef > 0 or algorithm.needs_critic:
        with clock("update"):
            before = _run_models(learner, collected, algorithm, with_kl=kl_coef > 0)
        if kl_coef > 0:
            # Each token's KL, times the coefficient, is subtracted from its reward.
            penalties = by_sample(collected.groups, before.kl, kl_coef)
            collected.metrics |= {"policy/kl_in_reward": float(_concatenated(before.kl).mean())} if before.kl else {}
        if algorithm.needs_critic:
            values = by_sample(collected.groups, before.value)
    collected.groups = add_advantages(
        collected.groups,
        algorithm,
        max_tokens=learner.recipe.rollout.max_new_tokens,
        weights=weights,
        greedy=collected.greedy,
        penalties=penalties,
        values=values,
    )
    if algorithm.needs_critic:
        collected.metrics |= critic_metrics(collected.groups, before.value)
    return before


def batch_of(
    learner: Learner,
    collected: Collected,
    groups: Sequence[Group],
    *,
    keep_dead: bool,
    count_dead: bool = False,
    updates: int = 1,
) -> StepBatch:
    """Return the batch that this rank trains on.

    Args:
        groups: all groups of the step, in their order.
        keep_dead, count_dead, updates: as in `step_batch`.
    """
    return step_batch(
        groups,
        collected.prompt_of,
        tail_of=collected.encode_tail,
        keep_dead=keep_dead,
        count_dead=count_dead,
        updates=updates,
        owners=collected.owners,
        world=learner.world,
        filler=learner.filler,
    )


def _run_models(learner: Learner, collected: Collected, algorithm: Algorithm, *, with_kl: bool) -> Before:
    """Run the policy once over the step's trajectories for all statistics, and with `with_kl` the reference, too.

    With a critic, the packed rows are those of the later updates (except for groups that a filter refused): the first
    of several updates then has ratios of exactly 1, in bfloat16 too.
    """
    critic = algorithm.needs_critic
    groups = mark_masked(collected.groups, algorithm) if critic else collected.groups
    updates = learner.recipe.train.updates_per_step if critic else 1

    def passes(tokens_per_row: int) -> Before:
        batches = split_updates(batch_of(learner, collected, groups, keep_dead=True, updates=updates))
        return _statistics(learner, batches, algorithm, with_kl, tokens_per_row)

    return learner.in_rows(passes)


def _statistics(
    learner: Learner, batches: Sequence[StepBatch], algorithm: Algorithm, with_kl: bool, tokens_per_row: int
) -> Before:
    """Return the token statistics of all trajectories in the batches, merged over all ranks."""
    policy, reference, before = learner.policy, learner.reference, Before()
    into = {"logp": before.logp} | ({"value": before.value} if algorithm.needs_critic else {})
    for batch in batches:
        if not with_kl:
            fill_stats(policy, batch, into, tokens_per_row)
            continue
        assert reference is not None
        if algorithm.kl == "full":
            fill_reference(reference, batch, tokens_per_row)
            fill_stats(policy, batch, into | {"kl": before.kl}, tokens_per_row)
            batch.ref_hidden.clear()  # large: [tokens, D] per trajectory
        else:
            fill_stats(policy, batch, into, tokens_per_row)
            fill_logps(reference, batch, batch.ref_logp, tokens_per_row)
            estimate = KL_ESTIMATORS[algorithm.kl]
            before.kl |= {i: estimate(before.logp[i], ref_logp) for i, ref_logp in batch.ref_logp.items()}
    return before.joined(learner.world)


def by_sample(groups: Sequence[Group], values: Mapping[int, torch.Tensor], factor: float = 1.0) -> list[list[Array]]:
    """Return `factor` times the values of each sample of each group.

    Args:
        groups: the groups of the step.
        values: index of a trajectory in the step -> its values, [trained tokens].
        factor: the factor of all values.
    Returns: group -> sample -> float64 [trained tokens]; zeros for a sample without values.
    """
    # Index of each group's first trajectory in the step: trajectories are numbered through all groups.
    starts = np.cumsum([0] + [len(g.samples) for g in groups])[:-1]
    values = on_cpu(values)
    return [
        [
            factor * values[first + k].double().numpy()
            if first + k in values
            else np.zeros(sample.trajectory.num_trained_tokens)
            for k, sample in enumerate(group.samples)
        ]
        for first, group in zip(starts.tolist(), groups, strict=True)
    ]


def critic_metrics(groups: Sequence[Group], values: Mapping[int, torch.Tensor]) -> dict[str, float]:
    """Return `value/mean` and `value/explained_variance` over all trained tokens.

    `value/explained_variance` is the share of the targets' variance that the values explain. It is left out when all
    targets are equal.
    """
    samples = [s for g in groups for s in g.samples]
    targets = {i: torch.tensor(s.value_targets) for i, s in enumerate(samples) if s.value_targets is not None}
    if not targets:
        return {}
    estimates = _concatenated({i: values[i] for i in targets})
    explained = explained_variance(estimates, _concatenated(targets))
    metrics = {"value/mean": float(estimates.mean())}
    return metrics if explained is None else metrics | {"value/explained_variance": explained}


def _concatenated(values: Mapping[int, torch.Tensor]) -> Array:
    return torch.cat(list(values.values())).double().cpu().numpy()
