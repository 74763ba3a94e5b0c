"""Failed rewards of a training run: they are counted, and stop the run when they are more than 1% of the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vlmrl.errors import RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.train.journal import Journal
from vlmrl.types import Group

MAX_ERROR_SHARE = 0.01
"""Maximum share of an attempt's samples whose reward may fail. Above it the run saves and stops."""
MOST_REASON_CHARS = 500
MIN_SAMPLES_FOR_SHARE = 200
"""Minimum number of samples that the share is taken of: a single failure must not end a young run."""


def count_failures(journal: Journal, groups: Sequence[Group], save: Callable[[], None]) -> None:
    """Count the failed rewards of a step, and tell the user about them and about services that were down.

    Args:
        journal: keeps the counts and shows the messages.
        groups: the scored groups of the step.
        save: saves a checkpoint and returns when it is complete; called before anything is raised.
    Raises: RewardError when over 1% of this attempt's samples failed.
    """
    progress, run, say = journal.progress, journal.run, journal.watcher.message
    unavailable = [x for g in groups for x in g.samples if x.score.status == "unavailable"]
    if unavailable:
        reasons = excerpt("; ".join(dict.fromkeys(_last_line(x.score.error) for x in unavailable)), MOST_REASON_CHARS)
        say(f"the reward was unavailable for {len(unavailable)} sample(s), which were left out: {reasons}")
    failed = [x for g in groups for x in g.samples if x.score.failed]
    progress.samples += sum(len(g.samples) for g in groups)
    progress.reward_errors += len(failed)
    samples_before, errors_before = journal.counted_before
    samples, errors = progress.samples - samples_before, progress.reward_errors - errors_before
    share = errors / max(samples, MIN_SAMPLES_FOR_SHARE)
    if failed:
        first = _last_line(failed[0].score.error)
        say(f"the reward failed for {len(failed)} sample(s), which were left out{f': {first}' if first else ''}")
    if share > MAX_ERROR_SHARE:
        save()
        raise RewardError(
            f"the reward failed for {errors} of {samples} samples: the run stops",
            where=str(run.dir),
            hint="a checkpoint was saved; fix the reward"
            f" (`vlmrl reward-check {run.id}` shows the rows), then continue with --resume",
        )


def _last_line(text: str | None) -> str:
    return (text or "").strip().rpartition("\n")[2]
