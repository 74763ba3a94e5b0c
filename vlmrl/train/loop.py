"""Decisions that the loops of `sft` and `train` share: when to validate, save and stop, and what Ctrl-C does."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from types import FrameType

from vlmrl.dist import world
from vlmrl.errors import RewardUnavailable
from vlmrl.recipe.schema import Eval, Recipe
from vlmrl.rewards.attempts import HINT, OutageError, StepLeftError
from vlmrl.rollout.engine import Generator
from vlmrl.train.checkpointing import finish_save, look_after_save, save
from vlmrl.train.collect import epochs_at
from vlmrl.train.journal import Journal
from vlmrl.train.resume import ALL_DONE
from vlmrl.train.session import Session
from vlmrl.train.validation import validate

INTERRUPTED = "interrupted"
"""Reason of `stop_reason` after a stop request."""
OUTAGE_HINT = (
    "a checkpoint was saved; when the service is back, continue with --resume (--set reward.outage=mask leaves out "
    "samples that no service can score)"
)


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
    world.phase("after the update", progress.step)
    if session.saver.under_way is not None:
        look_after_save(session.saver, session.journal.world)
    if is_due(settings, session.feed.training_rows, progress.step):
        validate(session, generator)
    every = settings.checkpoint.every_steps
    new_best = settings.checkpoint.keep_best and progress.best_step == progress.step
    if (every and progress.step % every == 0) or new_best:
        save(session)


def validate_at_start(session: Session, generator: Generator) -> None:
    """Validate the start weights, if the recipe asks for it and the run has no validation yet.

    A resumed run validates its checkpoint if the attempt before ended while it waited for that validation's rewards.
    """
    progress, manifest = session.journal.progress, session.journal.run.manifest
    step = progress.step
    is_same_run = manifest.forked_at != step and "best" not in manifest.restarts_since(step)
    due = step > 0 and is_due(session.recipe, session.feed.training_rows, step)
    was_left = is_same_run and due and progress.validated < step
    if was_left or (progress.validated < 0 and session.recipe.eval.at_start):
        validate(session, generator)


def is_due(recipe: Recipe, rows: int, step: int) -> bool:
    """Return whether a validation is due after this step.

    Args:
        rows: number of training rows of all sources.
        step: number of steps done, at least 1.
    Example: every_epochs = 1, 10 rows, 4 per step -> steps 3 (12 rows drawn), 5 (20), 8 (32), 10 (40).
    """
    if recipe.eval.every_epochs is None:
        return bool(recipe.eval.every_steps) and step % recipe.eval.every_steps == 0
    return _intervals(recipe, rows, step) > _intervals(recipe, rows, step - 1)


def _intervals(recipe: Recipe, rows: int, step: int) -> int:
    """Return how many times `eval.every_epochs` epochs are drawn after a step, rounded down. Exact."""
    return int(epochs_at(recipe, rows, step) / Fraction(str(recipe.eval.every_epochs)))


def stop_reason(journal: Journal, recipe: Recipe, request: StopRequest) -> str | None:
    """Return why the loop ends now, or None if it goes on.

    The result is the same on all ranks: a stop request to one rank counts for all, and the time is rank 0's.
    """
    progress, target = journal.progress, recipe.train.stop_above
    urgent = urgent_reason(journal, recipe, request)
    if progress.step >= recipe.train.steps:
        return ALL_DONE
    if urgent is not None:
        return urgent
    best = progress.best_value
    is_newest = best is not None and progress.best_step == progress.step
    if target is not None and best is not None and is_newest and _reached(recipe.eval, best, target):
        return f"{recipe.eval.metric} reached {best:.4g} (train.stop_above = {target})"
    if recipe.eval.patience and progress.stale >= recipe.eval.patience:
        return f"{recipe.eval.metric} has not improved for {progress.stale} validations (eval.patience)"
    return None


def urgent_reason(journal: Journal, recipe: Recipe, request: StopRequest) -> str | None:
    """Return the reason to stop that counts within a step, too: a stop request to any rank, or the time limit."""
    requests = journal.world.gather((request.is_set, journal.seconds))
    if any(is_set for is_set, _ in requests):
        return INTERRUPTED
    if recipe.train.max_seconds and requests[0][1] >= recipe.train.max_seconds:
        return f"the time limit is reached (train.max_seconds = {recipe.train.max_seconds})"
    return None


def _reached(settings: Eval, best: float, target: float) -> bool:
    return best >= target if settings.goal == "max" else best <= target


@dataclass
class LeftStep:
    """Reason why the training left a step that it could not finish; "" = it left none."""

    reason: str = ""


@contextmanager
def leaving_steps(session: Session, request: StopRequest) -> Iterator[LeftStep]:
    """Leave the training when a wait for a service must end: the block then ends, and the result has the reason.

    Raises: RewardUnavailable, after a checkpoint of the step's begin was saved, when an outage ends the run.
    """
    journal, ranks, left = session.journal, session.feed.ranks, LeftStep()
    ranks.stop_reason = partial(urgent_reason, journal, session.recipe, request)
    ranks.note = lambda event, facts: journal.run.event(journal.progress.step, event, **facts)
    try:
        yield left
    except StepLeftError as error:
        left.reason = error.reason
    except OutageError as error:
        save_once(session)
        _tell_services(journal, session.feed.service_summary(), session.feed.service_counts)
        hint = OUTAGE_HINT if error.hint == HINT else f"a checkpoint was saved; continue with --resume; {error.hint}"
        raise RewardUnavailable(error.message, where=str(journal.run.dir), hint=hint) from None


def save_once(session: Session) -> None:
    """Save a checkpoint of the present step, unless there is one, and wait until it is complete."""
    session.journal.rollouts.finish()
    if session.saver.saved_step != session.journal.progress.step:
        save(session)
    world.phase("saving")
    finish_save(session.saver)


def end(session: Session, generator: Generator, reason: str, *, validates: bool = True) -> str:
    """Validate (unless the run was interrupted) and save for the last time. Return the run's status.

    Args:
        validates: False = the policy is not validated in any case.
    """
    journal = session.journal
    interrupted = reason == INTERRUPTED
    if validates and not interrupted:
        journal.rollouts.finish()
        validate(session, generator)
    save_once(session)
    _tell_services(journal, session.feed.service_summary(), session.feed.service_counts)
    journal.run.event(journal.progress.step, "ended", reason=reason)
    return "interrupted" if interrupted else "done"


def _tell_services(journal: Journal, line: str, counts: Mapping[str, float]) -> None:
    """Show and record what the services of the rewards were asked. `line`: the counts in words; "" = none was asked."""
    if line:
        journal.watcher.message(line)
        journal.run.event(journal.progress.step, "services", **counts)
