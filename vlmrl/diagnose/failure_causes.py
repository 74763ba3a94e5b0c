"""Causes of a run that does not learn: rewards that gave no score."""

from __future__ import annotations

from collections.abc import Iterator

from vlmrl.diagnose.run_facts import RunFacts
from vlmrl.diagnose.thresholds import Cause, Level, counted, limit, percent, reward_check, rows_of
from vlmrl.types import NO_SCORE


def failing_reward(facts: RunFacts) -> Iterator[Cause]:
    """Report a reward that raised an error, timed out, or returned a value that is not a score."""
    failed = [r for r in facts.responses if r.failed]
    number = max(len(failed), round(sum(facts.series("reward/errors"))))
    if not number:
        return
    last = [line for r in failed[:1] for line in (r.error or "").strip().splitlines()[-1:]]
    yield Cause(
        "failing_reward",
        "error",
        f"the reward failed for {number} sample(s), left out",
        reward_check(facts),
        0.9,
        last,
        rows_of(failed),
    )


def service_down(facts: RunFacts) -> Iterator[Cause]:
    """Report a service that the reward calls, if it did not answer and samples were left out for this reason."""
    lost = [r for r in facts.responses if r.status == "unavailable"]
    num_unavailable, sampled = sum(facts.series("reward/unavailable")), sum(facts.series("rollout/samples"))
    number = max(len(lost), round(num_unavailable))
    ended = facts.manifest.error or ""
    if ended.startswith(NO_SCORE["unavailable"]):
        yield Cause("service_down", "error", f"the run stopped: {ended}", reward_check(facts), 0.95, [], rows_of(lost))
        return
    if not number:
        return
    share = number / max(number, sampled, len(facts.responses))
    level: Level = "note" if share < limit("unavailable_warning") else "warning"
    if share >= limit("unavailable_error"):
        level = "error"
    steps = [line["step"] for line in facts.train if line.get("reward/unavailable")]
    evidence = [f"{percent(share)} of the samples, in {counted(len(steps), 'step')}"] if steps else []
    evidence += [line for r in lost[:1] for line in (r.error or "").strip().splitlines()[-1:]]
    yield Cause(
        "service_down",
        level,
        f"the reward was unavailable for {number:,} sample(s), left out",
        reward_check(facts),
        0.7,
        evidence,
        rows_of(lost),
    )
