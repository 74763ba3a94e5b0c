"""Outage of a service that a reward needs: when the inputs without a score are asked again, and which of them."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Literal

from vlmrl.rewards.sandbox.outcomes import Place

OnOutage = Literal["raise", "mask", "wait"]
"""Action of a scorer's call when a service is down. raise = it is like a bug: a strict call raises. mask = the input
has no score, and its status is "unavailable". wait = the call stays open, and the input is asked again."""
FIRST_SECONDS, MOST_SECONDS = 1.0, 15.0
"""Pause before the first new try, and the longest pause. It doubles with every try that gets no answer."""
JITTER = 0.5
"""Share of a pause that is random, so that many processes do not come back at the same moment."""
HOLD_AFTER = 8
"""After so many inputs in a row without an answer, the inputs that no worker has yet wait, too."""
_chance = random.Random()  # of its own: the random state of a run must not depend on outages


class Outage:
    """Outage that a call of a scorer has seen, from the first input without an answer until all are scored.

    New tries come in rounds. While the service gives no answer, a round asks a single input, each time another one.
    When it answers, the next round asks all that are missing.

    Attributes:
        reason: the reward's newest message.
        since: begin, in seconds since 1970.
        last_answer: time of the last answer, or of the begin, in seconds of `time.monotonic`.
    """

    def __init__(self, reason: str) -> None:
        self.reason, self.since, self.last_answer = reason, time.time(), time.monotonic()
        self._pause, self._asked, self._probes, self._answered = FIRST_SECONDS, set[Place](), True, False
        self._next = self.last_answer + _jittered(self._pause)

    @property
    def asked(self) -> int:
        """Number of inputs that are being asked again."""
        return len(self._asked)

    @property
    def silent_seconds(self) -> float:
        """Seconds since the service answered for the last time."""
        return time.monotonic() - self.last_answer

    @property
    def seconds_left(self) -> float:
        """Seconds until the next round is due; infinite while one is under way."""
        return float("inf") if self._asked else max(0.0, self._next - time.monotonic())

    def begin_round(self, missing: Sequence[Place], *, at_once: bool) -> list[Place]:
        """Return the inputs to ask now.

        Args:
            missing: the inputs without an answer; the one that was asked last comes last.
            at_once: ask all of them in any case.
        """
        places = list(missing) if at_once or not self._probes else list(missing[:1])
        self._asked, self._answered = set(places), False
        return places

    def wait_longer(self) -> None:
        """Begin the next, longer pause."""
        self._pause = min(2 * self._pause, MOST_SECONDS)
        self._next = time.monotonic() + _jittered(self._pause)

    def take(self, place: Place, *, answered: bool, reason: str | None = None) -> None:
        """Note the outcome of an input. `reason`: the reward's message if the service is down."""
        self.reason = reason or self.reason
        if answered:
            self.last_answer = time.monotonic()
        if place not in self._asked:
            return
        self._answered |= answered
        self._asked.discard(place)
        if not self._asked:
            self._end_round()

    def _end_round(self) -> None:
        was_probe, self._probes = self._probes, not self._answered
        if not self._answered:
            self.wait_longer()
            return
        self._pause = FIRST_SECONDS
        self._next = time.monotonic() + (0.0 if was_probe else _jittered(self._pause))


def _jittered(seconds: float) -> float:
    return seconds * (1.0 - JITTER * _chance.random())
