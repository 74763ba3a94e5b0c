"""Responses that a service scores: the same methods as the pool of workers, for rewards that answer later."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from queue import Empty, SimpleQueue
from typing import Any

from vlmrl.rewards.base import check_parts, split_result
from vlmrl.rewards.open_services import leave_service, take_service
from vlmrl.rewards.sandbox.frames import UNAVAILABLE
from vlmrl.rewards.sandbox.outcomes import Failure, Outcome, Place, Result, failure_of
from vlmrl.rewards.sandbox.results import artifact_files, read_artifacts
from vlmrl.rewards.worker_code import NO_PLACE, Service, ServiceFunction, ServicePlace
from vlmrl.types import RewardInput, RewardResult

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

    def run(
        self,
        batches: Sequence[Sequence[Place]],
        inputs: Mapping[Place, RewardInput],
        stop: Callable[[Outcome], bool] = lambda outcome: False,
        *,
        fresh: bool = False,
    ) -> dict[Place, Outcome]:
        """Send requests and wait for all answers; see `WorkerPool.run`."""
        outcomes: dict[Place, Outcome] = {}
        self.begin(fresh=fresh)
        self.add(batches, inputs)
        while self.pending:
            for place, outcome in self.advance():
                outcomes[place] = outcome
                if stop(outcome):
                    self._cancel()
                    return outcomes
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
        parts, note, detail, images = split_result(future.result())
        artifacts, files = read_artifacts(artifact_files(images)) if images else ({}, {})
        return Result(check_parts(parts, {}), note, seconds, detail, artifacts, files)
    except CancelledError:
        return Failure(UNAVAILABLE, "the request was given up")
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
