"""Reinforcement learning: the step loop of the GRPO family. One pass of the loop makes one new policy version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import fmean

from vlmrl.algo.family import Algorithm, algorithm_of
from vlmrl.algo.shaping import next_kl_coef
from vlmrl.data.packing import PromptTokens, TrainItem
from vlmrl.dist import rank_process
from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.evaluate.outcomes import accuracy_metrics, accuracy_told
from vlmrl.rollout.sample import encode_prompt
from vlmrl.rollout.vllm.hosted_engine import HostedEngine
from vlmrl.setup.engine import make_generator
from vlmrl.tasks.source import Source
from vlmrl.train.checkpointing import save
from vlmrl.train.collect import Collected, batch_of, collect, look_ahead
from vlmrl.train.forward_passes import fill_logps, fill_reference
from vlmrl.train.loop import Clock, after_step, catch_interrupt, end, memory_metrics, stop_reason, validate_at_start
from vlmrl.train.objectives import PolicyGradient, objective_of
from vlmrl.train.optim import learning_rate
from vlmrl.train.out_of_memory import budget_metrics, in_rows, keep_batches
from vlmrl.train.rehearsal import rehearse
from vlmrl.train.state import Session
from vlmrl.train.step_batch import split_updates
from vlmrl.train.step_metrics import group_metrics, rollout_speed
from vlmrl.train.sync_check import check_sync
from vlmrl.train.update import update
from vlmrl.types import Group, Row, Segment, hash64

STRICT_STEPS = 3
"""Steps of an attempt in which a failing reward stops the run with the row; later the sample is masked and counted."""
MAX_ERROR_SHARE = 0.01
"""Share of all samples of an attempt whose reward may fail before the run saves and stops."""
MOST_REASON_CHARS = 500
MIN_SAMPLES_FOR_SHARE = 200
"""Below this many samples the share is taken of this number: one failure must not end a young run."""


def train_rl(session: Session) -> str:
    """Train until the recipe's end. Returns the run's status: done or interrupted."""
    s, recipe = session, session.recipe
    algorithm = algorithm_of(recipe.algo)
    rank_process.phase("engine start", s.progress.step)
    generator = make_generator(
        recipe, s.policy, s.encoder, s.origin.files, s.watcher.message, world=s.world, log=s.run.process_log,
        pending_bytes=s.optimizer.pending_bytes,
    )  # fmt: skip
    s.stack.callback(generator.close)
    if (settings := getattr(generator, "settings", None)) is not None:
        automatic = recipe.rollout.kv_cache_gib is None
        s.run.event(s.progress.step, "engine cache", bytes=settings.kv_cache_bytes, automatic=automatic)
    keep_batches(s, generator)
    generator.load_weights(s.progress.step)
    generator.sleep()  # as during updates
    in_loss = algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0
    rehearse(s, objective_of(recipe, algorithm, in_loss), partial(longest_item, s))
    generator.load_weights(s.progress.step, changed=False)  # wakes it
    first_step, ahead = s.progress.step, None
    with catch_interrupt(s) as request:
        validate_at_start(s, generator)
        while (reason := stop_reason(s, request)) is None:
            step, clock = s.progress.step, Clock()
            kl_coef = algorithm.kl_coef if s.progress.kl_coef is None else s.progress.kl_coef
            in_loss, in_reward = (kl_coef, 0.0) if algorithm.kl_in == "loss" else (0.0, kl_coef)
            strict = step < first_step + STRICT_STEPS
            made = collect(s, generator, algorithm, in_reward, clock, strict=strict, ahead=ahead)
            ahead, s.cursor = None, None
            s.rollouts.write(step, made.groups)
            if step == first_step and (told := accuracy_told(made.groups, s.sources)):
                s.watcher.message(told)
            generator.sleep()
            if isinstance(generator, HostedEngine) and recipe.rollout.overlap and step + 1 < recipe.train.steps:
                ahead = look_ahead(s, generator, clock)
                s.cursor = ahead.cursor
            updates = s.optimizer.updates
            with clock("update"):
                stats = learn(s, made, objective_of(recipe, algorithm, in_loss))
            if ahead is not None:
                with clock("rollout"):
                    ahead.finish()
            if algorithm.kl_target is not None:
                steer_kl(s, algorithm, kl_coef, made.metrics | stats, sum(len(g.samples) for g in made.groups))
            s.progress.step += 1
            with clock("sync"):
                changed = s.optimizer.updates > updates
                generator.load_weights(s.progress.step, changed=changed)
                sync = check_sync(s, generator, [prompt for _, prompt in made.sampled()]) if changed else {}
            metrics = (
                group_metrics(made.groups, s.scorers)
                | accuracy_metrics(made.groups, s.sources)
                | s.health.measure(made.groups)
                | made.metrics
                | ({"policy/kl_coef": kl_coef} if kl_coef > 0 else {})
                | stats
                | sync
                | rollout_speed(made)
                | clock.metrics()
                | memory_metrics(s)
                | budget_metrics(s)
            )
            metrics |= s.health.warn(step, metrics)
            s.log(step, "train", metrics)
            s.watcher.step(step, recipe.train.steps, metrics)
            if recipe.log.sample_every_steps and step % recipe.log.sample_every_steps == 0:
                s.watcher.sample(step, made.groups[0])
                s.loggers.samples(made.groups, s.sources)
            count_errors(s, made.groups)
            after_step(s, generator)
        return end(s, generator, reason)


def longest_item(session: Session, source: Source, row: Row, occurrence: int, index: int) -> TrainItem:
    """A row's prompt with a response of `max_new_tokens`, out of the prompt's own words."""
    s = session
    encoded = encode_prompt(source, row, occurrence, s.encoder, s.recipe.rollout.max_prompt_tokens).encoded
    prompt = PromptTokens.of(encoded)
    words = [i for i, kind in zip(prompt.ids, prompt.kinds, strict=True) if not kind and i not in s.policy.banned_ids]
    ids = tuple(islice(cycle(words), s.recipe.rollout.max_new_tokens))
    return TrainItem(prompt, index, (Segment("assistant", ids, True),), index)


def steer_kl(
    session: Session, algorithm: Algorithm, coef: float, metrics: Mapping[str, float], num_samples: int
) -> None:
    """The adaptive KL coefficient of the next step, from this step's mean KL. Kept in the checkpoint."""
    kl = metrics.get("policy/kl_in_reward", metrics.get("loss/kl"))
    if kl is not None and algorithm.kl_target is not None:
        session.progress.kl_coef = next_kl_coef(
            coef, kl, target=algorithm.kl_target, horizon=algorithm.kl_horizon, samples=num_samples
        )


def learn(session: Session, made: Collected, objective: PolicyGradient) -> dict[str, float]:
    """All updates of one step. Dead groups never enter a forward pass (unless a KL or entropy term acts on them, or a
    critic learns from them).

    A step of dead groups alone makes no update. With `updates_per_step` > 1 the groups are dealt into that many
    minibatches of whole groups, and the old log-probs are computed once, before the first.
    """
    s, recipe = session, session.recipe
    algorithm = objective.algorithm
    # A filter's refused groups stay out, whatever else acts on all.
    acts_on_all = algorithm.needs_critic or bool(objective.kl_coef or objective.entropy_coef)
    keep_dead = acts_on_all and algorithm.filter == "none"
    batch = batch_of(
        s, made, made.groups, keep_dead=keep_dead, count_dead=algorithm.counts_dead,
        updates=recipe.train.updates_per_step,
    )  # fmt: skip
    batch.seed = hash64(recipe.train.seed, s.progress.step, "tokens")
    batch.old_value = made.before.value
    s.proof_items = batch.items[:64] or batch_of(s, made, made.groups, keep_dead=True).items[:64]
    lr = learning_rate(recipe.optim, s.progress.step, recipe.train.steps)
    if not batch.updates:  # the schedule goes on: a rate of 0 would read as a dip of it
        return {"optim/updates": s.optimizer.updates, "optim/lr": lr}
    if objective.kl_coef > 0 and s.reference is not None:
        if algorithm.kl == "full":
            in_rows(s, partial(fill_reference, s.reference, batch))
        else:
            in_rows(s, partial(fill_logps, s.reference, batch, batch.ref_logp))
    minibatches = split_updates(batch)
    if len(minibatches) > 1 and algorithm.needs_critic:
        batch.old_logp |= made.before.logp
    elif len(minibatches) > 1 and not (objective.importance == "ratio" and batch.all_sampled):
        # Packed as `update` will pack them: the first update then has ratios of exactly 1, in bfloat16 too.
        for minibatch in minibatches:
            in_rows(s, partial(fill_logps, s.policy, minibatch, batch.old_logp))
    rest = {"lr": lr, "max_tokens": recipe.rollout.max_new_tokens}
    updates = [in_rows(s, partial(update, s.policy, s.optimizer, m, objective, **rest)) for m in minibatches]
    stats = {name: fmean(m[name] for m in updates) for name in updates[0]}
    # Only the first update sees the weights that sampled.
    stats |= {name: value for name, value in updates[0].items() if name.startswith("policy/sampler_")}
    return stats | {"optim/updates": s.optimizer.updates}


def count_errors(session: Session, groups: Sequence[Group]) -> None:
    """Keep count of failed rewards; save and stop when they are more than a few. Of services that were down say so, and
    stop where the recipe wants that.

    Raises: after saving a checkpoint, RewardError when over 1% of this attempt's samples failed, and RewardUnavailable.
    """
    progress = session.progress
    down = [x for g in groups for x in g.samples if x.score.status == "unavailable"]
    if down:
        reasons = "; ".join(dict.fromkeys(_last_line(x.score.error) for x in down))[:MOST_REASON_CHARS]
        say = f"the reward was unavailable for {len(down)} sample(s), which were left out: {reasons}"
        session.watcher.message(say)
        if session.recipe.reward.on_unavailable == "stop":
            save(session, wait=True)
            hint = "a checkpoint was saved; when the service is back: --resume"
            raise RewardUnavailable(say, where=str(session.run.dir), hint=hint)
    failed = [x for g in groups for x in g.samples if x.score.failed]
    progress.samples += sum(len(g.samples) for g in groups)
    progress.reward_errors += len(failed)
    samples, errors = progress.samples - session.counted_before[0], progress.reward_errors - session.counted_before[1]
    share = errors / max(samples, MIN_SAMPLES_FOR_SHARE)
    if failed:
        first = _last_line(failed[0].score.error)
        told = f": {first}" if first else ""
        session.watcher.message(f"the reward failed for {len(failed)} sample(s), which were left out{told}")
    if share > MAX_ERROR_SHARE:
        save(session, wait=True)
        raise RewardError(
            f"the reward failed for {errors} of {samples} samples: the run stops",
            where=str(session.run.dir),
            hint="a checkpoint was saved; mend the reward"
            f" (`vlmrl reward-check {session.run.id}` shows the rows), then --resume",
        )


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]
