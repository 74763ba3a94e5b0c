"""Open services of this process: rewards with equal settings share one, and so do their limits and their counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from vlmrl.rewards.worker_code import Service, ServiceFunction, ServicePlace

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
