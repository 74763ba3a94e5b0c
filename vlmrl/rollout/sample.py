"""From prompts to rollouts: the first part of a step.

A draw's prompts are dealt to the ranks; engines that are done take prompts of other ranks from a shared queue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.dist.world import World
from vlmrl.errors import DataError, EngineError
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.types import (
    Finish,
    Media,
    Message,
    RewardInput,
    Row,
    Sample,
    SamplingParams,
    policy_versions,
    sample_seed,
)


class Images(Protocol):
    """Access to the images of a row."""

    def image(self, media: Media) -> Any:
        """Return the image as PIL RGB."""
        ...


class PromptSource(Protocol):
    """Source of rows, as sampling and scoring need it (implemented in tasks/source.py)."""

    @property
    def name(self) -> str: ...
    @property
    def task_name(self) -> str: ...
    @property
    def dataset(self) -> Images: ...
    def messages(self, row: Row) -> tuple[Message, ...]: ...
    def reward_input(self, row: Row, text: str, finish: Finish, num_tokens: int, prompt: str) -> RewardInput: ...


@dataclass(frozen=True)
class Prompt:
    """Drawn and encoded row.

    Args:
        occurrence: how often it had been drawn before in this run.
    """

    source: PromptSource
    row: Row
    occurrence: int
    encoded: EncodedPrompt


@dataclass(frozen=True)
class Rollout:
    """Prompt with the engine's responses.

    Args:
        seconds: wall time of the whole generate call, shared by its rollouts.
    """

    prompt: Prompt
    samples: tuple[Sample, ...]
    seconds: float


def encode_prompt(source: PromptSource, row: Row, occurrence: int, encoder: Encoder, max_prompt_tokens: int) -> Prompt:
    """Render and encode one row.

    Raises: DataError when it has more tokens than allowed; a prompt is never cut.
    """
    encoder.require_fit(row, max_prompt_tokens)
    images = [source.dataset.image(media) for media in row.media]
    encoded = encoder.encode(row, source.messages(row), images)
    if len(encoded.prompt_ids) > max_prompt_tokens:
        raise DataError(
            f"the prompt has {len(encoded.prompt_ids)} tokens ({encoded.num_image_tokens} of them image tokens), more"
            f" than rollout.max_prompt_tokens = {max_prompt_tokens}",
            where=row.place,
            hint="raise rollout.max_prompt_tokens, or lower model.max_pixels; `vlmrl check` lists all such rows",
        )
    return Prompt(source, row, occurrence, encoded)


def sample_rollouts(
    generator: Generator,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    num_samples: int,
    run_seed: int,
    version: int,
    progress: Callable[[int], Any] | None = None,
) -> list[Rollout]:
    """Sample `num_samples` responses to every prompt with policy `version`.

    Raises: EngineError when a sample is from another version: training on stale samples is never silent.
    """
    start = time.perf_counter()
    answers = generator.generate(requests_for(prompts, num_samples, run_seed, version), params, progress)
    return rollouts_of(prompts, answers, time.perf_counter() - start, version)


def requests_for(prompts: Sequence[Prompt], num_samples: int, run_seed: int, step: int) -> list[SamplingRequest]:
    """Return the requests to an engine at a step. Seeds depend only on the run's seed, the step and the prompt."""
    return [
        SamplingRequest(p.encoded, num_samples, sample_seed(run_seed, step, p.row.prompt_id, p.occurrence))
        for p in prompts
    ]


def rollouts_of(
    prompts: Sequence[Prompt], answers: Sequence[Sequence[Sample]], seconds: float, version: int
) -> list[Rollout]:
    """Join prompts with the responses of policy `version`.

    Raises: EngineError when a response, or one of its segments, is from another version.
    """
    stale = {v for samples in answers for s in samples for v in policy_versions(s.version, s.segments)} - {version}
    if stale:
        raise EngineError(f"the engine answered with policy version {min(stale)}, not with {version}")
    return [Rollout(p, tuple(samples), seconds) for p, samples in zip(prompts, answers, strict=True)]


T = TypeVar("T")


class Deal:
    """Deal of the prompts of a draw. Prompt i belongs to rank i modulo the number of ranks.

    Iteration gives the indices of the prompts that this rank samples, one at a time. A rank begins with its first
    prompts, as many as its engine generates at the same time. Its other prompts are in a queue. A rank takes from its
    own queue, and when this is empty, from those of the other ranks. Every prompt is taken once. Which rank takes it
    depends on the time; its seed, and so its samples, do not.

    Args:
        count: number of prompts in the draw.
        name: name of the draw, the same on all ranks and used once in a run.
        first: number of prompts with which each rank begins, the same on all ranks; None = all that belong to it.

    Attributes:
        taken: the indices that this rank has taken, in this order.
    """

    def __init__(self, count: int, world: World, name: str = "", first: int | None = None) -> None:
        self.count, self.world, self.taken = count, world, list[int]()
        first = count if first is None else first
        self._own = world.mine(count)[:first]
        self._queues = [range(rank, count, world.size)[first:] for rank in range(world.size)]
        self._keys = [f"deal/{name}/{rank}" for rank in range(world.size)]

    def __iter__(self) -> Iterator[int]:
        for index in chain(self._own, self._queued()):
            self.taken.append(index)
            yield index

    def _queued(self) -> Iterator[int]:
        size = self.world.size
        for rank in (*range(self.world.rank, size), *range(self.world.rank)):
            queue = self._queues[rank]
            while queue and (number := self.world.store.add(self._keys[rank], 1)) <= len(queue):
                yield queue[number - 1]

    def join(self, own: Sequence[T]) -> list[T]:
        """Return the items of all ranks, in order of the prompts. All ranks call this.

        Args:
            own: this rank's items, in the order in which it took the prompts.
        """
        of_ranks = self.world.gather(list(zip(self.taken, own, strict=True)))
        if self.world.is_main:  # every rank has taken its last prompt
            for key, queue in zip(self._keys, self._queues, strict=True):
                if queue:
                    self.world.store.delete_key(key)
        items = {index: item for of_rank in of_ranks for index, item in of_rank}
        return [items[index] for index in range(self.count)]
