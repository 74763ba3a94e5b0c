"""Supervised fine-tuning: the same `update()` as reinforcement learning, with cross-entropy on the rows' responses."""

from __future__ import annotations

from functools import partial

from vlmrl.setup.model import make_generator
from vlmrl.train.journal import Clock, memory_metrics
from vlmrl.train.learner import keep_batches, learning_rate
from vlmrl.train.loop import after_step, catch_interrupt, end, leaving_steps, stop_reason, validate_at_start
from vlmrl.train.rehearsal import heaviest_rows, rehearse
from vlmrl.train.session import Session
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.targets import target_items, trace_text
from vlmrl.train.update import CrossEntropy, update
from vlmrl.types import name_row


def train_sft(session: Session) -> str:
    """Train until there is a reason to stop: one pass of the loop is one optimizer step.

    Returns: the run's status, "done" or "interrupted".
    """
    recipe, learner, feed, journal = session.recipe, session.learner, session.feed, session.journal
    policy, optimizer, progress = learner.policy, learner.optimizer, journal.progress
    say, own = journal.watcher.message, {"sources": feed.all_sources, "world": feed.world}
    generator = make_generator(recipe, policy, feed.encoder, say=say, **own, engine="torch")
    session.stack.callback(generator.close)
    keep_batches(learner.budgets, generator)
    items_of = partial(target_items, feed, generator)
    scan = partial(heaviest_rows, feed, progress.step, lambda drawn: items_of(drawn, [0] * len(drawn)), trace_text)
    rehearse(learner, CrossEntropy(), scan, progress.step, journal.run, journal.watcher.message)
    generator.load_weights(progress.step)
    with catch_interrupt(journal.watcher.message) as request, leaving_steps(session, request) as left:
        validate_at_start(session, generator)
        while (reason := stop_reason(journal, recipe, request)) is None:
            step, clock = progress.step, Clock(progress.step)
            with clock("encode"):
                drawn = feed.draw(recipe.train.rows_per_step)
                mine = feed.world.mine(len(drawn))
                items = items_of([drawn[index] for index in mine], mine)
            names = [name_row(source.name, row.prompt_id) for source, row, _ in drawn]
            # Cross-entropy does not use the advantages: they are 0.
            batch = StepBatch(items, [0.0] * len(drawn), names, world=learner.world, filler=learner.filler)
            with clock("update"):
                lr = learning_rate(recipe.optim, step, recipe.train.steps)
                options = {"lr": lr, "max_tokens": learner.longest_response}
                stats = learner.in_rows(partial(update, policy, optimizer, batch, CrossEntropy(), **options))
            session.saver.proof_items = items
            progress.step += 1
            progress.samples += len(drawn)
            generator.load_weights(progress.step)
            tokens = sum(learner.world.gather(sum(batch.num_trained(i) for i in items)))
            metrics = (
                stats
                | {
                    "optim/updates": optimizer.updates,
                    "data/rows": len(drawn),
                    "data/trained_tokens": tokens,
                    "rollout/tokens_per_second": tokens / clock.metrics()["time/step_seconds"],
                }
                | clock.metrics()
                | memory_metrics(policy.device, learner.world)
                | learner.budgets.metrics()
            )
            journal.log(step, "train", metrics)
            journal.watcher.step(step, recipe.train.steps, metrics)
            after_step(session, generator)
        return end(session, generator, reason)
    return end(session, generator, left.reason, validates=False)
