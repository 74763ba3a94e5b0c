"""Decisions that the loops of `sft` and `train` share: when to validate, save and stop, and what Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from vlmrl.dist import rank_process
from vlmrl.recipe.schema import Eval, Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.train.checkpointing import finish_save, look_after_save, save
from vlmrl.train.journal import Journal
from vlmrl.train.resume import ALL_DONE
from vlmrl.train.session import Session
from vlmrl.train.validation import is_due, validate


@dataclass
class StopRequest:
    """Request to stop after the current step.

    The first Ctrl-C (SIGINT) or SIGTERM sets it. The run is then saved and ends as interrupted.
    """

    is_set: bool = False


@contextmanager
def catch_interrupt(say: Callable[[str], None]) -> Iterator[StopRequest]:
    """Catch SIGINT and SIGTERM during training: the first requests a stop after the step, the second stops at once.

    Args:
        say: shows a message to the user; called at the first signal.
    """
    request = StopRequest()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if request.is_set:
            raise KeyboardInterrupt
        request.is_set = True
        say("stopping after this step, then saving a checkpoint (again: stop at once, without saving)")

    handlers = {s: signal.signal(s, on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def after_step(session: Session, generator: Generator) -> None:
    """Validate and save if the recipe asks for it after this step.

    With `checkpoint.keep_best`, a new best policy is always saved.
    """
    settings, progress = session.recipe, session.journal.progress
    rank_process.phase("after the update", progress.step)
    look_after_save(session.saver, session.journal.world)
    if is_due(settings, session.feed.training_rows, progress.step):
        validate(session, generator)
    every = settings.checkpoint.every_steps
    new_best = settings.checkpoint.keep_best and progress.best_step == progress.step
    if (every and progress.step % every == 0) or new_best:
        save(session)


def stop_reason(journal: Journal, recipe: Recipe, request: StopRequest) -> str | None:
    """Return why the loop ends now, or None if it goes on.

    The result is the same on all ranks: a stop request to one rank counts for all, and the time is rank 0's.
    """
    progress, target = journal.progress, recipe.train.stop_above
    requests = journal.world.gather((request.is_set, journal.seconds))
    stop_requested, seconds = any(a for a, _ in requests), requests[0][1]
    if progress.step >= recipe.train.steps:
        return ALL_DONE
    if stop_requested:
        return "interrupted"
    if recipe.train.max_seconds and seconds >= recipe.train.max_seconds:
        return f"the time limit is reached (train.max_seconds = {recipe.train.max_seconds})"
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
    """Validate (unless the run was interrupted) and save for the last time. Return the run's status."""
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
