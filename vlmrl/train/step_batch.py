"""Batch of a step: the samples that are trained on, dealt in whole groups into updates and over the ranks.

All ranks run its packed rows together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from vlmrl.algo.divergence import Divergence
from vlmrl.dist.world import ALONE, World
from vlmrl.model.caches import common_passes, passes_of
from vlmrl.model.device_memory import asking_for
from vlmrl.model.packing import PromptTokens, RowReference, TrainItem, layout_of, make_row, pack, row_load
from vlmrl.model.policy import Policy, token_logprobs
from vlmrl.train.learner import ReferencePolicy
from vlmrl.types import Group, ScoredSample, name_row

FILLER = -1
"""Value of `trajectory` of a filler: an item without loss."""


Tail = tuple[tuple[int, ...], Mapping[str, Tensor]]
"""`TrainItem.kinds` and `TrainItem.images` of a response."""


RowItems = tuple[list[TrainItem], tuple[bool, ...]]
"""Items of a packed row, and `PackedRow.passes`: () where this rank needs all passes that the ranks make together."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Beside:
    """Hidden states of another model for the responses of a batch; its head makes logits of them, chunk by chunk.

    Args:
        model: the other model; its hidden states may have another width D than the policy's.
        hidden: trajectory -> hidden states that predict its trained tokens, [tokens, D] on the CPU in the model's
            dtype: 2 D bytes per token in bfloat16 (7 KiB at D = 3584: 6.7 GiB for a million tokens).
    """

    model: Policy | ReferencePolicy
    divergence: Divergence = field(default_factory=Divergence)
    hidden: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class StepBatch:
    """Everything that one step trains on, or one update of it.

    Args:
        items: this rank's trajectories to train on; `item.trajectory` is the index into the lists below.
        advantage_S: one advantage per trajectory.
        names_S: names of the trajectories in errors ("digits row 17 sample 3").
        old_logp, ref_logp, old_value: trajectory -> [trained tokens]; filled by `fill_stats` when needed.
        reference, teacher: what `fill_reference` kept of the reference, for the full KL, and of the teacher.
        token_advantages: trajectory -> one advantage per trained token, instead of that of `advantage_S`.
        value_target: trajectory -> target of the critic's value before each trained token.
        dead_tokens: group -> number of trained tokens of each response, for groups that are left out but count in the
            denominator. On all ranks the same.
        masked_logp: trajectory -> log-probs of its trained tokens behind masked images, in nats.
        masked_prompt: returns the prompt of a group with masked images, for a gradient through it; None = none.
        token_weight, teacher_weight: trajectory -> factor of each trained token in the policy's loss, and in the
            divergence from the teacher; {} = there is none.
        updates: the groups of each update, in order. On all ranks the same.
        seed: seed of the surrogate's random choices.
        world: the ranks that share the step, each with its own items, in whole groups.
        filler: trajectory without loss (its `trajectory` is `FILLER`), with an image if the model has a vision tower:
            for ranks that have fewer packed rows than others, or need fewer forward passes for a row, or have a packed
            row without images where another rank has images.
        meanwhile: called before each packed row, for work beside the step's; it is not collective.
    """

    items: list[TrainItem]
    advantage_S: list[float]
    names_S: list[str]
    old_logp: dict[int, Tensor] = field(default_factory=dict)
    ref_logp: dict[int, Tensor] = field(default_factory=dict)
    old_value: dict[int, Tensor] = field(default_factory=dict)
    reference: Beside | None = None
    teacher: Beside | None = None
    token_advantages: dict[int, Tensor] = field(default_factory=dict)
    value_target: dict[int, Tensor] = field(default_factory=dict)
    dead_tokens: dict[int, list[int]] = field(default_factory=dict)
    masked_logp: dict[int, Tensor] = field(default_factory=dict)
    masked_prompt: Callable[[int], PromptTokens] | None = None
    token_weight: dict[int, Tensor] = field(default_factory=dict)
    teacher_weight: dict[int, Tensor] = field(default_factory=dict)
    updates: list[list[int]] = field(default_factory=list)
    seed: int = 0
    world: World = ALONE
    filler: TrainItem | None = None
    meanwhile: Callable[[], None] = nothing

    def advantage_of(self, trajectory: int, num_tokens: int) -> Tensor:
        """Return the advantage of each trained token of a trajectory: float32 [tokens]; 0 for a filler."""
        if trajectory == FILLER:
            return torch.zeros(num_tokens)
        advantages = self.token_advantages.get(trajectory)
        return torch.full((num_tokens,), self.advantage_S[trajectory]) if advantages is None else advantages.float()

    def sampler_logp_of(self, item: TrainItem) -> Tensor:
        """Return the engine's log-probs of a trajectory's trained tokens.

        Returns: float32 [tokens], in nats; NaN where no token was sampled (demonstrations).
        """
        logps_of_segments = [s.sampler_logp or (math.nan,) * len(s.ids) for s in item.segments if s.trained]
        return torch.tensor([x for logps in logps_of_segments for x in logps], dtype=torch.float32)

    @property
    def all_sampled(self) -> bool:
        """Return whether an engine sampled every trained token."""
        return all(s.sampler_logp is not None for i in self.items for s in i.segments if s.trained)

    def num_trained(self, item: TrainItem) -> int:
        return sum(len(s.ids) for s in item.segments if s.trained)

    def counts_of(self, item: TrainItem) -> tuple[int, int]:
        """Return the numbers of a trajectory's trained tokens by the policy, and by a demonstration."""
        shown = sum(len(s.ids) for s in item.segments if s.trained and s.author == "demonstration")
        return self.num_trained(item) - shown, shown

    def demonstrated_of(self, item: TrainItem) -> list[bool]:
        """Return which of a trajectory's trained tokens a demonstration wrote."""
        return [s.author == "demonstration" for s in item.segments if s.trained for _ in s.ids]

    def rows(self, tokens_per_row: int, sharing: str) -> Iterator[RowItems]:
        """Yield this rank's packed rows.

        Every rank gets the same number of rows, and all ranks make the same forward passes for a row, since they gather
        the layers of a sharded policy together.

        Args:
            sharing: how the policy shares prompts, as in `families.Family`.
        """
        rows = pack(self.items, tokens_per_row)
        fillers = [] if self.filler is None else [self.filler]
        of_ranks = self.world.gather([_pictured(items, sharing) for items in rows])
        # A rank without a row here runs the filler.
        for index, passes in enumerate(zip_longest(*of_ranks, fillvalue=_pictured(fillers, sharing))):
            own, mine = rows[index] if index < len(rows) else fillers, passes[self.world.rank]
            common = mine if sharing == "packed" else common_passes(passes)
            if sharing == "packed" and any(map(any, passes)) and not any(mine):
                own = [*own, *fillers]  # the vision tower runs here too
            assert own and (common == mine or fillers)
            self.meanwhile()
            yield own, () if common == mine else common

    def by_trajectory(self, items: Sequence[TrainItem], values_K: Tensor) -> dict[int, Tensor]:
        """Return one tensor per trajectory from the [K] (or [K, D]) of a packed row; a filler's values are dropped."""
        pieces = values_K.split([self.num_trained(i) for i in items])
        return {i.trajectory: x for i, x in zip(items, pieces, strict=True) if i.trajectory != FILLER}

    def naming(self, items: Sequence[TrainItem], device: torch.device) -> AbstractContextManager[None]:
        """Raise an OutOfMemoryError with these items (those of a packed row) if a `with` block runs out of memory."""
        own = [i for i in items if i.trajectory != FILLER]
        return asking_for(partial(row_load, own, self.names_S), device)

    def outputs_of(
        self, beside: Beside | None, items: Sequence[TrainItem], device: torch.device
    ) -> RowReference | None:
        """Return another model's outputs for a packed row of these items; None without one."""
        if beside is None:
            return None
        # [tokens, D] per trajectory -> [K, D] of the packed row; a filler has zeros.
        hidden = [
            torch.zeros(self.num_trained(i), beside.model.hidden_size, dtype=beside.model.dtype)
            if i.trajectory == FILLER
            else beside.hidden[i.trajectory]
            for i in items
        ]
        return RowReference(torch.cat(hidden).to(device), beside.model.head, beside.divergence)

    def behind(self, prompt_of: Callable[[int], PromptTokens], filler: TrainItem | None = None) -> StepBatch:
        """Return the batch with the same responses behind other prompts: for a pass, not for an update.

        Args:
            prompt_of: index of a group -> the prompt that stands in the place of its own.
            filler: trajectory without loss of the model that makes the pass; None = the batch's own.
        """
        prompts = {index: prompt_of(index) for index in dict.fromkeys(item.group for item in self.items)}
        items = [replace(item, prompt=prompts[item.group]) for item in self.items]
        return replace(self, items=items, filler=filler or self.filler)


@torch.no_grad()
def hidden_states(
    model: Policy | ReferencePolicy, batch: StepBatch, tokens_per_row: int, logps: dict[int, Tensor] | None = None
) -> dict[int, Tensor]:
    """Return the hidden states of a model that predict each trajectory's trained tokens, [tokens, D] on the CPU.

    Args:
        logps: receives the log-probs of these tokens, too; None = they are not computed.
    """
    hidden: dict[int, Tensor] = {}
    own = model.policy if isinstance(model, ReferencePolicy) else model
    for items, passes in batch.rows(tokens_per_row, model.sharing):
        with batch.naming(items, model.device):
            row = make_row(items, model.device, passes, batch.filler)
            states_KD = model.states(row)
            # [K, D] -> [trained tokens, D] per trajectory, in main memory.
            hidden |= batch.by_trajectory(items, states_KD.cpu())
            if logps is not None:
                options: Any = {"temperature": own.temperature, "banned_ids": own.banned_ids}
                logp_K, _ = token_logprobs(states_KD, row.target_K, model.head, **options)
                logps |= batch.by_trajectory(items, logp_K)
    return hidden


def _pictured(items: Sequence[TrainItem], sharing: str) -> tuple[bool, ...]:
    """Return whether each forward pass of a packed row of these items has images."""
    layout, images = layout_of(items)
    return tuple(each.has_images for each in passes_of(layout, [bool(i) for i in images], sharing)) if items else ()


def all_text(sample: ScoredSample) -> Tail:
    """Return the tail of a response without images."""
    return (), {}


def nothing_to_fetch(own: Sequence[int]) -> None:
    """Leave the groups that this rank trains as they are."""


def step_batch(
    groups: Sequence[Group],
    prompt_of: Callable[[int], PromptTokens],
    *,
    keep_dead: bool,
    count_dead: bool = False,
    tail_of: Callable[[ScoredSample], Tail] = all_text,
    ready: Callable[[Sequence[int]], None] = nothing_to_fetch,
    updates: int = 1,
    owners: Sequence[int] = (),
    world: World = ALONE,
    filler: TrainItem | None = None,
) -> StepBatch:
    """Return the batch that this rank trains on.

    It has every sample that is not masked and has a token to train on, from groups that are not dead, and the
    demonstrations of all groups.

    Args:
        groups: the groups of all ranks.
        prompt_of: index of a group -> its prompt; called for the groups that this rank trains.
        tail_of: returns the images within a response; called for the samples that this rank trains.
        ready: called once by all ranks, each with the groups that it trains, before `prompt_of` and `tail_of`.
        keep_dead: whether dead groups are trained on, too.
        count_dead: whether dead groups that are left out count in the denominator.
        updates: maximum number of updates that the groups are dealt into; each is balanced over the ranks by itself.
        owners: the rank that sampled each group; () = this rank.
        world, filler: as in `StepBatch`.
    """
    batch = StepBatch([], [], [], world=world, filler=filler)
    starts: list[int] = []  # index of each group's first trajectory in the step
    costs: dict[int, int] = {}  # group -> its tokens: the prompt once, and the responses that are trained
    chosen: dict[int, list[int]] = {}  # group -> its samples that are trained, by their place in `everything`
    for index, group in enumerate(groups):
        starts.append(len(batch.names_S))
        use, everything = keep_dead or not group.is_dead, group.everything
        chosen[index] = [k for k, s in enumerate(everything) if _is_trained(s) and (use or k >= len(group.samples))]
        if chosen[index]:
            responses = sum(len(everything[k].trajectory.response_ids) for k in chosen[index])
            costs[index] = len(everything[0].trajectory.prompt_ids) + responses
        if count_dead and not use:
            dead = [s.trajectory.num_trained_tokens for s in group.samples if not s.masked]
            batch.dead_tokens |= {index: dead} if dead else {}
        for sample in everything:
            batch.advantage_S.append(sample.advantage)
            batch.names_S.append(name_row(group.row.source, group.row.prompt_id, sample.trajectory.sample))
    # Groups with something to train, in their order, dealt in turn into at most `updates` parts.
    order = list(costs)
    number = min(updates, len(order))
    batch.updates = [order[k::number] for k in range(number)]
    own: list[int] = []  # the groups that this rank trains
    for part in batch.updates:
        sampled_by = [owners[i] if owners else world.rank for i in part]
        trained_by = balance([costs[i] for i in part], sampled_by, world.size)
        own += [index for index, rank in zip(part, trained_by, strict=True) if rank == world.rank]
    ready(own)
    for index in own:
        _add(batch, groups[index], index, prompt_of(index), starts[index], tail_of, chosen[index])
    batch.items.sort(key=lambda item: item.trajectory)
    return batch


def _is_trained(sample: ScoredSample) -> bool:
    return not sample.masked and sample.trajectory.num_trained_tokens > 0


def _add(
    batch: StepBatch,
    group: Group,
    index: int,
    prompt: PromptTokens,
    start: int,
    tail_of: Callable[[ScoredSample], Tail],
    chosen: Sequence[int],
) -> None:
    for trajectory, sample in ((start + k, group.everything[k]) for k in chosen):
        batch.items.append(TrainItem(prompt, index, sample.trajectory.segments, trajectory, *tail_of(sample)))
        if sample.token_advantages is not None:
            batch.token_advantages[trajectory] = torch.tensor(sample.token_advantages, dtype=torch.float32)
        if sample.value_targets is not None:
            batch.value_target[trajectory] = torch.tensor(sample.value_targets, dtype=torch.float32)


def balance(costs: Sequence[int], owners: Sequence[int], size: int) -> list[int]:
    """Return the rank that trains each group: the heaviest groups first, each to a rank with few tokens so far.

    A group stays with its owner, which has its pixels already, as long as the owner stays within a fair share. No rank
    gets more than a fair share plus the heaviest group.

    Args:
        costs: tokens of each group.
        owners: the rank that sampled each group.
        size: number of ranks.
    """
    load, ranks = [0] * size, [0] * len(costs)
    share = max(-(-sum(costs) // size), max(costs, default=0))
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        ranks[i] = owners[i] if load[owners[i]] + costs[i] <= share else min(range(size), key=lambda r: (load[r], r))
        load[ranks[i]] += costs[i]
    return ranks


def split_updates(batch: StepBatch) -> list[StepBatch]:
    """Return the batches of the updates that a batch was dealt into, each of whole groups.

    They share all other fields: log-probs that are filled in later are visible in all of them.
    """
    if len(batch.updates) <= 1:
        return [batch]
    # Each update's denominator gets its share of the dead groups' tokens.
    dead = list(batch.dead_tokens.items())
    return [
        replace(
            batch,
            items=[i for i in batch.items if i.group in part],
            updates=[part],
            dead_tokens=dict(dead[k :: len(batch.updates)]),
        )
        for k, part in enumerate(batch.updates)
    ]


def on_cpu(by: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return tensors of one device and dtype, [tokens] each, on the CPU, with one copy for all of them."""
    if not by:
        return {}
    lengths = [len(x) for x in by.values()]
    return dict(zip(by, torch.cat(list(by.values())).cpu().split(lengths), strict=True))


@dataclass
class Before:
    """Token statistics of the step's trajectories before its first update, by trajectory; {} = not computed.

    Args:
        logp: log-probs of the policy in nats, float32 [trained tokens].
        value: values of the critic, float32 [trained tokens].
        kl: the policy's KL to the reference in nats, by the algorithm's estimator, [trained tokens].
        teacher: log-probs of the teacher in nats, float32 [trained tokens].
        energy: squared sizes of the gradients of the log-probs by the logits, float32 [trained tokens].
        masked: log-probs of the policy behind masked images, as `logp`; those of this rank's trajectories.
    """

    logp: dict[int, Tensor] = field(default_factory=dict)
    value: dict[int, Tensor] = field(default_factory=dict)
    kl: dict[int, Tensor] = field(default_factory=dict)
    teacher: dict[int, Tensor] = field(default_factory=dict)
    energy: dict[int, Tensor] = field(default_factory=dict)
    masked: dict[int, Tensor] = field(default_factory=dict)

    def joined(self, world: World) -> Before:
        """Merge the statistics of all ranks. With several ranks the result is on the CPU."""
        if world.size == 1:
            return self
        own = (self.logp, self.value, self.kl, self.teacher, self.energy)
        parts = world.gather([on_cpu(of_each) for of_each in own])
        return Before(*({i: part[k][i] for part in parts for i in part[k]} for k in range(len(own))))
