"""Circuit breaker: after several failures in a row, one request at a time tries the endpoint, with growing pauses."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

FAILURES = 8
"""Failures in a row after which the circuit opens."""
FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0
"""Pause before the first probe, and the longest pause. It doubles with every probe that fails."""


@dataclass(frozen=True)
class Turn:
    """Permission to send one request. `is_probe`: it tries an endpoint that has failed."""

    is_probe: bool


class Breaker:
    """Circuit breaker of one endpoint, for one event loop.

    While the circuit is closed, all requests are sent. While it is open, one probe is sent after each pause. Any answer
    of the endpoint closes it.

    Args:
        failures: failures in a row after which the circuit opens.
        first_seconds, most_seconds: pause before the first probe, and the longest pause.
        rng: source of the jitter: pauses are drawn between half of their length and all of it.
        clock: seconds of a clock that never goes back.

    Attributes:
        opened: number of times that the circuit has opened.
    """

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        first_seconds: float = FIRST_SECONDS,
        most_seconds: float = MOST_SECONDS,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most_failures, self._first, self._most = failures, first_seconds, most_seconds
        self._rng, self._clock = rng or random.Random(), clock
        self._failures, self._pause, self._next, self._is_probing = 0, first_seconds, 0.0, False
        self._closed = asyncio.Event()
        self._closed.set()
        self.opened = 0

    @property
    def is_open(self) -> bool:
        """Whether requests wait for a probe."""
        return not self._closed.is_set()

    def take(self) -> Turn | None:
        """Return the turn of a request that may be sent now; None while the circuit is open and no probe is due.

        Whoever takes a turn must end it with `answer`, `fail` or `leave`.
        """
        if not self.is_open:
            return Turn(is_probe=False)
        if self._is_probing or self._clock() < self._next:
            return None
        self._is_probing = True
        return Turn(is_probe=True)

    def answer(self) -> None:
        """Note that the endpoint has answered: the circuit closes."""
        self._failures, self._pause, self._is_probing = 0, self._first, False
        self._closed.set()

    def fail(self, turn: Turn) -> bool:
        """Note a failure. Return whether it has opened the circuit."""
        if self.is_open:
            if turn.is_probe:
                self._pause = min(2 * self._pause, self._most)
                self._plan()
                self._is_probing = False
            return False
        self._failures += 1
        if self._failures < self._most_failures:
            return False
        self._closed.clear()
        self.opened += 1
        self._plan()
        return True

    def leave(self, turn: Turn) -> None:
        """Note that a request says nothing about the endpoint: it was not sent, was cancelled, or met a busy server."""
        self._is_probing = self._is_probing and not turn.is_probe

    async def wait(self, seconds: float) -> None:
        """Wait, at most until the circuit closes if it is open."""
        if not self.is_open:
            await asyncio.sleep(seconds)
            return
        with suppress(asyncio.TimeoutError, TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)

    def seconds_left(self) -> float:
        """Return the seconds until the next probe is due."""
        return max(0.0, self._next - self._clock())

    def _plan(self) -> None:
        self._next = self._clock() + self._pause * self._rng.uniform(0.5, 1.0)
