"""Responses that a service scores: the methods of the pool of workers, for rewards that answer later.

Rewards of one process with equal settings share one open service, and so its limits and its counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Any

from vlmrl.rewards.base import NO_PLACE, Service, ServiceFunction, ServicePlace
from vlmrl.rewards.outcomes import Failure, Outcome, Place, failure_of, result_of
from vlmrl.types import RewardInput, RewardResult
from vlmrl.workers.frames import UNAVAILABLE

_open: dict[tuple[int, str], tuple[Service, int]] = {}
"""(process, function and place) -> the open service, and the number of its users."""


def take_service(runs: ServiceFunction, place: ServicePlace) -> Service:
    """Return the open service of equal settings, or open it. Whoever takes it calls `leave_service` once."""
    key = _key(runs, place)
    service, users = _open[key] if key in _open else (runs.open(place), 0)
    _open[key] = service, users + 1
    return service


def leave_service(service: Service) -> None:
    """End the use of a service. The last one closes it."""
    key = next((key for key, (one, _) in _open.items() if one is service), None)
    if key is None or key[0] != os.getpid():  # of the process that this one was forked from
        return
    users = _open[key][1] - 1
    _open[key] = service, users
    if not users:
        del _open[key]
        service.close()


@contextmanager
def opened(runs: ServiceFunction, place: ServicePlace) -> Iterator[Service]:
    """Context manager: the service, while it is used."""
    service = take_service(runs, place)
    try:
        yield service
    finally:
        leave_service(service)


class ServiceMeter:
    """Counts of the services of several scorers. A service that scorers share counts once.

    Attributes:
        total: metric -> number since the begin.
        last: one of the services that were read.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Service, dict[str, float]]] = {}  # the service is kept: its id stays its own
        self.total: dict[str, float] = {}
        self.last: Service | None = None

    def read(self, services: Iterable[Service]) -> dict[str, float]:
        """Return metric -> number since the last call, and add it to `total`. {} if no service is open."""
        new: dict[str, float] = {}
        for service in {id(service): service for service in services}.values():
            counts, (_, before) = dict(service.counts()), self._seen.get(id(service), (service, {}))
            self._seen[id(service)], self.last = (service, counts), service
            for name, number in counts.items():
                new[name] = new.get(name, 0) + number - before.get(name, 0)
        for name, number in new.items():
            self.total[name] = self.total.get(name, 0) + number
        return new


def summary_of(services: Iterable[Service], gather: Callable[[Any], list[Any]] = lambda own: [own]) -> str:
    """Return the counts of open services in one line for people; "" if none was asked.

    Args:
        gather: returns the values of all ranks; all of them call this function together.
    """
    meter = ServiceMeter()
    meter.read(services)
    sums: dict[str, float] = {}
    for counts in gather(meter.total):
        for name, number in counts.items():
            sums[name] = sums.get(name, 0) + number
    return meter.last.summary(sums) if meter.last is not None else ""


def _key(runs: ServiceFunction, place: ServicePlace) -> tuple[int, str]:
    fields = [runs.module, runs.function, dict(runs.args), place.folder, place.account]
    return os.getpid(), json.dumps(fields, sort_keys=True, default=str)


Answer = tuple[Place, Future[RewardResult]]


class ServicePool:
    """Requests to the service of a reward. It is opened with the first one, in the process that asks.

    Attributes:
        runs: the reward.
        service: the open service; None before the first request.
        size: number of requests of a group that are sent at a time: all.
    """

    def __init__(self, runs: ServiceFunction, place: ServicePlace = NO_PLACE) -> None:
        self.runs, self.size, self._place = runs, 1, place
        self.service: Service | None = None
        self._pid = 0
        self._waiting: dict[Place, Future[RewardResult]] = {}
        self._begun: dict[Place, float] = {}
        self._answers: SimpleQueue[Answer] = SimpleQueue()

    @property
    def pending(self) -> bool:
        """Return whether requests have no answer yet."""
        return bool(self._waiting)

    @property
    def transfers(self) -> bool:
        """Return False: nothing is on its way in a pipe."""
        return False

    def begin(self, *, fresh: bool = False) -> None:
        """Forget the requests of an earlier call."""
        self._cancel()

    def add(self, batches: Sequence[Sequence[Place]], inputs: Mapping[Place, RewardInput]) -> None:
        """Send requests. Does not wait."""
        places = [place for batch in batches for place in batch]
        if self.service is None or self._pid != os.getpid():
            self.service, self._pid = take_service(self.runs, self._place), os.getpid()
        now, answers = time.monotonic(), self._answers
        for place, future in zip(places, self.service.submit([inputs[p] for p in places]), strict=True):
            self._waiting[place], self._begun[place] = future, now
            future.add_done_callback(lambda done, place=place: answers.put((place, done)))

    def hold(self) -> list[Place]:
        """Return []: every request is with the service."""
        return []

    def advance(self, seconds: float | None = None) -> list[tuple[Place, Outcome]]:
        """Wait for an answer, at most `seconds` (None = until there is one), and return all that are there."""
        outcomes: list[tuple[Place, Outcome]] = []
        try:
            answer = self._answers.get(timeout=seconds) if seconds != 0 else self._answers.get_nowait()
            while True:
                outcomes += self._taken(*answer)
                answer = self._answers.get_nowait()
        except Empty:
            return outcomes

    def pids(self) -> list[int]:
        """Return this process."""
        return [os.getpid()]

    def close(self) -> None:
        """End the service. The pool can be used again."""
        self._cancel()
        service, self.service = self.service, None
        if service is not None:
            leave_service(service)

    def _cancel(self) -> None:
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()
        self._answers = SimpleQueue()

    def _taken(self, place: Place, future: Future[RewardResult]) -> list[tuple[Place, Outcome]]:
        if self._waiting.pop(place, None) is not future:
            return []  # of an earlier call
        return [(place, outcome_of(future, time.monotonic() - self._begun.pop(place)))]


def outcome_of(future: Future[RewardResult], seconds: float) -> Outcome:
    """Return the outcome of a future that is done: a result, or the reason why there is none."""
    try:
        return result_of(future.result(), seconds)
    except CancelledError:
        return Failure(UNAVAILABLE, "the request was cancelled")
    except Exception as error:
        return failure_of(error)


def first_result(runs: ServiceFunction) -> Callable[[RewardInput], Any]:
    """Return the reward as a function of one response, for tools and tests: it opens the service at each call."""

    def score(x: RewardInput) -> RewardResult:
        service = runs.open(NO_PLACE)
        try:
            return service.submit([x])[0].result()
        finally:
            service.close()

    return score
