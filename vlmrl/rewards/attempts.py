"""Inputs without a result: what is asked again, when, and what is final. Nothing else in `rewards` waits or asks again.

A response that hung, ended or filled its worker gets a second try alone, and then earns `on_timeout`. After a failed
call of a function that gets lists, each input is scored alone. In an outage of a service, the inputs without a score
are asked again later.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from vlmrl.errors import RewardUnavailable
from vlmrl.redaction.redact import excerpt
from vlmrl.rewards.base import EARNED
from vlmrl.rewards.outcomes import Failure, Outcome, Place, Result
from vlmrl.store.layout import span
from vlmrl.store.summary import ANSWERS, WAITS
from vlmrl.types import ENVIRONMENT_DOWN
from vlmrl.untrusted import number_of
from vlmrl.workers.frames import UNAVAILABLE

HINT = "answers so far are kept: start the service, then run the same command again to continue"
REMIND_SECONDS = 300.0
"""Time between two messages about the same outage, in seconds."""
MOST_REASON_CHARS = 500
_chance = random.Random()  # of its own: the random state of a run must not depend on outages


@dataclass(frozen=True)
class AttemptRule:
    """Rule for waiting and asking again.

    Args:
        on_outage: what happens when a service is down. raise = it is like a bug: strict scoring raises. mask = the
            input has no score, and its status is "unavailable". stop = as mask, and then the work ends. wait = the
            input is asked again.
        minutes: with wait, the longest time without any answer.
        first_seconds, most_seconds: pause before the first new try, and the longest pause. It doubles with every try
            that gets no answer.
        jitter: share of a pause that is random, so that many processes do not come back at the same moment.
        hold_after: after so many inputs in a row without an answer, the inputs that no worker has yet wait, too.
        lost_in_a_row: without `on_timeout`: after so many rows in a row that hung or ended their worker, the rest is
            not scored, to save hours.
        alone_failures: without `on_timeout`: after a failed batch call each row is scored alone, until this many rows
            in a row have failed.
        first_tries: with `on_timeout`, if the reward has never answered: number of rows, spread over all, that are
            tried alone before the others. If they get no answer either, the reward hangs by itself.
    """

    on_outage: Literal["raise", "mask", "wait", "stop"] = "raise"
    minutes: float = 30.0
    first_seconds: ClassVar[float] = 1.0
    most_seconds: ClassVar[float] = 15.0
    jitter: ClassVar[float] = 0.5
    hold_after: ClassVar[int] = 8
    lost_in_a_row: ClassVar[int] = 8
    alone_failures: ClassVar[int] = 3
    first_tries: ClassVar[int] = 8

    def is_bug(self, outcome: object, *, has_price: bool = False) -> bool:
        """Return whether the reward failed. An outage is a failure only if the rule is to raise.

        Args:
            has_price: there is an `on_timeout`: a response that breaks its worker is then not a failure of the reward.
        """
        if not isinstance(outcome, Failure) or (has_price and outcome.broke_worker):
            return False
        return not outcome.is_outage or self.on_outage == "raise"


class Outage:
    """Outage of a service, from the first input without an answer until all are scored.

    New tries come in rounds. While the service gives no answer, a round asks a single input, each time another one.
    When it answers, the next round asks all that are missing.

    Attributes:
        reason: the reward's newest message.
        begin: time of the first input without an answer.
        last_answer: time of the last answer, or of the begin.
        asked: inputs that are being asked again.
    """

    def __init__(self, rule: AttemptRule, reason: str, now: float) -> None:
        self.reason, self.begin, self.last_answer, self.asked = reason, now, now, set[Place]()
        self._rule, self._pause, self._probes, self._answered = rule, rule.first_seconds, True, False
        self._next = now + self._jittered()

    def seconds_left(self, now: float) -> float:
        """Return the seconds until the next round is due; infinite while one is under way."""
        return float("inf") if self.asked else max(0.0, self._next - now)

    def begin_round(self, missing: Sequence[Place], *, at_once: bool) -> list[Place]:
        """Return the inputs to ask now.

        Args:
            missing: the inputs without an answer; the one that was asked last comes last.
            at_once: ask all of them in any case.
        """
        places = list(missing) if at_once or not self._probes else list(missing[:1])
        self.asked, self._answered = set(places), False
        return places

    def take(self, place: Place, reason: str | None, now: float) -> None:
        """Note the outcome of an input. `reason`: why there is no result, "" if the service is not the cause."""
        self.reason = reason or self.reason
        self.last_answer = now if reason is None else self.last_answer
        if place not in self.asked:
            return
        self._answered |= reason is None
        self.asked.discard(place)
        if not self.asked:
            was_probe, self._probes = self._probes, not self._answered
            self._pause = self._rule.first_seconds if self._answered else min(2 * self._pause, self._rule.most_seconds)
            self._next = now + (0.0 if self._answered and was_probe else self._jittered())

    def _jittered(self) -> float:
        return self._pause * (1.0 - self._rule.jitter * _chance.random())


class Attempts:
    """Inputs of one reward from its first failure on. It asks nothing by itself, and reads no clock.

    Args:
        places: the inputs; more may come.
        outcomes: the outcomes that are kept so far; the caller keeps what `take` returns.
        batched: the reward gets all inputs in one call.
        on_timeout: parts of the score of an input that breaks its worker twice; empty = it has no score.
        answered: whether the reward has ever answered.

    Attributes:
        missing: inputs that wait for a service, with its newest failure.
        outage: the outage for which they wait; None = there is none.
        stopped: whether the inputs without an outcome will not be scored.
        alone: whether what is asked now is asked alone. fresh: also in a new worker.
    """

    def __init__(
        self,
        rule: AttemptRule,
        places: Collection[Place],
        outcomes: dict[Place, Outcome],
        batched: bool,
        on_timeout: dict[str, float | None],
        answered: bool,
    ) -> None:
        self.missing: dict[Place, Failure] = {}
        self.outage: Outage | None = None
        self.stopped = self.alone = self.fresh = False
        self._rule, self._places, self._outcomes = rule, places, outcomes
        self._batched, self._on_timeout, self._answered = batched, on_timeout, answered
        self._lost = self._silent = self._failed = 0  # newest outcomes in a row: lost workers, outages, failures alone
        self._tried = set[Place]()  # inputs that broke their worker and were scored again alone
        self._tries = self._again()

    @property
    def is_silent(self) -> bool:
        """Return whether many inputs in a row got no answer from the service that is waited for."""
        return self.outage is not None and self._silent >= self._rule.hold_after

    def take(self, place: Place, outcome: Outcome, now: float) -> Outcome | None:
        """Note an outcome. Return it as it is to be kept; None if its input waits for a service."""
        failure = outcome if isinstance(outcome, Failure) else None
        is_down = failure is not None and failure.is_outage and not failure.is_final
        self._answered |= failure is None
        self._silent = self._silent + 1 if is_down else 0
        if not self.alone and not self._batched:
            self._lost = self._lost + 1 if failure is not None and failure.is_lost else 0
            self.stopped = self._lost == self._rule.lost_in_a_row and not self._on_timeout
        if failure is not None and is_down and self._rule.on_outage == "wait":
            self.outage = self.outage or Outage(self._rule, failure.message, now)
            self.outage.take(place, failure.message, now)
            self.missing[place] = failure  # comes last, so that the next try asks another one
            return None
        if self.outage is not None:
            self.outage.take(place, None if failure is None else "", now)
            self.outage = self.outage if self.missing or self.outage.asked else None
        if self.fresh:
            self._tried.add(place)
            return _noted(outcome, f"scored again on its own: {_text(self._outcomes.get(place))}")
        if self.alone:
            if failure is None or not failure.is_outage:  # an outage says nothing about the reward
                self._failed = self._failed + 1 if failure is not None else 0
            return _noted(outcome, "scored on its own, because the batch call failed")
        return outcome

    def hold(self, places: Iterable[Place], now: float) -> None:
        """Let inputs wait for the service that is down, without asking it."""
        for place in places:
            assert self.outage is not None
            self.take(place, Failure(UNAVAILABLE, self.outage.reason), now)

    def due(self, now: float, *, idle: bool, last: bool) -> list[Place]:
        """Return the inputs to ask now; [] if there are none at the moment.

        Args:
            last: no more inputs will come: what must be scored again is scored now.
        """
        if self.stopped:
            return []
        if self.outage is not None and self.missing:
            if self.outage.seconds_left(now) > 0 or (self.alone and not idle):
                return []
            places = self.outage.begin_round(list(self.missing), at_once=self._batched)
            for place in places:
                del self.missing[place]
            return places
        return next(self._tries, []) if idle and last else []

    def finish(self) -> None:
        """Set the final outcome of every input: nothing is asked any more."""
        for place in self._tried if self._on_timeout and self._answered else ():
            if isinstance(failure := self._outcomes[place], Failure) and failure.broke_worker:
                self._outcomes[place] = Result(self._on_timeout, f"{failure.text}; {EARNED}", 0.0)
        rest = Failure("", f"not scored: the worker had been lost {self._rule.lost_in_a_row} times in a row")
        for place in self._places:
            if place not in self._outcomes:
                self._outcomes[place] = self.missing.get(place, rest)

    def _again(self) -> Iterator[list[Place]]:
        """Yield the inputs to score alone. The next ones are for the time when those before have their outcomes."""
        outcomes = self._outcomes
        raised = [o for o in outcomes.values() if isinstance(o, Failure) and not o.is_contract and not o.is_outage]
        if self._batched and 1 < len(self._places) == len(raised):
            self.alone = True
            lost = [place for place, outcome in outcomes.items() if _broke(outcome)]
            places = sorted(self._places)
            for portion in self._portions(places) if self._on_timeout else ([place] for place in places):
                yield portion
                if self._failed >= self._rule.alone_failures and not self._on_timeout:
                    break
            self._tried |= set(lost)
        if self._on_timeout:
            self.alone = self.fresh = True
            lost = [place for place, outcome in outcomes.items() if _broke(outcome) and place not in self._tried]
            yield from self._portions(lost)

    def _portions(self, places: Sequence[Place]) -> Iterator[list[Place]]:
        """Yield the inputs to try: all at once; if the reward has never answered, a few of them and then the others."""
        tries = self._rule.first_tries
        first = [] if self._answered else list(places[:: max(1, len(places) // tries)][:tries])
        if first:
            yield first
        rest = [place for place in places if place not in first]
        if rest and self._answered:
            yield rest


@dataclass(frozen=True)
class Waiting:
    """Inputs that wait for a service, on one rank.

    Args:
        reason: the reward's newest message.
        since: begin of the outage, in seconds since 1970.
        silent_seconds: seconds since the service answered for the last time.
    """

    number: int
    reason: str
    since: float
    silent_seconds: float


class OutageError(RewardUnavailable):
    """Error: an outage ends the work. All ranks raise it together."""


class StepLeftError(Exception):
    """End of a wait, because the run is to stop: the step cannot be finished now. `reason`: why the run stops."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass
class Ranks:
    """Interface of a run for scoring: its ranks, and the messages about outages.

    Args:
        gather: returns the values of the ranks that score together; all of them call it together.
        size: number of these ranks.
        tick: called from time to time during a wait: the watch of the ranks sees that this one is alive.
        say: shows a message to the user; called on all ranks.
        note: records an event with its facts; called on all ranks.
        stop_reason: returns why a wait must end now, or None. All ranks call it together.
        said: (attribute) time of the newest message about the present outage; None = there was none.
    """

    gather: Callable[[Any], list[Any]] = lambda own: [own]
    size: int = 1
    tick: Callable[[], None] = lambda: None
    say: Callable[[str], None] = lambda text: None
    note: Callable[[str, Mapping[str, Any]], None] = lambda event, facts: None
    stop_reason: Callable[[], str | None] = lambda: None
    said: float | None = field(default=None, init=False, repr=False)

    def look_at(self, waiting: Sequence[Waiting], rule: AttemptRule) -> None:
        """Tell the user about an outage. Raise if the wait must end; `waiting` is the same on all ranks.

        Raises: OutageError, StepLeftError.
        """
        worst = max(waiting, key=lambda one: one.silent_seconds)
        number = sum(one.number for one in waiting)
        self.tell(replace(worst, number=number, since=min(one.since for one in waiting)), rule)
        if (reason := self.stop_reason()) is not None:
            raise StepLeftError(reason)
        if worst.silent_seconds > 60 * rule.minutes:
            message = f"the reward was unavailable for {span(worst.silent_seconds)}"
            waiting_for_it = f"{number_of(number, 'sample')} waiting for it"
            raise OutageError(f"{message} ({waiting_for_it}): {last_line(worst.reason)}", hint=HINT)

    def tell(self, waiting: Waiting, rule: AttemptRule) -> None:
        """Show an outage and record it, once and then after every REMIND_SECONDS."""
        now = time.monotonic()
        if self.said is not None and now - self.said < REMIND_SECONDS:
            return
        first, self.said = self.said is None, now
        reason = last_line(waiting.reason)
        since = time.strftime("%H:%M:%S", time.localtime(waiting.since))
        self.say(
            f"{'' if first else 'still '}{WAITS} since {since}: {reason}. The samples so far ({waiting.number}) are "
            f"asked again until it answers; this stops after {rule.minutes:g} min without an answer "
            "(reward.outage_minutes)"
        )
        if first:
            self.note(WAITS, {"reason": reason, "samples": waiting.number})

    def tell_end(self, waited_seconds: float) -> None:
        """Show and record that the service answers again."""
        self.said = None
        self.say("the service answers again, and all samples are scored")
        self.note(ANSWERS, {"waited": round(waited_seconds, 1)})


def _broke(outcome: Outcome) -> bool:
    return isinstance(outcome, Failure) and outcome.broke_worker


def _text(outcome: Outcome | None) -> str:
    return outcome.text if isinstance(outcome, Failure) else ""


def _noted(outcome: Outcome, text: str) -> Outcome:
    """Return a result with an additional note; a failure as it is."""
    return (
        replace(outcome, note="; ".join(filter(None, (outcome.note, text)))) if isinstance(outcome, Result) else outcome
    )


def outage_words(reasons: Iterable[str], number: int, rest: str = "") -> str:
    """Return the outage of so many samples in words: of the environment if all reasons are its own, else the reward."""
    lines = list(dict.fromkeys(map(last_line, reasons)))
    what = "environment" if all(line.startswith(ENVIRONMENT_DOWN) for line in lines) else "reward"
    own = [line.removeprefix(f"{ENVIRONMENT_DOWN}: ") if what == "environment" else line for line in lines]
    words = excerpt("; ".join(own), MOST_REASON_CHARS)
    return f"the {what} was unavailable for {number_of(number, 'sample')}{rest}: {words}"


def last_line(text: str) -> str:
    """Return the last line of a message, cut to MOST_REASON_CHARS."""
    return excerpt(text.strip().rpartition("\n")[2], MOST_REASON_CHARS)
