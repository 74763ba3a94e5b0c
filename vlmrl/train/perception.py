"""The pass behind masked images before the updates of a step, and how much its tokens depend on the images.

The dependency of a token is the estimate k3 of KL(policy || policy behind masked images), at most 10 nats. The masks
are random black patches, drawn anew each time a row is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

import torch
from torch import Tensor

from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.losses import low_var_kl, most_dependent, response_weights
from vlmrl.data.blinded_images import ImageChange
from vlmrl.errors import DataError
from vlmrl.model.packing import PromptTokens
from vlmrl.train.collect import Collected, batch_of
from vlmrl.train.journal import Clock
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import Before, StepBatch, on_cpu, split_updates
from vlmrl.train.update import PolicyGradient, fill_logps
from vlmrl.types import Group


def masked_prompts(collected: Collected, algorithm: Algorithm) -> Callable[[int], PromptTokens]:
    """Return a function that returns the prompt of a group with masked images.

    It raises a DataError for a row without images.
    """
    change = ImageChange("masked", algorithm.mask_patch, algorithm.mask_share)

    def prompt(index: int) -> PromptTokens:
        row = collected.groups[index].row
        if not row.media:
            hint = 'leave it out, or set algo.perception = "none"'
            raise DataError(f"it has no image for `{algorithm.name}` to mask", where=row.place, hint=hint)
        return collected.prompt_behind(index, change)

    return prompt


def measure_dependency(
    learner: Learner, collected: Collected, objective: PolicyGradient, before: Before, clock: Clock
) -> Before:
    """Measure the dependency of all responses that the step trains on, and store it in their samples.

    All ranks call it together. The packed rows are those of the updates, so that a pass behind images that are not
    masked at all has exactly the policy's log-probs.

    Returns: `before` with the log-probs of this rank's trajectories behind their images and behind masked ones.
    """
    algorithm, policy = objective.algorithm, learner.policy
    prompts, updates = masked_prompts(collected, algorithm), learner.recipe.train.updates_per_step
    logp: dict[int, Tensor] = {}
    masked: dict[int, Tensor] = {}
    with clock("update"):
        batch = batch_of(learner, collected, collected.groups, keep_dead=objective.keeps_dead, updates=updates)
        for part in split_updates(batch):
            learner.in_rows(partial(fill_logps, policy, part, logp))
            learner.in_rows(partial(fill_logps, policy, part.behind(prompts), masked))
        own = on_cpu({i: low_var_kl(logp[i], masked[i]) for i in logp})
        by_trajectory = {
            i: values
            for of_rank in learner.world.gather({i: tuple(x.tolist()) for i, x in own.items()})
            for i, values in of_rank.items()
        }
    collected.groups = with_dependency(collected.groups, by_trajectory)
    values = [x for of_one in by_trajectory.values() for x in of_one]
    collected.metrics |= {"perception/dependency_mean": math.fsum(values) / len(values)} if values else {}
    return replace(before, logp=before.logp | logp, masked=masked)


def with_dependency(groups: list[Group], by_trajectory: Mapping[int, tuple[float, ...]]) -> list[Group]:
    """Return the groups with the dependency of their samples, given by the index of a trajectory in the step."""
    changed, first = [], 0
    for group in groups:
        samples = (replace(s, dependency=by_trajectory.get(first + k)) for k, s in enumerate(group.samples))
        changed.append(replace(group, samples=tuple(samples)))
        first += len(group.everything)
    return changed


def token_weights(algorithm: Algorithm, batch: StepBatch, before: Before) -> dict[int, Tensor]:
    """Return the factor of the loss of each token of an update: 0 if it is not selected, else that of its response.

    The weights of the responses come from those of the whole update, on all ranks, which call this together.

    Returns: trajectory -> float32 [trained tokens], for this rank's trajectories.
    """
    own = on_cpu(
        {i.trajectory: low_var_kl(before.logp[i.trajectory], before.masked[i.trajectory]) for i in batch.items}
    )
    of_ranks = batch.world.gather({i: fmean(x.tolist()) for i, x in own.items()})
    means = {i: mean for of_rank in of_ranks for i, mean in of_rank.items()}
    # Sorted: the sums must not depend on which rank has which trajectory.
    order = sorted(means)
    weights = response_weights([means[i] for i in order], algorithm.perception_floor) if order else []
    weight_of, share = dict(zip(order, weights, strict=True)), algorithm.perception_share
    return {i: weight_of[i] * most_dependent(x, share).to(torch.float32) for i, x in own.items()}
