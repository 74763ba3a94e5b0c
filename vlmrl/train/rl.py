"""Reinforcement learning: the step loop of the GRPO family. One pass of the loop makes one new policy version.

A step: `collect` (prompts -> rollouts -> scores), `assign_credit` (scores -> advantages), `learn` (updates of the
weights), sync of the engine, metrics; then a validation and a checkpoint if they are due. After every sync, the trainer
computes the log-probs of what the engine samples with its new weights. Failed rewards are counted, and stop the run
when they are more than 1% of the samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from statistics import fmean, median
from typing import Any

import torch

from vlmrl.algo.algorithms import Algorithm, algorithm_of
from vlmrl.algo.credit import next_kl_coef
from vlmrl.dist import world
from vlmrl.errors import EngineError, RewardError
from vlmrl.model.packing import PromptTokens, TrainItem
from vlmrl.rewards.attempts import outage_words
from vlmrl.rewards.base import ABSENT, NOT_FINITE
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.sample import Prompt, Rollout, sample_rollouts
from vlmrl.setup.model import make_generator
from vlmrl.tasks.source import Source, accuracy_metrics, accuracy_text, pooled_metrics
from vlmrl.train.checkpointing import save
from vlmrl.train.collect import Collected, PromptFeed, assign_credit, batch_of, collect, look_ahead
from vlmrl.train.journal import (
    Clock,
    Health,
    Journal,
    Progress,
    group_metrics,
    memory_metrics,
    rollout_speed,
    sync_speed,
)
from vlmrl.train.learner import Learner, keep_batches, learning_rate
from vlmrl.train.loop import after_step, catch_interrupt, end, leaving_steps, stop_reason, validate_at_start
from vlmrl.train.perception import masked_prompts, measure_dependency, token_weights
from vlmrl.train.rehearsal import heaviest_rows, rehearse
from vlmrl.train.session import Session
from vlmrl.train.step_batch import Before, StepBatch, nothing, split_updates
from vlmrl.train.update import PolicyGradient, fill_logps, fill_reference, objective_of, update
from vlmrl.types import Group, Row, SamplingParams, Score, ScoredSample, Segment, hash64, name_row
from vlmrl.untrusted import number_of

MAX_ERROR_SHARE = 0.01
"""Maximum share of an attempt's samples whose reward may fail. Above it the run saves and stops."""
MIN_SAMPLES_FOR_SHARE = 200
"""Minimum number of samples that the share is taken of: a single failure must not end a young run."""


def count_failures(journal: Journal, groups: Sequence[Group], save: Callable[[], None]) -> None:
    """Count the failed rewards of a step, and tell the user about them and about services that were down.

    Args:
        save: saves a checkpoint and returns when it is complete; called before anything is raised.
    Raises: RewardError when over 1% of this attempt's samples failed.
    """
    progress, run, say = journal.progress, journal.run, journal.watcher.message
    unavailable = [x for g in groups for x in g.samples if x.score.status == "unavailable"]
    if unavailable:
        say(outage_words((x.score.error or "" for x in unavailable), len(unavailable), _left_out(unavailable)))
    failed = [x for g in groups for x in g.samples if x.score.failed]
    progress.samples += sum(len(g.samples) for g in groups)
    progress.reward_errors += len(failed)
    samples_before, errors_before = journal.counted_before
    samples, errors = progress.samples - samples_before, progress.reward_errors - errors_before
    share = errors / max(samples, MIN_SAMPLES_FOR_SHARE)
    if failed:
        first = _last_line(failed[0].score.error)
        reason = f": {first}" if first else ""
        places = _places(groups, lambda score: score.failed)
        say(f"the reward failed for {number_of(len(failed), 'sample')}{_left_out(failed)}{reason} ({places})")
    for sign, effect in ((NOT_FINITE, ": it is left out of the means"), (ABSENT, "")):
        if sign not in journal.warned and (places := _places(groups, lambda score: sign in score.note)):  # noqa: B023
            note = next(x.score.note for g in groups for x in g.samples if sign in x.score.note)
            say(f"warning: {note}{effect} ({places}; later ones are not named)")
            journal.warned.add(sign)
    if share > MAX_ERROR_SHARE:
        save()
        raise RewardError(
            f"the reward failed for {errors} of {samples} samples: the run stops",
            where=str(run.dir),
            hint="a checkpoint was saved; fix the reward"
            f" (`vlmrl reward-check {run.id}` shows the rows), then continue with --resume",
        )


def _left_out(samples: Sequence[ScoredSample]) -> str:
    return f", which {'was' if len(samples) == 1 else 'were'} left out"


SHOWN = 3
"""Maximum number of samples that a line names."""


def _places(groups: Sequence[Group], chosen: Callable[[Score], bool]) -> str:
    """Return the names of the first samples with such a score: `row 12 of shapes, sample 0; ...`."""
    samples = [(g.row, x.trajectory.sample) for g in groups for x in g.samples if chosen(x.score)]
    names = [name_row(row.source, row.prompt_id, sample) for row, sample in samples]
    return "; ".join(names[:SHOWN]) + (f"; and {len(names) - SHOWN:,} more" if len(names) > SHOWN else "")


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]


SYNC_PROMPTS, SYNC_TOKENS = 4, 16
"""Size of the check per engine: number of prompts, and maximum number of tokens per response."""
FEWEST_TOKENS = 8
"""Minimum number of tokens to judge an engine by its own tokens: a single one may differ for a good reason."""


@dataclass(frozen=True)
class EngineGap:
    """Difference between one rank's engine and the trainer.

    Args:
        gaps: |trainer's - engine's log-prob| of each token, in nats.
        rows: names of the dataset rows that were answered.
    """

    gaps: tuple[float, ...]
    rows: tuple[str, ...] = ()


def check_sync(
    learner: Learner, generator: Generator, prompts: Sequence[Prompt], params: SamplingParams, version: int
) -> dict[str, float]:
    """Compare the engines' log-probs with the trainer's.

    All ranks call this, each with its own prompts (possibly none), and all come to the same result.

    Args:
        prompts: prompts of this rank; the first `SYNC_PROMPTS` are answered.
        params: sampling parameters of training; top-p and top-k are switched off here.
    Returns: `policy/sync_gap_median`, `policy/sync_gap_mean` and `policy/sync_gap_max` over the tokens of all ranks, in
        nats; {} for an engine without weights of its own.
    Raises: EngineError, on all ranks, when an engine is off; see `engines_off`.
    """
    world, recipe = learner.world, learner.recipe
    if not generator.copies_weights:
        return {}
    params = replace(params, max_new_tokens=min(SYNC_TOKENS, params.max_new_tokens), top_p=1.0, top_k=0)
    answers = sample_rollouts(
        generator,
        prompts[:SYNC_PROMPTS],
        params,
        num_samples=1,
        run_seed=hash64(recipe.train.seed, "sync"),
        version=version,
    )
    engines = world.gather(_measure(learner, answers))
    off = engines_off(engines, recipe.rollout.max_sync_gap)
    metrics = gap_metrics(engines)
    if off:
        rank_text = "" if world.size == 1 else f" of process {', '.join(map(str, off))}"
        raise EngineError(
            f"after the sync of version {version} the log-probs of the engine{rank_text} differ from the trainer's"
            f" by {metrics['policy/sync_gap_median']:.3g} nats (median; mean {metrics['policy/sync_gap_mean']:.3g}, at"
            f" most {metrics['policy/sync_gap_max']:.3g}); rollout.max_sync_gap is {recipe.rollout.max_sync_gap}",
            where=", ".join(row for rank in off for row in engines[rank].rows),
            hint='try model.dtype = "float32", and look at policy/sampler_gap_mean of the steps before;'
            ' rollout.engine = "torch" continues from the last checkpoint',
        )
    return metrics


def engines_off(engines: Sequence[EngineGap], limit: float) -> list[int]:
    """Return the ranks whose engine has other weights than the trainer; [] = the run may go on.

    An engine is off when the median gap of its own tokens is above the limit. An engine with fewer than `FEWEST_TOKENS`
    tokens is off only if the median over the tokens of all engines is above the limit, too. If only that median is
    above it, all engines with tokens are off.

    The median is used because single tokens can dominate a mean: with routed experts, rounding changes the experts of a
    few tokens now and then.

    Example: limit 0.1, eight tokens each: gaps 0.01 and one of 5 -> []; the second rank 0.5 throughout -> [1].
    """
    gaps = [gap for engine in engines for gap in engine.gaps]
    all_off = bool(gaps) and median(gaps) > limit
    fewest = 1 if all_off else FEWEST_TOKENS
    off = [r for r, engine in enumerate(engines) if len(engine.gaps) >= fewest and median(engine.gaps) > limit]
    return off if off or not all_off else [r for r, engine in enumerate(engines) if engine.gaps]


def gap_metrics(engines: Sequence[EngineGap]) -> dict[str, float]:
    """Return the median, mean and largest gap over all tokens, in nats; all 0 without tokens."""
    gaps = [gap for engine in engines for gap in engine.gaps] or [0.0]
    return {
        "policy/sync_gap_median": median(gaps),
        "policy/sync_gap_mean": fmean(gaps),
        "policy/sync_gap_max": max(gaps),
    }


def _measure(learner: Learner, answers: Sequence[Rollout]) -> EngineGap:
    """Return the gap of this rank's engine: compute the log-probs of its answers under the trainer's weights."""
    batch, engine_logps = StepBatch([], [], [], world=learner.world, filler=learner.filler), []
    for index, answer in enumerate(answers):
        [sample] = answer.samples
        batch.items.append(TrainItem(PromptTokens.of(answer.prompt.encoded), index, sample.parts, index))
        batch.names_S.append(name_row(answer.prompt.source.name, answer.prompt.row.prompt_id))
        engine_logps.append(batch.sampler_logp_of(batch.items[-1]).double())
    trainer_logps: dict[int, torch.Tensor] = {}
    learner.in_rows(partial(fill_logps, learner.policy, batch, trainer_logps))
    gaps = [(trainer_logps[index].cpu() - engine_logp).abs() for index, engine_logp in enumerate(engine_logps)]
    # [tokens] per answer -> one list. NaN has no order: it counts as infinitely far off.
    flat = torch.cat(gaps).nan_to_num(nan=math.inf, posinf=math.inf).tolist() if gaps else []
    return EngineGap(tuple(flat), tuple(batch.names_S))


STRICT_STEPS = 3
"""Number of first steps of an attempt in which a failing reward stops the run and names the row.

Later the sample is masked and counted.
"""
PROOF_CHOICE = 64
"""Number of trajectories of a step from which the proof of a checkpoint is chosen."""


def train_rl(session: Session) -> str:
    """Train until there is a reason to stop: one pass of the loop is one step.

    Returns: the run's status, "done" or "interrupted".
    """
    recipe, learner, feed, journal = session.recipe, session.learner, session.feed, session.journal
    algorithm, progress, optimizer = algorithm_of(recipe.algo), journal.progress, learner.optimizer
    generator = _open_engine(session, algorithm)
    objective, weights = objective_of(recipe, algorithm, 0.0), feed.weights
    first_step, ahead = progress.step, None
    with catch_interrupt(journal.watcher.message) as request, leaving_steps(session, request) as left:
        validate_at_start(session, generator)
        while (reason := stop_reason(journal, recipe, request)) is None:
            step, clock = progress.step, Clock(progress.step)
            # The KL to the reference is a term of the loss or of the reward; the other coefficient is 0.
            kl_coef = algorithm.kl_coef if progress.kl_coef is None else progress.kl_coef
            in_loss, in_reward = (kl_coef, 0.0) if algorithm.kl_in == "loss" else (0.0, kl_coef)

            # Prompts -> rollouts -> scores -> advantages.
            strict, show = step < first_step + STRICT_STEPS, journal.watcher.generated
            collected = collect(feed, generator, algorithm, clock, step=step, strict=strict, ahead=ahead, show=show)
            # `before`: old log-probs, values and KL of all trajectories; empty if the algorithm does not need them now.
            before = assign_credit(learner, collected, algorithm, in_reward, clock, weights)
            objective = replace(objective, kl_coef=in_loss, mu=algorithm.mu_at(step) if algorithm.mu_peak else None)
            before = measure_dependency(learner, collected, objective, before, clock) if algorithm.masks else before
            ahead, feed.cursor = None, None  # used up: a checkpoint saves the stream's own position again
            journal.rollouts.write(step, collected.groups)
            if step == first_step and (note := accuracy_text(collected.groups, feed.sources)):
                journal.watcher.message(note)
            generator.sleep()  # frees its caches for the update
            # With overlap, the engine GPUs sample the next step during this update, with the weights of this step.
            if generator.works_alone and recipe.rollout.overlap and step + 1 < recipe.train.steps:
                ahead = look_ahead(feed, generator, clock, step + 1)
                feed.cursor = ahead.cursor

            # The updates of the step make a new policy version.
            updates_before = optimizer.updates
            with clock("update"):
                meanwhile = nothing if ahead is None else ahead.go_on
                stats, session.saver.proof_items = learn(learner, collected, objective, before, step, meanwhile)
            if ahead is not None:
                with clock("rollout"):
                    ahead.finish()
            if algorithm.kl_target is not None:
                samples = sum(len(g.samples) for g in collected.groups)
                steer_kl(progress, algorithm, kl_coef, collected.metrics | stats, samples)
            progress.step += 1

            # The engine gets the new weights. Its log-probs are then compared with the trainer's.
            with clock("sync"):
                changed = optimizer.updates > updates_before
                generator.load_weights(progress.step, changed=changed)
                prompts = [prompt for _, prompt in collected.sampled()]
                turns = getattr(generator, "inner", generator)  # of episodes, the engine of their turns
                sync = check_sync(learner, turns, prompts, feed.sampling, progress.step) if changed else {}

            metrics = (
                _rollout_metrics(collected.groups, feed, journal.health, algorithm)
                | collected.metrics
                | feed.service_metrics()
                | ({"policy/kl_coef": kl_coef} if kl_coef > 0 else {})
                | stats
                | sync
                | (sync_speed(generator) if changed else {})
                | rollout_speed(collected.groups, collected.seconds)
                | clock.metrics()
                | memory_metrics(learner.policy.device, learner.world)
                | learner.budgets.metrics()
            )
            metrics |= journal.health.warn(step, metrics)
            journal.log(step, "train", metrics)
            journal.watcher.step(step, recipe.train.steps, metrics)
            if recipe.log.sample_every_steps and step % recipe.log.sample_every_steps == 0:
                journal.watcher.sample(step, collected.groups[0])
                journal.loggers.samples(collected.groups, feed.sources)
            # After the step is logged, since it may save a checkpoint and raise.
            count_failures(journal, collected.groups, partial(save, session, wait=True))
            after_step(session, generator)
        return end(session, generator, reason)
    return end(session, generator, left.reason, validates=False)


def _open_engine(session: Session, algorithm: Algorithm) -> Generator:
    """Start the engine, rehearse the largest packed row while it sleeps, and return it with this step's weights."""
    recipe, learner, feed, journal = session.recipe, session.learner, session.feed, session.journal
    run, say, step = journal.run, journal.watcher.message, journal.progress.step
    world.phase("engine start", step)
    generator = make_generator(
        recipe,
        learner.policy,
        feed.encoder,
        session.origin.files,
        say,
        sources=feed.all_sources,
        world=learner.world,
        log=run.process_log,
        pending_bytes=learner.optimizer.pending_bytes(learner.policy.device),
    )
    session.stack.callback(generator.close)
    if (settings := getattr(generator, "settings", None)) is not None:
        automatic = recipe.rollout.kv_cache_gib is None
        run.event(step, "engine cache", bytes=settings.kv_cache_bytes, automatic=automatic)
    keep_batches(learner.budgets, generator)
    generator.load_weights(step)
    if generator.last_sync is not None:
        say(generator.last_sync.text())
        run.event(step, "weight sync", **generator.last_sync.record())
    generator.sleep()  # the rehearsal then has as much memory as an update
    in_loss = algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0
    scan = partial(heaviest_rows, feed, step, lambda drawn: [longest_item(feed, *one, 0) for one in drawn])
    rehearse(learner, objective_of(recipe, algorithm, in_loss), scan, step, run, say)
    generator.load_weights(step, changed=False)  # wakes it
    return generator


def longest_item(feed: PromptFeed, source: Source, row: Row, occurrence: int, index: int) -> TrainItem:
    """Return a dataset row's prompt with the longest response, for the rehearsal; an episode's has no images.

    The response repeats the prompt's text tokens, without banned ids.
    """
    prompt = PromptTokens.of(feed.encode(source, row, occurrence).encoded)
    banned = feed.sampling.banned_ids
    words = [i for i, kind in zip(prompt.ids, prompt.kinds, strict=True) if not kind and i not in banned]
    ids = tuple(islice(cycle(words), feed.longest_response))
    return TrainItem(prompt, index, (Segment("assistant", ids, True),), index)


def learn(
    learner: Learner,
    collected: Collected,
    objective: PolicyGradient,
    before: Before,
    step: int,
    meanwhile: Callable[[], None] = nothing,
) -> tuple[dict[str, float], list[TrainItem]]:
    """Do all updates of a step.

    Args:
        collected: the step's groups with their advantages.
        step: the step; its learning rate and seeds depend on it.
        meanwhile: called before each packed row.
    Returns: (metrics averaged over the updates, trajectories for the proof of the next checkpoint). The batch and its
        tensors are freed on return.
    """
    batch = _batch_to_learn(learner, collected, objective, before, step)
    batch.meanwhile = meanwhile
    # If all groups of the step are dead, the batch is empty; the proof then takes its trajectories from them.
    items = batch.items or batch_of(learner, collected, collected.groups, keep_dead=True).items
    if learner.teacher is not None and objective.algorithm.teacher == "loss" and batch.updates:
        collected.metrics |= learner.in_rows(partial(learner.teacher.read, batch, collected.groups.__getitem__))
    return _update_all(learner, batch, objective, before, step), items[:PROOF_CHOICE]


def _batch_to_learn(
    learner: Learner, collected: Collected, objective: PolicyGradient, before: Before, step: int
) -> StepBatch:
    """Return the batch of a step's updates, without dead groups unless `PolicyGradient.keeps_dead`."""
    recipe, algorithm = learner.recipe, objective.algorithm
    batch = batch_of(
        learner,
        collected,
        collected.groups,
        keep_dead=objective.keeps_dead,
        count_dead=algorithm.counts_dead,
        updates=recipe.train.updates_per_step,
    )
    batch.seed = hash64(recipe.train.seed, step, "tokens")
    batch.old_value = before.value
    if algorithm.perception == "select":
        for part in split_updates(batch):
            batch.token_weight |= token_weights(algorithm, part, before)
    if algorithm.masks:
        batch.masked_logp |= before.masked
    if algorithm.masks_both:
        batch.masked_prompt = masked_prompts(collected, algorithm)
    return batch


def _update_all(
    learner: Learner, batch: StepBatch, objective: PolicyGradient, before: Before, step: int
) -> dict[str, float]:
    """Do all updates of a step and return their metrics, averaged over the updates.

    A step with only dead groups makes no update. With `updates_per_step` > 1 the groups are dealt into that many
    minibatches of whole groups, and the old log-probs are computed once, before the first update.
    """
    recipe, policy, optimizer, reference = learner.recipe, learner.policy, learner.optimizer, learner.reference
    # in_rows: if a packed row runs out of memory, try once more with half the tokens per packed row.
    algorithm, in_rows = objective.algorithm, learner.in_rows
    lr = learning_rate(recipe.optim, step, recipe.train.steps)
    if not batch.updates:  # log the schedule's rate all the same: a 0 would look like a dip of the schedule
        return {"optim/updates": optimizer.updates, "optim/lr": lr}
    if objective.kl_coef > 0 and reference is not None:
        if algorithm.kl == "full":
            in_rows(partial(fill_reference, reference, batch))
        else:
            in_rows(partial(fill_logps, reference, batch, batch.ref_logp))
    minibatches = split_updates(batch)
    # A single update needs no old log-probs: they are its own, detached.
    if len(minibatches) > 1 and (algorithm.needs_critic or algorithm.masks):
        batch.old_logp |= before.logp
    elif len(minibatches) > 1 and not (objective.importance == "ratio" and batch.all_sampled):
        # Packed as `update` will pack them: the first update then has ratios of exactly 1, in bfloat16 too.
        for minibatch in minibatches:
            in_rows(partial(fill_logps, policy, minibatch, batch.old_logp))
    options = {"lr": lr, "max_tokens": learner.longest_response}
    updates: list[dict[str, float]] = []
    for minibatch in minibatches:
        if updates and minibatch.masked_prompt is not None:  # the weights have changed since `before`
            in_rows(partial(fill_logps, policy, minibatch.behind(minibatch.masked_prompt), batch.masked_logp))
        updates.append(in_rows(partial(update, policy, optimizer, minibatch, objective, **options)))
    names = dict.fromkeys(name for m in updates for name in m)
    stats = {name: fmean(m[name] for m in updates if name in m) for name in names}
    # The difference to the engine is the first update's: only there the policy has the weights that sampled.
    stats |= {name: value for name, value in updates[0].items() if name.startswith("policy/sampler_")}
    return stats | {"optim/updates": optimizer.updates}


def steer_kl(
    progress: Progress, algorithm: Algorithm, coef: float, metrics: Mapping[str, float], num_samples: int
) -> None:
    """Set the adaptive KL coefficient of the next step from this step's mean KL. A checkpoint keeps it."""
    kl = metrics.get("policy/kl_in_reward", metrics.get("loss/kl"))
    if kl is not None and algorithm.kl_target is not None:
        progress.kl_coef = next_kl_coef(
            coef, kl, target=algorithm.kl_target, horizon=algorithm.kl_horizon, samples=num_samples
        )


def _rollout_metrics(groups: Sequence[Group], feed: PromptFeed, health: Health, algorithm: Algorithm) -> dict[str, Any]:
    """Return the metrics of a step's rewards and rollouts, of its answers, and of the run's health.

    A metric of a task does not replace one of the run that has the same name.
    """
    own = group_metrics(groups, feed.scorers) | accuracy_metrics(groups, feed.sources) | health.measure(groups)
    if algorithm.advantage == "zero":  # a group teaches by its teacher, whatever its scores
        del own["rollout/dead_group_share"]
    return pooled_metrics(groups, feed.sources) | own
