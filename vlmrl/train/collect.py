"""First parts of a step of reinforcement learning: prompts -> rollouts -> scores -> advantages -> batch.

Prompts come from the mixed stream of dataset rows. Some algorithms need the models before the advantages: one forward
pass over the step's trajectories gives the critic's values, and the KL to the reference where that is part of the
reward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, partial
from itertools import chain, islice
from statistics import fmean
from typing import Any, Literal

import numpy as np
import torch

from vlmrl.algo.advantages import Array, explained_variance
from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.credit import Weights, add_credit, add_gains, has_spread, mark_masked
from vlmrl.algo.losses import KL_LOSSES
from vlmrl.data.blinded_images import BlindedDataset, ImageChange, changed_row
from vlmrl.data.encode import Encoder
from vlmrl.data.turns import ROLES, TurnEncoder, encode_tail
from vlmrl.dist.world import ALONE, World
from vlmrl.model.packing import PromptTokens
from vlmrl.recipe.schema import Recipe
from vlmrl.rewards.attempts import AttemptRule, Ranks
from vlmrl.rewards.scoring import Scorer, ScoringSession
from vlmrl.rewards.service_pool import ServiceMeter
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import (
    Prompt,
    PromptQueue,
    Rollout,
    encode_prompt,
    join_groups,
    requests_for,
    rollouts_of,
    sample_scored,
    scored_groups,
    submit,
)
from vlmrl.setup.sources import EvalSet
from vlmrl.tasks.source import PromptStream, Source
from vlmrl.train.journal import Clock
from vlmrl.train.learner import Learner
from vlmrl.train.step_batch import Before, StepBatch, Tail, on_cpu, split_updates, step_batch
from vlmrl.train.update import fill_logps, fill_reference, fill_stats
from vlmrl.types import Group, Row, Sample, SamplingParams, ScoredSample, hash64

Drawn = tuple[Source, Row, int]
"""Drawn dataset row: its source, the row, its occurrence (number of earlier draws)."""


@dataclass
class PromptFeed:
    """Prompts of a run, and the scorers of their answers.

    Args:
        sources: the training sources.
        validation: the sets that are evaluated; [] = the run does not validate.
        stream: draws from the training sources in the recipe's shares.
        scorers: the scorer of each source, by its name.
        sampling: sampling parameters of training.
        evaluation: sampling parameters of validation, by the name of the setting ("" = a recipe without settings).
        world: the ranks, which share the prompts of a draw.
        cursor: position of the stream to save in a checkpoint while rows are drawn whose step is not done; None = its
            current position.
        rule: what happens when a service that a reward needs is down.
        meter: counts of the services on this rank.
        service_counts: (attribute) metric -> number of all ranks so far.
        turn_encoders: (attribute) (whether there are tools, role of a message) -> its encoder.
        changed_images: (attribute) name of a source -> its dataset with changed images.
        hint: gives a prompt of a step the beginning of its responses.
        demonstrate: adds the demonstrations of a step to what was collected; None = the algorithm takes none.
    """

    recipe: Recipe
    sources: Sequence[Source]
    validation: Sequence[EvalSet]
    stream: PromptStream
    encoder: Encoder
    scorers: Mapping[str, Scorer]
    sampling: SamplingParams
    evaluation: Mapping[str, SamplingParams]
    world: World = ALONE
    cursor: Mapping[str, Any] | None = None
    rule: AttemptRule = field(default_factory=partial(AttemptRule, "wait"))
    ranks: Ranks = field(default_factory=Ranks)
    meter: ServiceMeter = field(default_factory=ServiceMeter)
    service_counts: dict[str, float] = field(default_factory=dict)
    turn_encoders: dict[tuple[bool, str], TurnEncoder] = field(default_factory=dict)
    changed_images: dict[str, BlindedDataset] = field(default_factory=dict)
    hint: Callable[[Prompt, int], Prompt] = field(default=lambda prompt, step: prompt)
    demonstrate: Callable[[Collected, int, bool], None] | None = None

    def turn_encoder(self, prompt: Prompt, role: Literal["system", "user", "assistant", "tool"]) -> TurnEncoder:
        """Return the encoder of messages behind the first turn; one serves all prompts with tools."""
        key, encoder = (bool(prompt.row.tools), role), prompt.source.encoder(self.encoder, prompt.row)
        if key not in self.turn_encoders:
            self.turn_encoders[key] = TurnEncoder(encoder, ROLES if role == "tool" else ("user",))
        return self.turn_encoders[key]

    def service_metrics(self) -> dict[str, float]:
        """Return metric -> number since the last call, of all ranks, for the services that rewards ask.

        All ranks call it together.
        """
        if not self._asks_services:
            return {}
        new = self.meter.read(service for scorer in self.scorers.values() for service in scorer.services)
        of_ranks = self.world.gather(new)
        names = dict.fromkeys(name for counts in of_ranks for name in counts)
        sums = {name: sum(counts.get(name, 0) for counts in of_ranks) for name in names}
        for name, number in sums.items():
            self.service_counts[name] = self.service_counts.get(name, 0) + number
        return sums

    def service_summary(self) -> str:
        """Return the counts of this attempt in one line; "" if no service was asked. All ranks call it together."""
        self.service_metrics()
        return self.meter.last.summary(self.service_counts) if self.meter.last is not None else ""

    def scoring(self, *, strict: bool) -> ScoringSession:
        """Open a session for the scores of a draw. `strict` concerns bugs of the rewards alone."""
        return ScoringSession(self.scorers, self.rule, strict=strict, ranks=self.ranks)

    @property
    def position(self) -> dict[str, Any]:
        """Position of the stream at which a resumed run continues."""
        return dict(self.cursor or self.stream.state_dict())

    @property
    def weights(self) -> dict[str, Weights]:
        """Weights of the parts of each source's reward."""
        return {source.name: source.part_weights for source in self.sources}

    @cached_property
    def _asks_services(self) -> bool:
        return any(single.service for scorer in self.scorers.values() for single in scorer.spec.singles)

    @cached_property
    def longest_response(self) -> int:
        """Largest number of tokens behind a prompt; see `Recipe`."""
        return self.recipe.longest_response

    @property
    def all_sources(self) -> list[Source]:
        """Sources of training and of validation."""
        return [*self.sources, *(source for one in self.validation for source in one.sources)]

    @cached_property
    def training_rows(self) -> int:
        """Number of training rows of all sources."""
        return sum(len(source.rows) for source in self.sources)

    def draw(self, count: int) -> list[Drawn]:
        """Draw the next rows of the stream."""
        return [(self.sources[s], self.sources[s].rows[r], occurrence) for s, r, occurrence in self.stream.next(count)]

    def encode(self, source: Source, row: Row, occurrence: int) -> Prompt:
        """Encode the prompt of a row that was drawn.

        Raises: DataError when it cannot be encoded, or is longer than `rollout.max_prompt_tokens`.
        """
        return encode_prompt(source, row, occurrence, self.encoder, self.recipe.rollout.max_prompt_tokens)

    def encode_again(self, row: Row, occurrence: int) -> Prompt:
        """Encode a prompt that another rank has sampled: ranks exchange rows, but not pixels."""
        return self.encode(next(x for x in self.sources if x.name == row.source), row, occurrence)

    def encode_changed(self, row: Row, occurrence: int, change: ImageChange) -> Prompt:
        """Encode the prompt of a row with its images changed. Random changes are drawn anew each time a row is.

        They depend on the run's seed, the row, its occurrence, and the position of the image, not on the rank.
        """
        seed = hash64(self.recipe.train.seed, "changed images", occurrence)
        return self.encode(*self.with_changed(row, change, seed), occurrence)

    def with_changed(self, row: Row, change: ImageChange, seed: int) -> tuple[Source, Row]:
        """Return the source of a row, with changed images, and the row with these. `seed`: of random changes."""
        source = next(x for x in self.sources if x.name == row.source)
        dataset = self.changed_images.setdefault(source.name, BlindedDataset(source.dataset))
        return replace(source, dataset=dataset), changed_row(dataset, change, row, seed)

    def encode_tail(self, sample: ScoredSample, files: Mapping[str, bytes]) -> Tail:
        """Encode the images within a response (those of tools' answers), from their files by sha256."""
        segments = sample.trajectory.segments
        if not any(segment.media for segment in segments):
            return (), {}
        place = f"the response to {sample.trajectory.prompt_id}, sample {sample.trajectory.sample}"
        return encode_tail(self.encoder, segments, files, place)


def epochs_at(recipe: Recipe, rows: int, step: int) -> Fraction:
    """Return the number of passes over the data after a step."""
    per_step = recipe.rollout.prompts_per_step if recipe.kind == "rl" else recipe.train.rows_per_step
    return Fraction(step * per_step, rows)


@dataclass
class Collected:
    """Scored groups of a step, of all ranks. Each rank has encoded only the prompts that it sampled.

    A prompt that another rank's engine has taken over is encoded again where it is trained on. So the
    update's shares do not depend on the time.

    Args:
        encode: encodes the prompt of a row (with its occurrence) that another rank has sampled.
        encode_tail: encodes the images within a response, from their files.
        groups: the groups of the step, with their advantages once these are known.
        prompts: the prompt of each group; None = only another rank has encoded it.
        owners: the rank to which each prompt was dealt.
        greedy: the score of one greedy answer to each prompt, None where its reward failed; None = not sampled.
        metrics: metrics that only sampling can measure.
        seconds: duration of sampling, in seconds.
        files: sha256 -> image file, of tools in groups that this rank trains and another rank sampled.
        solved: whether each sample of each group solves its prompt; [] where no algorithm asks for it.
        changed: prompts with changed images that this rank has encoded.
    """

    encode: Callable[[Row, int], Prompt]
    encode_tail: Callable[[ScoredSample, Mapping[str, bytes]], Tail]
    encode_changed: Callable[[Row, int, ImageChange], Prompt]
    groups: list[Group] = field(default_factory=list)
    prompts: list[Prompt | None] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    greedy: list[float | None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    files: dict[str, bytes] = field(default_factory=dict)
    solved: list[list[bool]] = field(default_factory=list)
    changed: dict[tuple[int, ImageChange], PromptTokens] = field(default_factory=dict)

    def add_wait(self, session: ScoringSession) -> None:
        """Count the seconds for which a session waited for a service."""
        if session.waited_seconds:
            name = "reward/outage_seconds"
            self.metrics[name] = self.metrics.get(name, 0.0) + session.waited_seconds

    def sampled(self) -> list[tuple[int, Prompt]]:
        """Return (index of the group, prompt) of the prompts that this rank has encoded."""
        return [(i, prompt) for i, prompt in enumerate(self.prompts) if prompt is not None]

    def prompt_of(self, index: int) -> PromptTokens:
        """Return the prompt of a group; encode it now if another rank sampled it."""
        prompt = self.prompts[index]
        if prompt is None:
            group = self.groups[index]
            prompt = self.prompts[index] = self.encode(group.row, group.trajectories[0].occurrence)
        return PromptTokens.of(prompt.encoded)

    def prompt_behind(self, index: int, change: ImageChange) -> PromptTokens:
        """Return the prompt of a group with its images changed, encoded now if it has not been; see `StepBatch.behind`.

        It has as many tokens as the group's own prompt. Images within responses are not changed.
        """
        if (index, change) not in self.changed:
            group = self.groups[index]
            prompt = self.encode_changed(group.row, group.trajectories[0].occurrence, change)
            self.changed[index, change] = PromptTokens.of(prompt.encoded)
        return self.changed[index, change]

    def tail_of(self, sample: ScoredSample) -> Tail:
        """Return the images within a response of a group that this rank trains."""
        return self.encode_tail(sample, {**self.files, **sample.files})

    def fetch_images(self, world: World, indices: Sequence[int]) -> None:
        """Get the images of tools in the groups that this rank trains, if another rank sampled them. All ranks call it.

        Rank 0 has all of them, see `join_groups`.
        """
        samples = [[(s, images_of(s)) for s in group.samples] for group in self.groups]
        if world.size == 1 or not any(images for group in samples for _, images in group):
            return
        own = {sha256 for i in indices for sample, images in samples[i] for sha256 in images - sample.files.keys()}
        missing = world.gather(own - self.files.keys())
        stored = {k: v for group in self.groups for s in group.samples for k, v in s.files.items()}
        self.files |= world.hand_out([{k: stored[k] for k in of_rank} for of_rank in missing] if world.is_main else [])


def images_of(sample: ScoredSample) -> set[str]:
    """Return the sha256 of each image within a response."""
    return {media.sha256 for segment in sample.trajectory.segments for media in segment.media}


@dataclass
class Ahead:
    """Prompts of the next step, which the engine GPUs answer during this step's update.

    Args:
        engine: the engine; it works alone.
        requests: id of each request -> index among this rank's prompts.
        drawn: all rows of the draw.
        own: one entry per drawn row: this rank's prompt, or None where another rank answers.
        queue: the prompts of each rank, none of which moves to another.
        cursor: position of the stream before the draw. A checkpoint saves it, since a resumed run draws the rows again.
        version: policy version of the weights that answer.
        started: start of sampling, in seconds of `time.perf_counter`.
        samples: the complete answers, by index among this rank's prompts.
        rollouts: the answers; [] until `finish`.
    """

    engine: Generator
    requests: Mapping[int, int]
    drawn: Sequence[Drawn]
    own: list[Prompt | None]
    queue: PromptQueue
    cursor: Mapping[str, object]
    version: int
    started: float
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)

    def take(self, timeout: float | None) -> None:
        """Let the engine begin, and take the answers that are complete after at most `timeout` seconds."""
        self.samples |= {self.requests[number]: samples for number, samples in self.engine.poll(timeout)}

    def go_on(self) -> None:
        """Take what is complete now. Between the turns of an episode, this process runs its environment."""
        if len(self.samples) < len(self.requests):
            self.take(0.0)

    def finish(self) -> None:
        """Wait for the answers and keep them in `rollouts`."""
        prompts = [p for p in self.own if p is not None]
        while len(self.samples) < len(self.requests):
            self.take(None)
        answers = [self.samples[index] for index in range(len(prompts))]
        self.rollouts = rollouts_of(prompts, answers, time.perf_counter() - self.started, self.version)


def look_ahead(feed: PromptFeed, engine: Generator, clock: Clock, step: int) -> Ahead:
    """Draw the prompts of the next step and let the engine begin to answer them with its current weights.

    The engine works alone, see `Generator`: nothing of its round is collective, and the update may come before its end.
    """
    recipe = feed.recipe
    cursor = feed.stream.state_dict()
    drawn = feed.draw(recipe.rollout.prompts_per_step)
    own: list[Prompt | None] = [None] * len(drawn)
    queue = PromptQueue(len(drawn), feed.world)
    with clock("encode"):
        prompts = list(_encode(feed, drawn, queue, own, step))
    requests = requests_for(prompts, recipe.rollout.samples_per_prompt, recipe.train.seed, step)
    numbers = {engine.submit(request, feed.sampling): index for index, request in enumerate(requests)}
    ahead = Ahead(engine, numbers, drawn, own, queue, cursor, engine.version, time.perf_counter())
    ahead.take(0.0)
    return ahead


def collect(
    feed: PromptFeed,
    generator: Generator,
    algorithm: Algorithm,
    clock: Clock,
    *,
    step: int,
    strict: bool,
    ahead: Ahead | None = None,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Collected:
    """Sample and score the prompts of a step.

    Rank i modulo the number of ranks answers prompt i of a draw, unless engines take prompts from each other, see
    `PromptQueue`. The scored groups, without pixels, go to all ranks.

    With the filter "spread", prompts whose scores are too close are replaced by new ones, in at most `filter_tries`
    draws. The refused groups stay among the results: they are recorded, counted in the metrics, and get zero advantage.

    Args:
        step: the step; equal to the policy version that samples, unless `ahead` has the answers.
        strict: whether a bug in a reward raises, see `ScoringSession`.
        ahead: answers that were sampled during the previous step; None = sample now.
        show: called with (responses sampled so far, their total).
    Raises: as `ScoringSession.collect`. A checkpoint then saves the position of the stream before the step.
    """
    feed.cursor = feed.cursor or feed.stream.state_dict()
    rollout = feed.recipe.rollout
    count, limit, max_open = rollout.prompts_per_step, feed.longest_response, generator.max_open
    # A rank alone hands everything to its engine at once.
    room = None if max_open is None or feed.world.size == 1 else max(1, max_open // rollout.samples_per_prompt)
    collected = Collected(feed.encode_again, feed.encode_tail, feed.encode_changed)
    draws = passed = 0
    # One draw without a filter. With one, each further draw has as many prompts as are still missing.
    while passed < count and draws < (algorithm.filter_tries if algorithm.filter != "none" else 1):
        drawn = ahead.drawn if ahead is not None else feed.draw(count - passed)
        own: list[Prompt | None] = ahead.own if ahead is not None else [None] * len(drawn)
        queue = ahead.queue if ahead is not None else PromptQueue(len(drawn), feed.world, f"{step}/{draws}", room)
        # "rollout" includes the rewards that are scored meanwhile, "reward" is the wait for the others.
        with feed.scoring(strict=strict) as session:
            if ahead is not None:
                collected.metrics["rollout/version_lag"] = step - ahead.version
                rollouts = ahead.rollouts
                with clock("reward"):
                    for index, one in enumerate(rollouts):
                        submit(session, index, one)
            else:
                with clock("encode"):
                    encoded = _encode(feed, drawn, queue, own, step)
                    first = list(islice(encoded, room))  # the others are encoded when the engine has room for them
                with clock("rollout"):
                    rollouts = _sample(feed, generator, chain(first, encoded), room, session, len(drawn), step, show)
            with clock("reward"):
                # This rank's groups -> the groups of all ranks, in the order of the draw.
                groups = join_groups(queue, scored_groups(session, rollouts))
            collected.add_wait(session)
        collected.groups += groups
        collected.prompts += own
        collected.seconds += rollouts[0].seconds if rollouts else 0.0
        collected.owners += [i % feed.world.size for i in range(len(drawn))]
        passed += count if algorithm.filter == "none" else sum(has_spread(g, algorithm, limit) for g in groups)
        draws += 1
    if algorithm.filter != "none":
        collected.metrics |= {"rollout/draws": draws, "rollout/prompts_passed": passed}
    if algorithm.advantage == "greedy":
        collected.greedy = _greedy_scores(feed, generator, collected, clock, step=step, strict=strict)
        scores = [score for score in collected.greedy if score is not None]
        collected.metrics |= {"reward/greedy_mean": fmean(scores)} if scores else {}
    if feed.demonstrate is not None:
        with clock("reward"):
            feed.demonstrate(collected, step, strict)
    return collected


def _encode(
    feed: PromptFeed, drawn: Sequence[Drawn], queue: PromptQueue, own: list[Prompt | None], step: int
) -> Iterator[Prompt]:
    """Yield the prompts of this rank's part of a draw, encoded as they are taken, and enter them in `own`."""
    for index in queue:
        own[index] = prompt = feed.hint(feed.encode(*drawn[index]), step)
        yield prompt


def _sample(
    feed: PromptFeed,
    generator: Generator,
    prompts: Iterable[Prompt],
    room: int | None,
    session: ScoringSession,
    total: int,
    step: int,
    show: Callable[[int, int], None],
) -> list[Rollout]:
    """Sample the responses to this rank's prompts and begin to score them. Return them in the order of the prompts.

    Args:
        room: number of groups that are open at the same time; None = all.
        total: number of prompts on all ranks, for the progress.
    """
    recipe = feed.recipe
    count = recipe.rollout.samples_per_prompt
    done, responses = 0, total * count

    def finished(newly: int) -> None:
        nonlocal done
        done += newly * feed.world.size  # assumes that the other ranks are as fast as this one
        show(min(done, responses), responses)

    return sample_scored(
        generator,
        prompts,
        feed.sampling,
        session,
        num_samples=count,
        run_seed=recipe.train.seed,
        version=step,
        room=room,
        progress=finished,
    )


def _greedy_scores(
    feed: PromptFeed, generator: Generator, collected: Collected, clock: Clock, *, step: int, strict: bool
) -> list[float | None]:
    """Return the score of one greedy answer to each prompt; None where its reward failed.

    The answers are neither trained on nor kept.
    """
    params = replace(feed.sampling, temperature=0.0, top_p=1.0, top_k=0)
    sampled = collected.sampled()
    with feed.scoring(strict=strict) as session:
        with clock("rollout"):
            rollouts = sample_scored(
                generator,
                [prompt for _, prompt in sampled],
                params,
                session,
                num_samples=1,
                run_seed=feed.recipe.train.seed,
                version=step,
            )
        with clock("reward"):
            scores = [group.samples[0].score for group in scored_groups(session, rollouts)]
        collected.add_wait(session)
    with clock("reward"):
        own_scores = {
            i: None if score.error is not None else score.value for (i, _), score in zip(sampled, scores, strict=True)
        }
        # {group: score} of this rank -> of all ranks
        score_of_group = {i: value for of_rank in feed.world.gather(own_scores) for i, value in of_rank.items()}
    return [score_of_group[i] for i in range(len(collected.groups))]


def assign_credit(
    learner: Learner,
    collected: Collected,
    algorithm: Algorithm,
    kl_coef: float,
    clock: Clock,
    weights: Mapping[str, Weights],
) -> Before:
    """Give every sample of the step its advantage, and its value targets where there is a critic.

    Args:
        collected: the scored groups; their advantages and metrics are added in place.
        kl_coef: weight of the KL in the reward; 0 = it is in the loss, or off.
        weights: source -> weights of the parts of its reward.
    Returns: the token statistics from before the first update.
    """
    before, penalties, values, energies = Before(), None, None, None
    if kl_coef > 0 or algorithm.needs_critic or algorithm.needs_energy or algorithm.teacher == "reward":
        with clock("update"):
            before = _run_models(learner, collected, algorithm, with_kl=kl_coef > 0)
        if kl_coef > 0:
            # Each token's KL, times the coefficient, is subtracted from its reward.
            penalties = by_sample(collected.groups, before.kl, kl_coef)
            collected.metrics |= {"policy/kl_in_reward": float(_concatenated(before.kl).mean())} if before.kl else {}
        if algorithm.needs_critic:
            values = by_sample(collected.groups, before.value)
        if algorithm.needs_energy:
            energies = by_sample(collected.groups, before.energy)
    collected.groups = add_credit(
        collected.groups,
        algorithm,
        collected.solved,
        max_tokens=learner.longest_response,
        weights=weights,
        greedy=collected.greedy,
        penalties=penalties,
        values=values,
        energies=energies,
    )
    if algorithm.teacher == "reward":
        ratios = {i: logp - before.logp[i] for i, logp in before.teacher.items()}
        collected.groups = add_gains(collected.groups, by_sample(collected.groups, ratios, algorithm.teacher_coef))
        collected.metrics |= {"policy/teacher_ratio": float(_concatenated(ratios).mean())} if ratios else {}
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
        tail_of=collected.tail_of,
        ready=partial(collected.fetch_images, learner.world),
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
        return _statistics(learner, batches, algorithm, with_kl, groups.__getitem__, tokens_per_row)

    return learner.in_rows(passes)


def _statistics(
    learner: Learner,
    batches: Sequence[StepBatch],
    algorithm: Algorithm,
    with_kl: bool,
    group_of: Callable[[int], Group],
    tokens_per_row: int,
) -> Before:
    """Return the token statistics of all trajectories in the batches, merged over all ranks."""
    policy, reference, before = learner.policy, learner.reference, Before()
    into = {"logp": before.logp} | ({"value": before.value} if algorithm.needs_critic else {})
    into |= {"energy": before.energy} if algorithm.needs_energy else {}
    for batch in batches:
        if algorithm.teacher == "reward" and learner.teacher is not None:
            before.teacher |= learner.teacher.logps(batch, group_of, tokens_per_row)
        if not with_kl:
            fill_stats(policy, batch, into, tokens_per_row)
            continue
        assert reference is not None
        if algorithm.kl == "full":
            fill_reference(reference, batch, tokens_per_row)
            fill_stats(policy, batch, into | {"kl": before.kl}, tokens_per_row)
            batch.reference = None  # large: [tokens, D] per trajectory
        else:
            fill_stats(policy, batch, into, tokens_per_row)
            fill_logps(reference, batch, batch.ref_logp, tokens_per_row)
            estimate = KL_LOSSES[algorithm.kl]
            before.kl |= {i: estimate(before.logp[i], ref_logp) for i, ref_logp in batch.ref_logp.items()}
    return before.joined(learner.world)


def by_sample(groups: Sequence[Group], values: Mapping[int, torch.Tensor], factor: float = 1.0) -> list[list[Array]]:
    """Return `factor` times the values of each sample of each group.

    Args:
        values: index of a trajectory in the step -> its values, [trained tokens].
    Returns: group -> sample -> float64 [trained tokens]; zeros for a sample without values.
    """
    # Index of each group's first trajectory in the step: trajectories are numbered through all groups.
    starts = np.cumsum([0] + [len(g.everything) for g in groups])[:-1]
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
    samples = [s for g in groups for s in g.everything]
    targets = {i: torch.tensor(s.value_targets) for i, s in enumerate(samples) if s.value_targets is not None}
    if not targets:
        return {}
    estimates = _concatenated({i: values[i] for i in targets})
    explained = explained_variance(estimates, _concatenated(targets))
    metrics = {"value/mean": float(estimates.mean())}
    return metrics if explained is None else metrics | {"value/explained_variance": explained}


def _concatenated(values: Mapping[int, torch.Tensor]) -> Array:
    return torch.cat(list(values.values())).double().cpu().numpy()
