"""Counts of a judge's service."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Counters:
    """Counts of one service since it began.

    Args:
        calls: calls that were sent, whatever came back.
        cached: requests that the cache answered.
        deduped: requests that shared the call of an equal request in flight.
        retries: calls after the first one of their request.
        invalid: answers that were no verdict.
        unavailable: requests without a verdict, those that score 0 for an outage included.
        opened: times that the circuit opened.
        input_tokens, output_tokens: tokens of answered calls, as the endpoint counts them.
        cost: cost of the calls, by the prices of the settings.
        assumed: calls whose tokens are not known, because no answer came, or one without their number.
        assumed_cost: what they may have cost at most; it is part of `cost`.
        seconds: sum of the durations of the calls.
    """

    calls: int = 0
    cached: int = 0
    deduped: int = 0
    retries: int = 0
    invalid: int = 0
    unavailable: int = 0
    opened: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    assumed: int = 0
    assumed_cost: float = 0.0
    seconds: float = 0.0


class Counting:
    """Counters that several threads read while one adds to them."""

    def __init__(self) -> None:
        self._counters, self._lock = Counters(), threading.Lock()

    def add(self, **more: float) -> None:
        """Add to counters by their names."""
        with self._lock:
            sums = {name: getattr(self._counters, name) + number for name, number in more.items()}
            self._counters = replace(self._counters, **sums)

    def now(self) -> Counters:
        """Return the counts so far."""
        with self._lock:
            return self._counters
