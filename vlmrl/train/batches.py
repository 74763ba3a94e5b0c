"""Scored groups -> what a step trains on: who takes part, whole groups dealt into updates and over the processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from vlmrl.data.packing import PromptTokens, TrainItem
from vlmrl.dist.world import ALONE, World
from vlmrl.rollout.sample import is_dead_group
from vlmrl.train.step import StepBatch
from vlmrl.types import Group, ScoredSample, name_row

Tail = tuple[tuple[int, ...], Mapping[str, Tensor]]
"""`TrainItem.kinds` and `TrainItem.images` of a response."""


def all_text(sample: ScoredSample) -> Tail:
    """The tail of a response without images."""
    return (), {}


def step_batch(
    groups: Sequence[Group], prompt_of: Callable[[int], PromptTokens], *, keep_dead: bool, count_dead: bool = False,
    tail_of: Callable[[ScoredSample], Tail] = all_text, updates: int = 1, owners: Sequence[int] = (),
    world: World = ALONE, filler: TrainItem | None = None,
) -> StepBatch:  # fmt: skip
    """What this process trains on: every sample that is not masked and has a token to train on, of its groups that
    are not dead.

    Args:
        groups: of all processes.      prompt_of: index of a group -> its prompt; asked for this process's groups.
        tail_of: the images within a response; asked for this process's samples.
        keep_dead: dead groups too.    count_dead: those that are left out count in the denominator.
        updates: into how many updates the groups are dealt at most; each is balanced over the processes by itself.
        owners: which process sampled each group; () = this one did.      world, filler: as in `StepBatch`.
    """
    batch = StepBatch([], [], [], world=world, filler=filler)
    starts: list[int] = []
    costs: dict[int, int] = {}
    for index, group in enumerate(groups):
        starts.append(len(batch.names_S))
        use = keep_dead or not is_dead_group(group)
        for sample in group.samples:
            if use and _is_trained(sample):
                costs.setdefault(index, len(sample.trajectory.prompt_ids))
                costs[index] += len(sample.trajectory.response_ids)
            elif count_dead and not use and not sample.masked:
                batch.dead_tokens.setdefault(index, []).append(sample.trajectory.num_trained_tokens)
            batch.advantage_S.append(sample.advantage)
            batch.names_S.append(f"{name_row(group.row.source, group.row.prompt_id)} sample {sample.trajectory.sample}")
    order = list(costs)
    number = min(updates, len(order))
    batch.updates = [order[k::number] for k in range(number)]
    for part in batch.updates:
        sampled_by = [owners[i] if owners else world.rank for i in part]
        trained_by = balance([costs[i] for i in part], sampled_by, world.size)
        for index, rank in zip(part, trained_by, strict=True):
            if rank == world.rank:
                _add(batch, groups[index], index, prompt_of(index), starts[index], tail_of)
    batch.items.sort(key=lambda item: item.trajectory)
    return batch


def _is_trained(sample: ScoredSample) -> bool:
    return not sample.masked and sample.trajectory.num_trained_tokens > 0


def _add(
    batch: StepBatch, group: Group, index: int, prompt: PromptTokens, start: int,
    tail_of: Callable[[ScoredSample], Tail],
) -> None:  # fmt: skip
    for trajectory, sample in enumerate(group.samples, start):
        if not _is_trained(sample):
            continue
        batch.items.append(TrainItem(prompt, index, sample.trajectory.segments, trajectory, *tail_of(sample)))
        if sample.token_advantages is not None:
            batch.token_advantages[trajectory] = torch.tensor(sample.token_advantages, dtype=torch.float32)
        if sample.value_targets is not None:
            batch.value_target[trajectory] = torch.tensor(sample.value_targets, dtype=torch.float32)


def balance(costs: Sequence[int], owners: Sequence[int], size: int) -> list[int]:
    """Which process trains each group, of `size` processes: one that has few tokens yet, the heaviest groups first.

    A group stays with its owner, who has its pixels at hand, while that keeps the owner at a fair share. No process
    gets more than a fair share and the heaviest group together.
    """
    load, found = [0] * size, [0] * len(costs)
    share = max(-(-sum(costs) // size), max(costs, default=0))
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        found[i] = owners[i] if load[owners[i]] + costs[i] <= share else min(range(size), key=lambda r: (load[r], r))
        load[found[i]] += costs[i]
    return found


def split_updates(batch: StepBatch) -> list[StepBatch]:
    """The batch as the updates it was dealt into, each of whole groups; what is filled in later is shared by all."""
    if len(batch.updates) <= 1:
        return [batch]
    dead = list(batch.dead_tokens.items())
    return [
        replace(
            batch, items=[i for i in batch.items if i.group in part], updates=[part],
            dead_tokens=dict(dead[k :: len(batch.updates)]),
        )
        for k, part in enumerate(batch.updates)
    ]  # fmt: skip
