"""Attempts of one request: how long to wait before the next one, and when to give up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from vlmrl.endpoint.failures import EndpointError
from vlmrl.judge.failures import JudgeDown
from vlmrl.judge.settings import JudgeSettings

FIRST_SECONDS, MOST_SECONDS = 1.0, 30.0
"""Pause before the second attempt, and the longest pause without a Retry-After. It doubles with each attempt."""
MOST_RETRY_AFTER = 120.0
"""Longest pause that an endpoint can wish, in seconds."""
OPEN = "the judge has failed several times in a row, and one request at a time tries it again"


@dataclass(frozen=True)
class Pauses:
    """Lengths of pauses in seconds; tests take short ones."""

    first: float = FIRST_SECONDS
    most: float = MOST_SECONDS
    most_retry_after: float = MOST_RETRY_AFTER


class Attempts:
    """Attempts of one request.

    Args:
        settings: the number of attempts, and whether an outage is waited for.
        pauses: lengths of the pauses.
        rng: source of the jitter: pauses are drawn between half of their length and all of it.
        clock: seconds of a clock that never goes back.

    Attributes:
        failed: number of attempts so far that failed, or could not be sent because the circuit is open.
    """

    def __init__(
        self,
        settings: JudgeSettings,
        pauses: Pauses,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._pauses, self._rng, self._clock = settings, pauses, rng, clock
        self.failed, self._since = 0, 0.0

    def pause_after(self, failure: EndpointError | None) -> float:
        """Return the pause before the next attempt, in seconds.

        Args:
            failure: failure of this attempt; None = it was not sent, because the circuit is open.
        Raises: JudgeDown when there is no further attempt.
        """
        now = self._clock()
        self._since = self._since if self.failed else now
        self.failed += 1
        waits = self._settings.outage == "wait"
        limit = 60 * self._settings.outage_minutes
        if now - self._since >= limit if waits else self.failed >= self._settings.attempts:
            message = failure.message if failure is not None else OPEN
            times = f"{self.failed} attempts" if self.failed > 1 else "1 attempt"
            where = failure.where if failure is not None else None
            raise JudgeDown(f"the judge gave no verdict in {times}: {message}", where=where)
        whole = min(self._pauses.first * 2 ** min(self.failed - 1, 30), self._pauses.most)
        wished = min(failure.retry_after, self._pauses.most_retry_after) if failure is not None else 0.0
        # The jitter comes on top of a Retry-After: otherwise all requests would come back at the same moment.
        return wished + whole * self._rng.uniform(0.5, 1.0)
