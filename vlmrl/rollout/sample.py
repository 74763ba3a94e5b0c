"""From prompts to rollouts: the first part of a step.

A draw's prompts are dealt to the ranks; engines that are done take prompts of other ranks from a shared queue. A group
is scored while others are still generated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, Protocol, TypeVar

from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.data.images import decode_image
from vlmrl.dist import world as rank_process
from vlmrl.dist.world import World
from vlmrl.errors import DataError, EngineError, RewardError, RewardUnavailable
from vlmrl.rewards.attempts import Ranks
from vlmrl.rewards.scoring import GroupScores, Scorer, ScoringSession
from vlmrl.rollout.engine import Generator, SamplingRequest
from vlmrl.store.summary import WAITS
from vlmrl.types import (
    ENVIRONMENT_DOWN,
    Finish,
    Group,
    Media,
    Message,
    RewardInput,
    Row,
    Sample,
    SamplingParams,
    Score,
    ScoredSample,
    Segment,
    Trajectory,
    name_row,
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
    def encoder(self, encoder: Encoder, row: Row) -> Encoder: ...
    def messages(self, row: Row) -> tuple[Message, ...]: ...
    def reward_input(self, row: Row, text: str, finish: Finish, num_tokens: int, prompt: str) -> RewardInput: ...


class Hint(NamedTuple):
    """Beginning of a response, which the policy goes on with: its token ids, and their text."""

    ids: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class Prompt:
    """Drawn and encoded row.

    Args:
        occurrence: how often it had been drawn before in this run.
        hint: what stands in front of each response; it is no part of `encoded`.
    """

    source: PromptSource
    row: Row
    occurrence: int
    encoded: EncodedPrompt
    hint: Hint | None = None

    @property
    def begun(self) -> EncodedPrompt:
        """Tokens that an engine goes on with: those of the prompt, then those of the hint."""
        e, ids = self.encoded, self.hint.ids if self.hint else ()
        more = {"prompt_ids": e.prompt_ids + ids, "kinds": e.kinds + (0,) * len(ids)}
        return replace(e, **more, unexpanded_ids=e.unexpanded_ids + ids) if ids else e

    def whole(self, sample: Sample) -> Sample:
        """Return a response with the hint in front of it."""
        if self.hint is None:
            return sample
        ids, text = self.hint
        return replace(
            sample,
            token_ids=ids + sample.token_ids,
            text=text + sample.text,
            sampler_logp=(math.nan,) * len(ids) + sample.sampler_logp,
            segments=(Segment("assistant", ids, True, author="demonstration"), *sample.parts),
        )


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
    encoded = source.encoder(encoder, row).encode(row, source.messages(row), images)
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
        SamplingRequest(p.begun, num_samples, sample_seed(run_seed, step, p.row.prompt_id, p.occurrence))
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
    return [Rollout(p, tuple(map(p.whole, samples)), seconds) for p, samples in zip(prompts, answers, strict=True)]


T = TypeVar("T")


class PromptQueue:
    """Queue of the prompts of a draw over the ranks. Prompt i belongs to rank i modulo the number of ranks.

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
        self._keys = [f"queue/{name}/{rank}" for rank in range(world.size)]

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


def join_groups(queue: PromptQueue, own: Sequence[Group]) -> list[Group]:
    """Return the groups of all ranks, in order of the prompts. All ranks call this.

    Images that tools and rewards made go to rank 0 alone, which stores them: a step may have hundreds of megabytes.
    This rank keeps those of its own tools, since it may train on them: see `Collected.fetch_images`.

    Args:
        own: this rank's groups, in the order in which it took the prompts.
    """
    if queue.world.size == 1:
        return queue.join(own)
    # Index of a group -> (image files of tools, of rewards) of each sample.
    files = {i: [(s.files, s.score.files) for s in g.samples] for i, g in zip(queue.taken, own, strict=True)}
    groups = queue.join([_with_files(g, [({}, {})] * len(g.samples)) for g in own])
    of_ranks = queue.world.gather_to_main({i: pairs for i, pairs in files.items() if any(map(any, pairs))})
    for of_rank in of_ranks or [{i: [(tools, {}) for tools, _ in pairs] for i, pairs in files.items()}]:
        for index, pairs in of_rank.items():
            groups[index] = _with_files(groups[index], pairs)
    return groups


def _with_files(group: Group, pairs: Sequence[tuple[Mapping[str, bytes], Mapping[str, bytes]]]) -> Group:
    """Return the group with the image files of each sample: those of its tools, those of its rewards."""
    both = zip(group.samples, pairs, strict=True)
    samples = (replace(s, files=tools, score=replace(s.score, files=drawn)) for s, (tools, drawn) in both)
    return replace(group, samples=tuple(samples))


LISTEN_SECONDS = 0.05
"""Time in seconds after which generation pauses, for the workers of the rewards to be given more work."""


def ranks_of(world: World, say: Callable[[str], None]) -> Ranks:
    """Return what a scoring session needs of the ranks that score together. `say`: shows a message to the user."""
    return Ranks(world.gather, world.size, partial(rank_process.phase, WAITS), say)


def submit(session: ScoringSession, index: int, rollout: Rollout) -> None:
    """Begin to score a rollout. `index`: its position in the draw; rollouts may come in any order.

    Raises: RewardError for an episode whose environment failed, if the session is strict.
    """
    name, row = rollout.prompt.source.name, rollout.prompt.row.prompt_id
    for k, sample in enumerate(rollout.samples):
        if sample.is_outage and session.rule.on_outage != "raise":
            session.outages.append(_fault_words(sample))
        elif sample.fault and session.strict:
            require_environment(sample, name_row(name, row, k))
    inputs = _reward_inputs(rollout)
    session.submit(index, name, inputs, [name_row(name, row, x.sample) for x in inputs])


def scored_groups(session: ScoringSession, rollouts: Sequence[Rollout]) -> list[Group]:
    """Wait for the scores of all rollouts of a draw, in its order; advantages are still 0. Errors: as `collect`."""
    return [_group(rollout, scored) for rollout, scored in zip(rollouts, session.collect(), strict=True)]


def score_rollouts(rollouts: Sequence[Rollout], scorers: Mapping[str, Scorer], *, strict: bool) -> list[Group]:
    """Score all responses, each source with its own reward."""
    with ScoringSession(scorers, strict=strict) as session:
        for index, rollout in enumerate(rollouts):
            submit(session, index, rollout)
        return scored_groups(session, rollouts)


def sample_scored(
    generator: Generator,
    prompts: Iterable[Prompt],
    params: SamplingParams,
    session: ScoringSession,
    *,
    num_samples: int,
    run_seed: int,
    version: int,
    room: int | None = None,
    progress: Callable[[int], Any] | None = None,
) -> list[Rollout]:
    """Sample `num_samples` responses to every prompt with policy `version`, and begin to score each group at once.

    All ranks call this, each with its own prompts.

    Args:
        room: number of prompts that are taken from the iterable before one of them is complete; None = all.
    Returns: the rollouts in the order of the prompts, each with the seconds of the whole sampling.
    Raises: EngineError when a sample is from another version.
    """
    start = time.perf_counter()
    rollouts: dict[int, Rollout] = {}
    with generator.round(progress):
        waiting, open_requests = enumerate(prompts), dict[int, tuple[int, Prompt]]()
        while True:
            free = None if room is None else room - len(open_requests)
            for index, prompt in islice(waiting, free):
                (request,) = requests_for([prompt], num_samples, run_seed, version)
                open_requests[generator.submit(request, params)] = (index, prompt)
            if not open_requests:
                break
            for number, samples in generator.poll(LISTEN_SECONDS):
                index, prompt = open_requests.pop(number)
                (rollouts[index],) = rollouts_of([prompt], [samples], 0.0, version)
                submit(session, index, rollouts[index])
            session.listen()
    seconds = time.perf_counter() - start
    return [replace(rollouts[index], seconds=seconds) for index in sorted(rollouts)]


def _group(rollout: Rollout, scored: GroupScores) -> Group:
    """Return the scored group of a rollout. A sample whose environment failed was not scored."""
    rewarded = iter(zip(scored.scores, scored.seconds, strict=True))
    pairs = [(_unscored(sample), 0.0) if sample.fault else next(rewarded) for sample in rollout.samples]
    samples = [
        ScoredSample(
            _trajectory(rollout.prompt, k, sample),
            sample.text,
            score,
            masked=score.error is not None,
            generate_seconds=rollout.seconds,
            reward_seconds=seconds,
            turns=sample.turns,
            files=sample.files,
            ending=sample.ending,
            measured=sample.measured,
        )
        for k, (sample, (score, seconds)) in enumerate(zip(rollout.samples, pairs, strict=True))
    ]
    return Group(rollout.prompt.row, rollout.prompt.encoded.text, tuple(samples))


def require_environment(sample: Sample, where: str) -> None:
    """Raise a RewardUnavailable or RewardError if the environment of an episode failed."""
    if sample.is_outage:
        hint = "start the service that it needs, then begin again"
        raise RewardUnavailable(_fault_words(sample), where=where, hint=hint)
    if sample.fault:
        raise RewardError(_fault_words(sample), where=where)


def _fault_words(sample: Sample) -> str:
    return f"{ENVIRONMENT_DOWN if sample.is_outage else 'the environment failed'}: {sample.fault}"


def _unscored(sample: Sample) -> Score:
    return Score(math.nan, {}, error=_fault_words(sample), status="unavailable" if sample.is_outage else "failed")


def _trajectory(prompt: Prompt, index: int, sample: Sample) -> Trajectory:
    return Trajectory(
        task=prompt.source.task_name,
        prompt_id=prompt.row.prompt_id,
        occurrence=prompt.occurrence,
        sample=index,
        version=sample.version,
        seed=sample.seed,
        prompt_ids=prompt.encoded.prompt_ids,
        segments=sample.parts,
        media=prompt.encoded.row.media,  # the images that the model saw
        finish=sample.finish,
        seen_sizes=prompt.encoded.seen_sizes,
    )


def _reward_inputs(rollout: Rollout) -> list[RewardInput]:
    """Return the input of the reward for each sample. All share the images of the prompt, which are decoded once."""
    prompt, samples = rollout.prompt, rollout.samples
    if not samples:
        return []
    first = samples[0]
    base = prompt.source.reward_input(
        prompt.row, first.text, first.finish, first.num_sampled_tokens, prompt.encoded.text
    )
    # Without images of the prompt, it is not known whether the reward needs any.
    is_needed = len(base.images) == len(prompt.row.media)
    return [
        replace(
            base,
            response=sample.text,
            images=[*base.images, *(decode_image(sample.files[m.sha256]) for t in sample.turns for m in t.media)]
            if is_needed
            else base.images,
            finish=sample.finish,
            num_tokens=sample.num_sampled_tokens,
            token_ids=sample.token_ids or None,
            step=sample.version,
            prompt_id=prompt.row.prompt_id,
            sample=index,
            media=prompt.row.media,
            seen_sizes=prompt.encoded.seen_sizes,
            turns=sample.turns,
            measured=sample.measured,
        )
        for index, sample in enumerate(samples)
        if not sample.fault
    ]


ENOUGH_RESPONSES = 256
"""Responses in flight that keep an engine busy; with fewer, one that admits requests at any time gets more prompts."""
MOST_AHEAD = 1024
"""Maximum number of prompts that are submitted after the oldest one in flight: the others wait for its grade."""
Answered = tuple[int, Rollout]
"""(number of a prompt, its responses)."""


def answer_pieces(
    engine: Generator,
    pieces: Iterator[Sequence[tuple[int, Prompt]]],
    params: SamplingParams,
    *,
    num_samples: int,
    run_seed: int,
    progress: Callable[[int], Any] | None = None,
) -> Iterator[Answered | None]:
    """Yield the responses to prompts as they are complete; None about every LISTEN_SECONDS if none is.

    All samples of a prompt are one request. A piece is submitted when all prompts of the piece before are complete: so
    the batches of the built-in engine depend on the pieces alone, not on the time. An engine that admits requests at
    any time (`Generator.admits`) gets the next piece before it runs dry.

    Args:
        pieces: (number, prompt) of each prompt. Pieces are taken when there is room for them; one may be empty.
    Raises: EngineError when a response is from another version of the policy.
    """
    version, pieces_left, submitted = engine.version, True, 0
    waiting: dict[int, tuple[int, int, Prompt, float]] = {}  # id -> place, number, prompt, begin; the oldest first

    def has_room() -> bool:
        if not waiting:
            return True
        oldest = next(iter(waiting.values()))[0]
        return engine.admits and len(waiting) * num_samples < ENOUGH_RESPONSES and submitted - oldest < MOST_AHEAD

    with engine.round(progress):
        while True:
            while pieces_left and has_room():
                piece = next(pieces, None)
                if piece is None:
                    pieces_left = False
                    break
                if not piece:  # nothing to submit, but the caller has something to do
                    yield None
                requests = requests_for([prompt for _, prompt in piece], num_samples, run_seed, version)
                for (number, prompt), request in zip(piece, requests, strict=True):
                    waiting[engine.submit(request, params)] = (submitted, number, prompt, time.perf_counter())
                    submitted += 1
            if not waiting:
                break
            complete = engine.poll(LISTEN_SECONDS)
            for request_id, samples in complete:
                _, number, prompt, begin = waiting.pop(request_id)
                seconds = time.perf_counter() - begin
                (rollout,) = rollouts_of([without_pixels(prompt)], [samples], seconds, version)
                yield number, rollout
            if not complete:
                yield None


def without_pixels(prompt: Prompt) -> Prompt:
    """Return a prompt without the tensors of its images, which only an engine reads; they are most of its memory."""
    return replace(prompt, encoded=replace(prompt.encoded, images={}, pictures=()))
