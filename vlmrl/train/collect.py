"""The first half of a step of reinforcement learning: prompts -> rollouts -> scores -> advantages."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import torch

from vlmrl.algo.advantages import Array
from vlmrl.algo.family import Algorithm
from vlmrl.algo.kl import ESTIMATORS as KL_ESTIMATORS
from vlmrl.algo.returns import explained_variance
from vlmrl.data.encode import Encoder
from vlmrl.data.images import decode_image
from vlmrl.data.packing import PromptTokens
from vlmrl.dist.world import World
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import (
    Prompt,
    Rollout,
    add_advantages,
    encode_prompt,
    has_spread,
    mark_masked,
    requests_for,
    rollouts_of,
    sample_rollouts,
    score_rollouts,
)
from vlmrl.rollout.vllm.hosted_engine import HostedEngine
from vlmrl.setup.model import sampling_params
from vlmrl.tasks.source import Source
from vlmrl.train.batches import Tail, split_updates, step_batch
from vlmrl.train.device_sums import on_cpu
from vlmrl.train.loop import Clock
from vlmrl.train.out_of_memory import in_rows
from vlmrl.train.state import Session, draw_rows
from vlmrl.train.step import StepBatch
from vlmrl.train.update import fill_logps, fill_reference, fill_stats
from vlmrl.types import Group, Row, ScoredSample

Drawn = tuple[Source, Row, int]
"""A row of the stream: its source, itself, how often it was drawn before."""


@dataclass
class Before:
    """What the models said before the first update. By trajectory of the step, one value a trained token; {} = unasked.

    Args: logp, value: the policy's.      kl: the policy to the reference, by the row's estimator.
    """

    logp: dict[int, torch.Tensor] = field(default_factory=dict)
    value: dict[int, torch.Tensor] = field(default_factory=dict)
    kl: dict[int, torch.Tensor] = field(default_factory=dict)

    def joined(self, world: World) -> Before:
        """That of all processes, each having looked at its own trajectories."""
        if world.size == 1:
            return self
        given = world.gather([on_cpu(found) for found in (self.logp, self.value, self.kl)])
        return Before(*({i: found[k][i] for found in given for i in found[k]} for k in range(3)))


@dataclass
class Collected:
    """What a step has to learn from, of all processes: each has all groups, but encoded only the prompts it sampled.

    Args:
        prompts: of each group; None = another process has it.      owners: the process that sampled each group.
        metrics: numbers that only sampling knows.      seconds: of sampling.
    """

    groups: list[Group] = field(default_factory=list)
    prompts: list[Prompt | None] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    before: Before = field(default_factory=Before)
    seconds: float = 0.0

    def sampled(self) -> list[tuple[int, Prompt]]:
        """(index of its group, prompt) of those that this process has encoded."""
        return [(i, prompt) for i, prompt in enumerate(self.prompts) if prompt is not None]


@dataclass
class Ahead:
    """The next step's prompts, which engines on GPUs of their own answer while this step's update runs.

    Args:
        drawn, own: all rows of the draw, and this process's prompts among them.
        cursor: of the stream before the draw: what a checkpoint saves, since a resumed run draws them again.
        version: of the weights that answer.      rollouts: [] until `finish`.
    """

    engine: HostedEngine
    drawn: Sequence[Drawn]
    own: list[Prompt | None]
    cursor: Mapping[str, Any]
    version: int
    started: float
    rollouts: list[Rollout] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for the answers."""
        prompts = [p for p in self.own if p is not None]
        answers = self.engine.answers()
        self.rollouts = rollouts_of(prompts, answers, time.perf_counter() - self.started, self.version)


def look_ahead(session: Session, engine: HostedEngine, clock: Clock) -> Ahead:
    """Draw the next step's prompts and let the engines begin on them with the weights they have."""
    s, recipe = session, session.recipe
    cursor = s.stream.state_dict()
    drawn, own = _draw(s, recipe.rollout.prompts_per_step, clock)
    prompts = [p for p in own if p is not None]
    step = s.progress.step + 1
    engine.ask(
        requests_for(prompts, recipe.rollout.samples_per_prompt, recipe.train.seed, step),
        sampling_params(recipe, s.policy, s.processor.tokenizer),
    )
    return Ahead(engine, drawn, own, cursor, engine.version, time.perf_counter())


def collect(
    session: Session, generator: Generator, algorithm: Algorithm, kl_coef: float, clock: Clock, *, strict: bool,
    ahead: Ahead | None = None,
) -> Collected:  # fmt: skip
    """Sample and score the prompts of a step, and turn the scores into advantages. Prompt i of a draw is answered by
    process i mod their number; what comes of it, pixels aside, goes to all.

    With the filter "spread", prompts whose scores are too close are replaced by new ones, in at most `filter_tries`
    draws; the refused groups are kept among the results (recorded, in the metrics) with zero advantage.

    Args:
        kl_coef: weight of the KL in the reward; 0 = it is in the loss, or off.
        strict: as `score_rollouts`.      ahead: what was sampled already.
    """
    s, wanted, limit = session, session.recipe.rollout.prompts_per_step, session.recipe.rollout.max_new_tokens
    made = Collected()
    draws = passed = 0
    while passed < wanted and draws < (algorithm.filter_tries if algorithm.filter != "none" else 1):
        if ahead is not None:
            drawn, own, rollouts = ahead.drawn, ahead.own, ahead.rollouts
            made.metrics["rollout/version_lag"] = s.progress.step - ahead.version
        else:
            drawn, own = _draw(s, wanted - passed, clock)
            with clock("rollout"):
                rollouts = _sample(s, generator, [p for p in own if p is not None], len(drawn))
        with clock("reward"):
            groups = s.world.interleave(score_rollouts(rollouts, s.scorers, strict=strict))
        made.groups += groups
        made.prompts += own
        made.seconds += rollouts[0].seconds if rollouts else 0.0
        made.owners += [i % s.world.size for i in range(len(drawn))]
        passed += sum(has_spread(g, algorithm, limit) for g in groups)
        draws += 1
    if algorithm.filter != "none":
        made.metrics |= {"rollout/draws": draws, "rollout/prompts_passed": passed}
    greedy = None
    if algorithm.advantage == "greedy":
        greedy = _greedy_scores(s, generator, made, clock, strict)
        found = [g for g in greedy if g is not None]
        made.metrics |= {"reward/greedy_mean": fmean(found)} if found else {}
    penalties = values = None
    if kl_coef > 0 or algorithm.needs_critic:
        with clock("update"):
            made.before = in_rows(s, partial(_before, s, made, algorithm, kl_coef > 0))
        if kl_coef > 0:
            penalties = _by_sample(made.groups, made.before.kl, kl_coef)
            made.metrics |= {"policy/kl_in_reward": float(_joined(made.before.kl).mean())} if made.before.kl else {}
        if algorithm.needs_critic:
            values = _by_sample(made.groups, made.before.value)
    weights = {source.name: source.weights for source in s.sources}
    made.groups = add_advantages(
        made.groups, algorithm, max_tokens=limit, weights=weights, greedy=greedy, penalties=penalties, values=values
    )
    if algorithm.needs_critic:
        made.metrics |= _critic_metrics(made)
    return made


def batch_of(
    session: Session, made: Collected, groups: Sequence[Group], *, keep_dead: bool, count_dead: bool = False,
    updates: int = 1,
) -> StepBatch:  # fmt: skip
    """What this process trains on of `groups`, which are the step's with whatever was added to them."""

    def prompt_of(index: int) -> PromptTokens:
        found = made.prompts[index]
        if found is None:  # another process sampled it, which has more to train on: pixels do not travel, rows do
            row, occurrence = groups[index].row, groups[index].trajectories[0].occurrence
            source = next(x for x in session.sources if x.name == row.source)
            found = encode_prompt(source, row, occurrence, session.encoder, session.recipe.rollout.max_prompt_tokens)
            made.prompts[index] = found
        return PromptTokens.of(found.encoded)

    return step_batch(
        groups, prompt_of, tail_of=partial(tail_of, session.encoder), keep_dead=keep_dead, count_dead=count_dead,
        updates=updates, owners=made.owners, world=session.world, filler=session.filler,
    )  # fmt: skip


def tail_of(encoder: Encoder, sample: ScoredSample) -> Tail:
    """The images within a response, as the model takes them."""
    media = [m for segment in sample.trajectory.segments for m in segment.media]
    images = [decode_image(sample.files[m.sha256]) for m in media]
    place = f"the response to {sample.trajectory.prompt_id}, sample {sample.trajectory.sample}"
    return encoder.encode_tail(sample.trajectory.response_ids, media, images, place)


def _draw(session: Session, count: int, clock: Clock) -> tuple[Sequence[Drawn], list[Prompt | None]]:
    """The next rows of the stream, and those that this process answers encoded, in their places."""
    s, limit = session, session.recipe.rollout.max_prompt_tokens
    drawn = draw_rows(s, count)
    own: list[Prompt | None] = [None] * len(drawn)
    with clock("encode"):
        for i in s.world.mine(len(drawn)):
            source, row, occurrence = drawn[i]
            own[i] = encode_prompt(source, row, occurrence, s.encoder, limit)
    return drawn, own


def _sample(session: Session, generator: Generator, prompts: Sequence[Prompt], total: int) -> list[Rollout]:
    """Answers to this process's prompts, of `total` that all have."""
    s, recipe = session, session.recipe
    count = recipe.rollout.samples_per_prompt
    return sample_rollouts(
        generator, prompts, sampling_params(recipe, s.policy, s.processor.tokenizer), num_samples=count,
        run_seed=recipe.train.seed, version=s.progress.step, progress=_progress(s, total * count),
    )  # fmt: skip


def _greedy_scores(
    session: Session, generator: Generator, made: Collected, clock: Clock, strict: bool
) -> list[float | None]:
    """The score of one greedy answer to each prompt; None where its reward failed. It is not trained on, nor kept."""
    s, recipe = session, session.recipe
    params = replace(sampling_params(recipe, s.policy, s.processor.tokenizer), temperature=0.0, top_p=1.0, top_k=0)
    sampled = made.sampled()
    with clock("rollout"):
        answers = sample_rollouts(
            generator, [prompt for _, prompt in sampled], params, num_samples=1, run_seed=recipe.train.seed,
            version=s.progress.step,
        )  # fmt: skip
    with clock("reward"):
        scores = [g.samples[0].score for g in score_rollouts(answers, s.scorers, strict=strict)]
        own = {
            i: None if score.error is not None else score.value
            for (i, _), score in zip(sampled, scores, strict=True)
        }  # fmt: skip
        found = {i: value for theirs in s.world.gather(own) for i, value in theirs.items()}
    return [found[i] for i in range(len(made.groups))]


def _before(session: Session, made: Collected, algorithm: Algorithm, with_kl: bool, tokens_per_row: int) -> Before:
    """One pass of the policy over the step's trajectories for all that is asked of it, and one of the reference.

    With a critic the rows are those that the updates will have (a filter's refused groups aside): the first of several
    then has ratios of exactly 1, in bfloat16 too.
    """
    s, before = session, Before()
    critic = algorithm.needs_critic
    groups = mark_masked(made.groups, algorithm) if critic else made.groups
    updates = s.recipe.train.updates_per_step if critic else 1
    wanted = {"logp": before.logp} | ({"value": before.value} if critic else {})
    for batch in split_updates(batch_of(s, made, groups, keep_dead=True, updates=updates)):
        if not with_kl:
            fill_stats(s.policy, batch, wanted, tokens_per_row)
            continue
        assert s.reference is not None
        if algorithm.kl == "full":
            fill_reference(s.reference, batch, tokens_per_row)
            fill_stats(s.policy, batch, wanted | {"kl": before.kl}, tokens_per_row)
            batch.ref_hidden.clear()
        else:
            fill_stats(s.policy, batch, wanted, tokens_per_row)
            fill_logps(s.reference, batch, batch.ref_logp, tokens_per_row)
            estimate = KL_ESTIMATORS[algorithm.kl]
            before.kl |= {i: estimate(before.logp[i], theirs) for i, theirs in batch.ref_logp.items()}
    return before.joined(s.world)


def _by_sample(groups: Sequence[Group], found: dict[int, torch.Tensor], factor: float = 1.0) -> list[list[Array]]:
    """`factor` times what was said of each sample of each group, float64 [tokens]; zeros where nothing was."""
    starts = np.cumsum([0] + [len(g.samples) for g in groups])[:-1]
    found = on_cpu(found)
    return [
        [
            factor * found[first + k].double().numpy()
            if first + k in found
            else np.zeros(sample.trajectory.num_trained_tokens)
            for k, sample in enumerate(group.samples)
        ]
        for first, group in zip(starts.tolist(), groups, strict=True)
    ]


def _critic_metrics(made: Collected) -> dict[str, float]:
    """Over all trained tokens: the mean value, and how well the values foretold their targets (if these differ)."""
    samples = [s for g in made.groups for s in g.samples]
    targets = {i: torch.tensor(s.value_targets) for i, s in enumerate(samples) if s.value_targets is not None}
    if not targets:
        return {}
    values = _joined({i: made.before.value[i] for i in targets})
    explained = explained_variance(values, _joined(targets))
    metrics = {"value/mean": float(values.mean())}
    return metrics if explained is None else metrics | {"value/explained_variance": explained}


def _joined(found: dict[int, torch.Tensor]) -> Array:
    return torch.cat(list(found.values())).double().cpu().numpy()


def _progress(session: Session, total: int):
    """Tells how much of `total` is done, taking the other processes for as fast as this one."""
    done = 0

    def finished(count: int) -> None:
        nonlocal done
        done += count * session.world.size
        session.watcher.generated(min(done, total), total)

    return finished
