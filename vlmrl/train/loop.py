"""Decisions that the loops of `sft` and `train` share: when to validate, save and stop, and what Ctrl-C does."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from vlmrl.dist import rank_process
from vlmrl.evaluate.metrics import metric_value, task_problems
from vlmrl.evaluate.records import KEPT_BYTES, training_folder, write_evaluation
from vlmrl.evaluate.run import Evaluation, evaluate
from vlmrl.recipe.schema import Eval, Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.tasks.source import Source
from vlmrl.train.checkpointing import finish_save, look_after_save, save
from vlmrl.train.journal import Journal
from vlmrl.train.prompt_feed import PromptFeed
from vlmrl.train.resume import ALL_DONE
from vlmrl.train.session import Session


@dataclass
class StopRequest:
    """Wish to stop after the step. Set by the first Ctrl-C (or SIGTERM); the run is saved and ends as interrupted."""

    asked: bool = False


@contextmanager
def catch_interrupt(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Catch signals while training: the first one asks for a stop after the step, the second one stops at once.

    Args:
        say: tells the user what the first signal does.
    """
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True
        say("stopping after this step, then saving a checkpoint (again: stop at once, without saving)")

    before = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def validate(session: Session, generator: Generator) -> None:
    """Validate the current policy, greedily, on every validation source, unless it has been."""
    feed, journal = session.feed, session.journal
    step = journal.progress.step
    if not feed.validation or journal.progress.validated == step:
        return
    rank_process.phase("validation", step)
    evaluation_of = partial(answer, feed, generator, step)
    write_validation(journal, feed.validation, session.recipe.eval, evaluation_of)


def answer(feed: PromptFeed, generator: Generator, step: int, source: Source) -> Evaluation:
    """Answer and score the validation rows of a source. A service that is down fails the first step alone."""
    recipe = feed.recipe
    return evaluate(
        generator, feed.encoder, source, feed.scorers[source.name], params=feed.greedy, seed=recipe.train.seed,
        max_rows=recipe.eval.max_rows, world=feed.world, artifact_bytes=KEPT_BYTES // 8,
        patient=step > 0 and recipe.reward.on_unavailable == "mask",
    )  # fmt: skip


def write_validation(
    journal: Journal, sources: Sequence[Source], settings: Eval, evaluation_of: Callable[[Source], Evaluation]
) -> None:
    """Write the evaluation of each source, and note whether the policy is the best so far.

    Args:
        journal: where it is written.
        sources: the validation sources.
        settings: the recipe's `[eval]` table.
        evaluation_of: answers and scores the rows of a source; called once for each, and its result written at once.
    """
    values, flat, step = [], {}, journal.progress.step
    for source in sources:
        evaluation = evaluation_of(source)
        summary = evaluation.summary
        for problem in task_problems(summary):
            journal.watcher.message(f"validation on {source.name}: {problem}")
        values.append(metric_value(summary, settings.metric))
        prefix = "eval" if len(sources) == 1 else f"eval/{source.name}"
        flat |= {f"{prefix}/{name}": m["value"] for name, m in summary["metrics"].items()}
        flat |= {f"{prefix}/{name}_{end}": m[end] for name, m in summary["metrics"].items() for end in ("low", "high")}
        if journal.world.is_main:
            folder = training_folder(journal.run.dir, source.split, source.name, step)
            write_evaluation(folder, evaluation, _validation_meta(source, step, settings.max_rows))
    if all(math.isnan(v) for v in values):
        journal.watcher.message(f"validation has no metric `{settings.metric}` (eval.metric): no step can be the best")
    value = sum(values) / len(values)
    best = journal.progress.count_validation(value, settings.goal)
    if best:
        journal.run.set_best(step, settings.metric, value)
    journal.log(step, "validation", flat | {"eval/metric": value, "eval/is_best": best})
    journal.watcher.validation(step, flat, best)


def validate_at_start(session: Session, generator: Generator) -> None:
    """Validate the model that a run begins with, unless it has been, or the recipe leaves that out."""
    if session.journal.progress.validated < 0 and session.recipe.eval.at_start:
        validate(session, generator)


def _validation_meta(source: Source, step: int, max_rows: int | None) -> dict[str, Any]:
    return {
        "step": step, "greedy": True, "checkpoint": None, "during": "training", "split": source.split,
        "source": source.name, "role": "validation", "max_rows": max_rows,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
    }  # fmt: skip


def after_step(session: Session, generator: Generator) -> None:
    """Validate and save where the recipe wants it after this step. A new best is always saved."""
    settings, progress = session.recipe, session.journal.progress
    rank_process.phase("after the update", progress.step)
    look_after_save(session.saver, session.journal.world)
    if settings.eval.every_steps and progress.step % settings.eval.every_steps == 0:
        validate(session, generator)
    every = settings.checkpoint.every_steps
    new_best = settings.checkpoint.keep_best and progress.best_step == progress.step
    if (every and progress.step % every == 0) or new_best:
        save(session)


def stop_reason(journal: Journal, recipe: Recipe, request: StopRequest) -> str | None:
    """Return why the loop ends now; None = it goes on.

    The answer is the same on all processes: one that is asked to stop asks all, and the clock is that of rank 0.
    """
    progress, target = journal.progress, recipe.train.stop_above
    requests = journal.world.gather((request.asked, journal.seconds))
    stop_requested, seconds = any(a for a, _ in requests), requests[0][1]
    if progress.step >= recipe.train.steps:
        return ALL_DONE
    if stop_requested:
        return "interrupted"
    if recipe.train.max_seconds and seconds >= recipe.train.max_seconds:
        return f"train.max_seconds = {recipe.train.max_seconds} is over"
    best = progress.best_value
    is_newest = best is not None and progress.best_step == progress.step
    if target is not None and best is not None and is_newest and _reached(recipe.eval, best, target):
        return f"{recipe.eval.metric} reached {best:.4g} (train.stop_above = {target})"
    if recipe.eval.patience and progress.stale >= recipe.eval.patience:
        return f"{recipe.eval.metric} has not improved for {progress.stale} validations (eval.patience)"
    return None


def _reached(settings: Eval, best: float, target: float) -> bool:
    return best >= target if settings.goal == "max" else best <= target


def end(session: Session, generator: Generator, reason: str) -> str:
    """Validate and save for the last time. Return the run's status."""
    journal, saver = session.journal, session.saver
    journal.rollouts.finish()
    interrupted = reason == "interrupted"
    if not interrupted:
        validate(session, generator)
    if saver.saved_step != journal.progress.step:
        save(session)
    rank_process.phase("saving")
    finish_save(saver)
    journal.run.event(journal.progress.step, "ended", reason=reason)
    return "interrupted" if interrupted else "done"
