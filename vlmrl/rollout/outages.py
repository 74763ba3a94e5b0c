"""Rule of a run for outages: what happens when a service that a reward needs is down. All ranks decide the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vlmrl.dist import world as rank_process
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import RewardUnavailable
from vlmrl.recipe.schema import Reward
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.several_scorer import RewardScorer
from vlmrl.rollout.sample import Rollout
from vlmrl.rollout.scoring import Missing, Scoring
from vlmrl.store.layout import span
from vlmrl.store.summary import ANSWERS, WAITS
from vlmrl.types import Group

TICK_SECONDS = 0.5
"""Time between two agreements of the ranks while they wait, in seconds: an interruption is seen after this time."""
REMIND_SECONDS = 300.0
"""Time between two messages about the same outage, in seconds."""
MOST_REASON_CHARS = 500


HINT = "what was answered is kept: start the service, then give the same command again, and it goes on"


class OutageError(RewardUnavailable):
    """Error: an outage ends the work. All ranks raise it together."""


class StepLeftError(Exception):
    """End of a wait, because the run is to stop: the step cannot be finished now. `reason`: why the run stops."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Outages:
    """Rule of a run, or of an evaluation, for outages of the services that its rewards need.

    Args:
        action: wait = ask the missing samples again; mask = they have no score; stop = the work ends.
        minutes: longest wait without any answer.
        world: the ranks that score together.
        say: shows a message to the user; called on all ranks.
        note: records an event with its facts; called on all ranks.
        stop_reason: returns why a wait must end now, or None. All ranks call it together.
        seconds: (attribute) seconds of waiting since it was last set to 0.
    """

    action: Literal["wait", "mask", "stop"] = "wait"
    minutes: float = 30.0
    world: World = ALONE
    say: Callable[[str], None] = lambda text: None
    note: Callable[[str, Mapping[str, Any]], None] = lambda event, facts: None
    stop_reason: Callable[[], str | None] = lambda: None
    seconds: float = 0.0
    _said: float | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: Reward, world: World, say: Callable[[str], None]) -> Outages:
        """Return the rule of a recipe's `[reward]` table."""
        return cls(settings.outage, settings.outage_minutes, world, say)

    def scoring(self, scorers: Mapping[str, RewardScorer], *, strict: bool) -> Scoring:
        """Return a `Scoring` that follows the rule; `finish` ends it. `strict` concerns bugs of the reward alone."""
        waits = self.action == "wait"
        return Scoring(scorers, strict=strict, on_outage="wait" if waits else "mask", seen=self._tell)

    def score(self, rollouts: Sequence[Rollout], scorers: Mapping[str, RewardScorer], *, strict: bool) -> list[Group]:
        """Score all responses, each source with its own reward; see `finish`."""
        with self.scoring(scorers, strict=strict) as scoring:
            scoring.submit_all(rollouts)
            return self.finish(scoring)

    def finish(self, scoring: Scoring, seconds: float | None = None) -> list[Group]:
        """Wait for all scores of this rank. Return its groups, as `Scoring.finish`. All ranks call it together.

        Raises: OutageError, on all ranks, when a service is down: for stop at once, for wait after `minutes` without
            any answer; also when a failure ends the work (`Scorer.ended`). StepLeftError, on all ranks, when
            `stop_reason` ends the wait.
        """
        if self.action == "wait":
            self._wait(scoring)
        groups = scoring.finish(seconds)
        failures = self.world.gather(scoring.ended)
        if failure := next((one for one in failures if one is not None), None):
            raise OutageError(failure.message, hint=failure.hint or HINT)
        if self.action == "stop":
            errors = [s.score.error or "" for g in groups for s in g.samples if s.score.status == "unavailable"]
            of_ranks = self.world.gather((len(errors), errors[:1]))
            if number := sum(count for count, _ in of_ranks):
                reason = next(error for _, some in of_ranks for error in some)
                message = f"the reward was unavailable for {number} sample(s): {_last_line(reason)}"
                raise OutageError(message, hint=HINT)
        return groups

    def _wait(self, scoring: Scoring) -> None:
        """Return when every input of all ranks has its outcome."""
        begin, outage = time.monotonic(), False
        scoring.settle()
        while True:
            # The ranks stay together: no collective operation waits longer than a tick and a call of a reward.
            states = self.world.gather((scoring.is_open, scoring.missing()))
            if not any(is_open for is_open, _ in states):
                break
            waiting = [missing for _, missing in states if missing is not None]
            if waiting and not outage:
                outage, begin = True, time.monotonic()
            if waiting:
                self._look_at(waiting)
            rank_process.phase(WAITS)  # the watch of the ranks sees that this one is alive
            scoring.advance(TICK_SECONDS)
        if outage:
            self.seconds += time.monotonic() - begin
        if self._said is not None:
            self._said = None
            self.say("the service answers again, and all samples are scored")
            self.note(ANSWERS, {"waited": round(self.seconds, 1)})

    def _look_at(self, waiting: Sequence[Missing]) -> None:
        """Tell the user about an outage. Raise if the wait must end; `waiting` is the same on all ranks."""
        worst = max(waiting, key=lambda missing: missing.silent_seconds)
        number = sum(missing.number for missing in waiting)
        self._tell(Missing(number, worst.reason, min(m.since for m in waiting), worst.silent_seconds))
        if (reason := self.stop_reason()) is not None:
            raise StepLeftError(reason)
        if worst.silent_seconds > 60 * self.minutes:
            message = f"the reward was unavailable for {span(worst.silent_seconds)} ({number} sample(s) wait for it)"
            raise OutageError(f"{message}: {_last_line(worst.reason)}", hint=HINT)

    def _tell(self, missing: Missing) -> None:
        """Show an outage and record it, once and then after every REMIND_SECONDS."""
        now = time.monotonic()
        if self._said is not None and now - self._said < REMIND_SECONDS:
            return
        first, self._said = self._said is None, now
        reason = _last_line(missing.reason)
        since = time.strftime("%H:%M:%S", time.localtime(missing.since))
        self.say(
            f"{'' if first else 'still '}{WAITS} since {since}: {reason}. {missing.number} sample(s) so far are asked "
            f"again until it answers; after {self.minutes:g} min without an answer this stops (reward.outage_minutes)"
        )
        if first:
            self.note(WAITS, {"reason": reason, "samples": missing.number})


def _last_line(text: str) -> str:
    return excerpt(text.strip().rpartition("\n")[2], MOST_REASON_CHARS)
