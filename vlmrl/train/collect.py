"""First part of a step of reinforcement learning: prompts -> rollouts -> scores."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from statistics import fmean

from vlmrl.algo.algorithms import Algorithm
from vlmrl.model.packing import PromptTokens
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Deal, Prompt, Rollout, has_spread, requests_for, rollouts_of
from vlmrl.rollout.scoring import Scoring, sample_scored
from vlmrl.train.prompt_feed import Drawn, PromptFeed
from vlmrl.train.step_batch import Tail
from vlmrl.train.step_metrics import Clock
from vlmrl.types import Group, Row, Sample, ScoredSample


@dataclass
class Collected:
    """Scored groups of a step, of all ranks. Each rank has encoded only the prompts that it sampled.

    A prompt that another rank's engine has taken over is encoded again where it is trained on. So the deal of the
    update does not depend on the time.

    Args:
        encode: encodes the prompt of a row (with its occurrence) that another rank has sampled.
        encode_tail: encodes the images within a response.
        groups: the groups of the step, with their advantages once these are known.
        prompts: the prompt of each group; None = only another rank has encoded it.
        owners: the rank to which each prompt was dealt.
        greedy: the score of one greedy answer to each prompt, None where its reward failed; None = not sampled.
        metrics: metrics that only sampling can measure.
        seconds: duration of sampling, in seconds.
    """

    encode: Callable[[Row, int], Prompt]
    encode_tail: Callable[[ScoredSample], Tail]
    groups: list[Group] = field(default_factory=list)
    prompts: list[Prompt | None] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    greedy: list[float | None] | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

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


@dataclass
class Ahead:
    """Prompts of the next step, which the engine GPUs answer during this step's update.

    Args:
        engine: the engine; it works alone.
        requests: id of each request -> index among this rank's prompts.
        drawn: all rows of the draw.
        own: one entry per drawn row: this rank's prompt, or None where another rank answers.
        deal: the fixed deal of the rows to the ranks.
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
    deal: Deal
    cursor: Mapping[str, object]
    version: int
    started: float
    samples: dict[int, list[Sample]] = field(default_factory=dict)
    rollouts: list[Rollout] = field(default_factory=list)

    def take(self, timeout: float | None) -> None:
        """Let the engine begin, and take the answers that are complete after at most `timeout` seconds."""
        self.samples |= {self.requests[number]: samples for number, samples in self.engine.poll(timeout)}

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
    deal = Deal(len(drawn), feed.world)
    with clock("encode"):
        prompts = list(_encode(feed, drawn, deal, own))
    requests = requests_for(prompts, recipe.rollout.samples_per_prompt, recipe.train.seed, step)
    numbers = {engine.submit(request, feed.sampling): index for index, request in enumerate(requests)}
    ahead = Ahead(engine, numbers, drawn, own, deal, cursor, engine.version, time.perf_counter())
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
    `Deal`. The scored groups, without pixels, go to all ranks.

    With the filter "spread", prompts whose scores are too close are replaced by new ones, in at most `filter_tries`
    draws. The refused groups stay among the results: they are recorded, counted in the metrics, and get zero advantage.

    Args:
        feed: the source of the prompts.
        generator: the engine.
        algorithm: the row of the algorithm table.
        clock: the clock of the step.
        step: the step; equal to the policy version that samples, unless `ahead` has the answers.
        strict: whether a bug in a reward raises, see `Scoring`.
        ahead: answers that were sampled during the previous step; None = sample now.
        show: called with (responses sampled so far, their total).
    Raises: as `Outages.finish`. The position of the stream that a checkpoint saves is then that before the step.
    """
    feed.cursor = feed.cursor or feed.stream.state_dict()
    feed.outages.seconds = 0.0
    rollout = feed.recipe.rollout
    count, limit, max_open = rollout.prompts_per_step, rollout.max_new_tokens, generator.max_open
    # A rank alone hands everything to its engine at once.
    room = None if max_open is None or feed.world.size == 1 else max(1, max_open // rollout.samples_per_prompt)
    collected = Collected(feed.encode_again, feed.encode_tail)
    draws = passed = 0
    # One draw without a filter. With one, each further draw has as many prompts as are still missing.
    while passed < count and draws < (algorithm.filter_tries if algorithm.filter != "none" else 1):
        drawn = ahead.drawn if ahead is not None else feed.draw(count - passed)
        own: list[Prompt | None] = ahead.own if ahead is not None else [None] * len(drawn)
        deal = ahead.deal if ahead is not None else Deal(len(drawn), feed.world, f"{step}/{draws}", room)
        # "rollout" includes the rewards that are scored meanwhile, "reward" is the wait for the others.
        with feed.outages.scoring(feed.scorers, strict=strict) as scoring:
            if ahead is not None:
                collected.metrics["rollout/version_lag"] = step - ahead.version
                seconds = ahead.rollouts[0].seconds if ahead.rollouts else 0.0
                with clock("reward"):
                    scoring.submit_all(ahead.rollouts)
            else:
                with clock("encode"):
                    encoded = _encode(feed, drawn, deal, own)
                    first = list(islice(encoded, room))  # the others are encoded when the engine has room for them
                with clock("rollout"):
                    seconds = _sample(feed, generator, chain(first, encoded), room, scoring, len(drawn), step, show)
            with clock("reward"):
                # This rank's groups -> the groups of all ranks, in the order of the draw.
                groups = deal.join(feed.outages.finish(scoring, seconds))
        collected.groups += groups
        collected.prompts += own
        collected.seconds += seconds if any(own) else 0.0
        collected.owners += [i % feed.world.size for i in range(len(drawn))]
        passed += sum(has_spread(g, algorithm, limit) for g in groups)
        draws += 1
    if algorithm.filter != "none":
        collected.metrics |= {"rollout/draws": draws, "rollout/prompts_passed": passed}
    if algorithm.advantage == "greedy":
        collected.greedy = _greedy_scores(feed, generator, collected, clock, step=step, strict=strict)
        scores = [score for score in collected.greedy if score is not None]
        collected.metrics |= {"reward/greedy_mean": fmean(scores)} if scores else {}
    if feed.outages.seconds:
        collected.metrics["reward/outage_seconds"] = feed.outages.seconds
    return collected


def _encode(feed: PromptFeed, drawn: Sequence[Drawn], deal: Deal, own: list[Prompt | None]) -> Iterator[Prompt]:
    """Yield the prompts of this rank's part of a draw, encoded as they are taken, and enter them in `own`."""
    for index in deal:
        own[index] = prompt = feed.encode(*drawn[index])
        yield prompt


def _sample(
    feed: PromptFeed,
    generator: Generator,
    prompts: Iterable[Prompt],
    room: int | None,
    scoring: Scoring,
    total: int,
    step: int,
    show: Callable[[int, int], None],
) -> float:
    """Sample the responses to this rank's prompts and begin to score them. Return the seconds of the sampling.

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
        scoring,
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
    with feed.outages.scoring(feed.scorers, strict=strict) as scoring:
        with clock("rollout"):
            sample_scored(
                generator,
                [prompt for _, prompt in sampled],
                params,
                scoring,
                num_samples=1,
                run_seed=feed.recipe.train.seed,
                version=step,
            )
        with clock("reward"):
            scores = [g.samples[0].score for g in feed.outages.finish(scoring)]
    with clock("reward"):
        own_scores = {
            i: None if score.error is not None else score.value for (i, _), score in zip(sampled, scores, strict=True)
        }
        # {group: score} of this rank -> of all ranks
        score_of_group = {i: value for of_rank in feed.world.gather(own_scores) for i, value in of_rank.items()}
    return [score_of_group[i] for i in range(len(collected.groups))]
