"""Rollouts -> what a step trains on: who takes part, and whole groups dealt into updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from vlmrl.data.batch import TrainItem
from vlmrl.rollout.sample import Rollout, is_dead_group
from vlmrl.train.sft import prompt_tokens
from vlmrl.train.update import StepBatch
from vlmrl.types import Group


def step_batch(
    rollouts: Sequence[Rollout], groups: Sequence[Group], *, keep_dead: bool, count_dead: bool = False
) -> StepBatch:
    """What a step trains on: every sample that is not masked, of every group that is not dead.

    Args: keep_dead: dead groups too. count_dead: those that are left out count in the denominator.
    """
    batch = StepBatch([], [], [])
    for index, (rollout, group) in enumerate(zip(rollouts, groups, strict=True)):
        tokens = prompt_tokens(rollout.prompt)
        use = keep_dead or not is_dead_group(group)
        for sample in group.samples:
            trajectory = len(batch.names_S)
            if use and not sample.masked:
                batch.items.append(TrainItem(tokens, index, sample.trajectory.segments, trajectory))
                if sample.token_advantages is not None:
                    batch.token_advantages[trajectory] = torch.tensor(sample.token_advantages, dtype=torch.float32)
                if sample.value_targets is not None:
                    batch.value_target[trajectory] = torch.tensor(sample.value_targets, dtype=torch.float32)
            elif count_dead and not use and not sample.masked:
                batch.dead_tokens.setdefault(index, []).append(sample.trajectory.num_trained_tokens)
            batch.advantage_S.append(sample.advantage)
            batch.names_S.append(f"{group.row.source} row {group.row.prompt_id} sample {sample.trajectory.sample}")
    return batch


def split_groups(batch: StepBatch, count: int) -> list[StepBatch]:
    """The batch dealt into at most `count` minibatches of whole groups, as equal as whole groups allow."""
    if count == 1:
        return [batch]
    order = list(dict.fromkeys(item.group for item in batch.items))
    number = min(count, len(order))
    parts = [set(order[i::number]) for i in range(number)]
    dead = list(batch.dead_tokens.items())
    return [
        replace(batch, items=[i for i in batch.items if i.group in part], dead_tokens=dict(dead[k::number]))
        for k, part in enumerate(parts)
    ]
