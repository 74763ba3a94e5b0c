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
from vlmrl.errors import RewardUnavailable
from vlmrl.evaluate.metrics import metric_value, task_problems
from vlmrl.evaluate.records import KEPT_BYTES, training_folder, write_evaluation
from vlmrl.evaluate.run import Evaluation, evaluate
from vlmrl.recipe.schema import Eval, Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.outages import OutageError, StepLeftError
from vlmrl.tasks.source import Source
from vlmrl.train.checkpointing import finish_save, look_after_save, save
from vlmrl.train.journal import Journal
from vlmrl.train.prompt_feed import PromptFeed
from vlmrl.train.resume import ALL_DONE
from vlmrl.train.session import Session

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


def validate(session: Session, generator: Generator) -> None:
    """Validate the current policy with greedy answers on every validation source, once per step at most."""
    feed, journal = session.feed, session.journal
    step = journal.progress.step
    if not feed.validation or journal.progress.validated == step:
        return
    rank_process.phase("validation", step)
    evaluation_of = partial(answer, feed, generator, step)
    write_validation(journal, feed.validation, session.recipe.eval, evaluation_of)


def answer(feed: PromptFeed, generator: Generator, step: int, source: Source) -> Evaluation:
    """Answer and score the validation rows of a source.

    A service that a reward needs may be down: see `Outages`. With "mask", one that is down for all rows is an error at
    step 0, and later there are no scores then.
    """
    recipe = feed.recipe
    return evaluate(
        generator,
        feed.encoder,
        source,
        feed.scorers[source.name],
        params=feed.greedy,
        seed=recipe.train.seed,
        max_rows=recipe.eval.max_rows,
        world=feed.world,
        artifact_bytes=KEPT_BYTES // 8,
        patient=step > 0,
        outages=feed.outages,
    )


def write_validation(
    journal: Journal, sources: Sequence[Source], settings: Eval, evaluation_of: Callable[[Source], Evaluation]
) -> None:
    """Write the evaluation of each source, and record whether the policy is the best so far.

    Args:
        journal: writes the results and counts the validation.
        sources: the validation sources.
        settings: the recipe's `[eval]` table.
        evaluation_of: answers and scores the rows of a source; called once per source, and its result is written at
            once.
    """
    values, metrics, step = [], {}, journal.progress.step
    for source in sources:
        evaluation = evaluation_of(source)
        summary = evaluation.summary
        for problem in task_problems(summary):
            journal.watcher.message(f"validation on {source.name}: {problem}")
        values.append(metric_value(summary, settings.metric))
        prefix = "eval" if len(sources) == 1 else f"eval/{source.name}"
        metrics |= {f"{prefix}/{name}": m["value"] for name, m in summary["metrics"].items()}
        metrics |= {
            f"{prefix}/{name}_{end}": m[end] for name, m in summary["metrics"].items() for end in ("low", "high")
        }
        if journal.world.is_main:
            folder = training_folder(journal.run.dir, source.split, source.name, step)
            write_evaluation(folder, evaluation, _validation_meta(source, step, settings.max_rows))
    if all(math.isnan(v) for v in values):
        journal.watcher.message(f"validation has no metric `{settings.metric}` (eval.metric): no step can be the best")
    # The mean over the sources decides which step is the best; NaN (no such metric) is never the best.
    value = sum(values) / len(values)
    best = journal.progress.count_validation(value, settings.goal)
    if best:
        journal.run.set_best(step, settings.metric, value)
    journal.log(step, "validation", metrics | {"eval/metric": value, "eval/is_best": best})
    journal.watcher.validation(step, metrics, best)


def validate_at_start(session: Session, generator: Generator) -> None:
    """Validate the start weights, if the recipe asks for it and the run has no validation yet.

    A resumed run validates its checkpoint if the attempt before ended while it waited for that validation's rewards.
    """
    progress, manifest = session.journal.progress, session.journal.run.manifest
    step = progress.step
    is_same_run = manifest.forked_at != step and "best" not in manifest.restarts_since(step)
    was_left = is_same_run and step > 0 and _is_due(session.recipe.eval, step) and progress.validated < step
    if was_left or (progress.validated < 0 and session.recipe.eval.at_start):
        validate(session, generator)


def _is_due(settings: Eval, step: int) -> bool:
    """Return whether the recipe asks for a validation after this step."""
    return settings.every_steps > 0 and step % settings.every_steps == 0


def _validation_meta(source: Source, step: int, max_rows: int | None) -> dict[str, Any]:
    return {
        "step": step,
        "greedy": True,
        "checkpoint": None,
        "during": "training",
        "split": source.split,
        "source": source.name,
        "role": "validation",
        "max_rows": max_rows,
        "dataset": {"path": source.dataset.path, "fingerprint": source.dataset.fingerprint, "rows": len(source.rows)},
    }


def after_step(session: Session, generator: Generator) -> None:
    """Validate and save if the recipe asks for it after this step.

    With `checkpoint.keep_best`, a new best policy is always saved.
    """
    settings, progress = session.recipe, session.journal.progress
    rank_process.phase("after the update", progress.step)
    look_after_save(session.saver, session.journal.world)
    if _is_due(settings.eval, progress.step):
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
    journal, outages, left = session.journal, session.feed.outages, LeftStep()
    outages.stop_reason = partial(urgent_reason, journal, session.recipe, request)
    outages.note = lambda event, facts: journal.run.event(journal.progress.step, event, **facts)
    try:
        yield left
    except StepLeftError as error:
        left.reason = error.reason
    except OutageError as error:
        save_once(session)
        raise RewardUnavailable(error.message, where=str(journal.run.dir), hint=OUTAGE_HINT) from None


def save_once(session: Session) -> None:
    """Save a checkpoint of the present step, unless there is one, and wait until it is complete."""
    session.journal.rollouts.finish()
    if session.saver.saved_step != session.journal.progress.step:
        save(session)
    rank_process.phase("saving")
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
    journal.run.event(journal.progress.step, "ended", reason=reason)
    return "interrupted" if interrupted else "done"
