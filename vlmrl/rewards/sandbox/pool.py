"""Workers of a reward: started when there is work, watched by the clock, replaced when they are lost.

One thread and one `select` loop serve all workers. An answer is accepted only if it matches the request: its number,
the item that is due, and the process that was started. A worker that sends anything else counts as lost, like one that
has ended. A row on which a worker is lost is sent once more, to a new worker, if the lost worker had answered before:
an alarm, a thread or a child of an earlier row may have caused it. If the second worker is lost too, the row itself is
the cause.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from vlmrl.errors import RewardError, RewardUnavailable
from vlmrl.process import has_terminal, patience
from vlmrl.rewards.base import part_name
from vlmrl.rewards.file_limit import LEFT_OUT, FileLimit
from vlmrl.rewards.sandbox.frames import (
    BROKEN,
    CONTRACT,
    LOST_PIPE,
    MOST_PROCESSES,
    UNAVAILABLE,
    WHOLE,
    Frame,
    GarbledError,
)
from vlmrl.rewards.sandbox.results import read_artifacts, read_detail
from vlmrl.rewards.sandbox.worker_handle import LOAD_SECONDS, Worker
from vlmrl.rewards.worker_code import UserReward, WorkerReward
from vlmrl.types import Media, RewardInput

ONE_VOICE = "only the return value may be an answer: look for os.write, os.fork, os.dup2 and the like"


@dataclass(frozen=True)
class Result:
    """Result of the function for one input.

    Args:
        parts: checked parts.
        seconds: time that the function took.
        detail: as a JSON value.
        artifacts: references by name.
        files: image files by sha256.
    """

    parts: dict[str, float | None]
    note: str
    seconds: float
    detail: Any = None
    artifacts: Mapping[str, Media] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of its images."""
        return sum(map(len, self.files.values()))

    def without_images(self) -> Result:
        """Return the result without its images, and with a note that says so."""
        note = "; ".join(filter(None, (self.note, LEFT_OUT)))
        return replace(self, note=note, artifacts={}, files={}) if self.files else self


@dataclass(frozen=True)
class Failure:
    """Reason why there is no result.

    Args:
        kind: the exception's class; CONTRACT if the result is not a score; UNAVAILABLE if a service is down; "" if the
            worker was lost.
        lines: the user's own lines of the traceback.
        output: text that the function printed during that call.
    """

    kind: str
    message: str
    lines: tuple[str, ...] = ()
    hint: str | None = None
    output: str = ""
    size = 0

    def without_images(self) -> Failure:
        """Return itself: it has no images."""
        return self

    def __str__(self) -> str:
        line = f" ({self.lines[-1].partition(' in ')[0]})" if self.lines else ""
        return (self.raised or self.message) + line

    @property
    def raised(self) -> str:
        if self.kind in ("", CONTRACT, UNAVAILABLE):
            return ""
        return f"{self.kind}: {self.message}".removesuffix(": ")

    @property
    def is_lost(self) -> bool:
        """Whether the response hung or ended its worker."""
        return self.kind == ""


Outcome = Result | Failure


def as_error(failure: Failure, name: str, where: str | None = None) -> RewardError:
    """Return a failure as the error for the user: the exception, the user's lines, the output.

    If a service is down, it is the reward's own message.
    """
    if failure.kind == UNAVAILABLE:
        hint = failure.hint or "start the service that it needs, then begin again; this is not a bug of the reward"
        return RewardUnavailable(f"reward `{name}` is unavailable: {failure.message}", where=where, hint=hint)
    verb_phrase = f"raised {failure.raised}" if failure.raised else f"failed: {failure.message}"
    lines = "".join(f"\n    {line}" for line in failure.lines)
    printed = "".join(f"\n    {line}" for line in failure.output.strip().splitlines()[-5:])
    printed = f"\n  it had printed:{printed}" if printed else ""
    return RewardError(f"reward `{name}` {verb_phrase}{lines}{printed}", where=where, hint=failure.hint)


class WorkerPool:
    """Up to `size` workers of one reward; started when there is work, ended by `close`."""

    def __init__(self, runs: WorkerReward, *, size: int, memory_mb: int, timeout_seconds: float) -> None:
        self.runs, self.memory_mb, self.timeout = runs, memory_mb, timeout_seconds
        self.size = 1 if has_terminal() else size
        self._workers: list[Worker] = []
        self._asked_again: dict[int, str] = {}
        self._fresh = False

    def run(
        self,
        batches: Sequence[Sequence[int]],
        inputs: Sequence[RewardInput],
        stop: Callable[[Outcome], bool],
        *,
        fresh: bool = False,
        limit: FileLimit | None = None,
    ) -> dict[int, Outcome]:
        """Score the inputs of `batches`, one request for each batch of indices.

        Args:
            stop: called with every outcome; True ends the run early.
            fresh: each request gets a worker that has had no other one.
            limit: limit of the images; None = all are kept.
        Raises: RewardError when the user's file cannot be loaded.
        """
        queue, outcomes = deque(list(b) for b in batches if b), {}
        self._asked_again, self._fresh = {}, fresh
        try:
            while queue or any(w.busy for w in self._workers):
                self._feed(queue, inputs)
                for worker in self._wait():
                    for index, outcome in self._answers(worker, queue):
                        outcomes[index] = outcome
                        for dropped in limit.add(index, outcome.size) if limit is not None else ():
                            if dropped in outcomes:
                                outcomes[dropped] = outcomes[dropped].without_images()
                        if stop(outcome):
                            self.close()
                            return outcomes
        except BaseException:
            self.close()
            raise
        return outcomes

    def describe(self) -> dict[str, Any]:
        """Return facts about the function that a worker found: style, batched, needs_images, weights, ranges."""
        worker = self._start()
        while worker.loaded is None:
            for ready in self._wait():
                list(self._answers(ready, deque()))
        return worker.loaded

    def pids(self) -> list[int]:
        """Return the workers that are running and have loaded the reward."""
        return [worker.pid for worker in self._workers if worker.pid]

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def _start(self) -> Worker:
        worker = Worker(self.runs, self.memory_mb)
        self._workers.append(worker)
        return worker

    def _feed(self, queue: deque[list[int]], inputs: Sequence[RewardInput]) -> None:
        idle = [w for w in self._workers if not w.busy and w.loaded is not None]
        for worker in [w for w in idle if w.has_ended or (self._fresh and w.request)]:
            self._workers.remove(worker)
            worker.end()
        num_workers = min(self.size, len(queue) + sum(bool(w.busy) for w in self._workers))
        while len(self._workers) < num_workers:
            self._start()
        for worker in self._workers:
            if queue and worker.loaded is not None and not worker.busy:
                worker.assign(queue.popleft(), inputs, self.timeout)

    def _wait(self) -> list[Worker]:
        """Sleep until something happens. Return the workers that answered, ended or ran out of time."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.response_fd, selectors.EVENT_READ, worker)
                if worker.output_open:
                    selector.register(worker.output_fd, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.request_fd, selectors.EVENT_WRITE, worker)
            pending = [w.deadline for w in self._workers if w.busy or w.loaded is None]
            events = selector.select(max(0.0, min(pending, default=0.0) - time.monotonic()))
        ready: dict[int, Worker] = {}
        for key, _ in events:
            worker: Worker = key.data
            if key.fd == worker.request_fd:
                worker.send()
            elif key.fd == worker.output_fd:
                worker.drain()
            else:
                ready[id(worker)] = worker
        now = time.monotonic()
        late = {id(w): w for w in self._workers if (w.busy or w.loaded is None) and now >= w.deadline}
        return list({**late, **ready}.values())

    def _answers(self, worker: Worker, queue: deque[list[int]]) -> list[tuple[int, Outcome]]:
        """Return the outcomes that follow from a worker's answers, from its end, or from its timeout."""
        alive, outcomes = worker.receive(), []
        try:
            while (frame := worker.frame()) is not None:
                _check(frame, worker)
                outcomes += self._answer(worker, frame)
        except GarbledError as error:
            worker.drain()
            message = f"its worker's pipe had a wrong message: {error}"
            return [
                *outcomes,
                *self._lost(worker, queue, Failure("", message, (), ONE_VOICE, worker.printed), again=True),
            ]
        if not alive:
            return [*outcomes, *self._lost(worker, queue, None, again=True)]
        if (worker.busy or worker.loaded is None) and time.monotonic() >= worker.deadline:
            worker.drain()
            return [*outcomes, *self._lost(worker, queue, self._timeout(worker), again=False)]
        return outcomes

    def _lost(
        self, worker: Worker, queue: deque[list[int]], failure: Failure | None, *, again: bool
    ) -> list[tuple[int, Outcome]]:
        """End a worker that cannot be used any more. Return the outcomes of the rows that were lost with it.

        Args:
            failure: the reason; None = it has ended by itself, and its keeper tells how.
            again: an earlier row may be the cause, so the current row is sent once more.
        """
        self._workers.remove(worker)
        ending = worker.end(ask=failure is None)
        failure = failure or _crash(ending, worker.printed)
        if worker.loaded is None:
            raise as_error(failure, _name_of(self.runs), self.runs.file)
        if not worker.busy:
            return []
        lost = worker.busy if self.runs.batched else worker.busy[:1]
        if rest := worker.busy[len(lost) :]:
            queue.appendleft(rest)
        if again and worker.answered and lost[0] not in self._asked_again:
            self._asked_again |= dict.fromkeys(lost, failure.message)
            queue.appendleft(lost)
            return []
        return [(index, failure) for index in lost]

    def _answer(self, worker: Worker, frame: Frame) -> list[tuple[int, Outcome]]:
        """Return the outcomes of an answer. Raises: GarbledError for one that cannot be read."""
        answer = frame.body
        if "loaded" in answer:
            worker.loaded, worker.pid = answer["loaded"], frame.pid
            return []
        worker.drain()
        if "fatal" in answer:
            raise as_error(_failure(answer["fatal"], worker), _name_of(self.runs), self.runs.file)
        worker.deadline = time.monotonic() + patience(self.timeout)
        if "failed" in answer:
            indices, worker.busy = worker.busy, []
            worker.answered += len(indices)
            return [(index, _failure(answer["failed"], worker)) for index in indices]
        outcome = _failure(answer["error"], worker) if "error" in answer else _result(answer, frame.blobs)
        index = worker.busy.pop(0)
        worker.item, worker.answered = worker.item + 1, worker.answered + 1
        worker.forget_output()
        if isinstance(outcome, Result) and index in self._asked_again:
            note = f"asked again: {self._asked_again[index]}"
            outcome = replace(outcome, note="; ".join(filter(None, (outcome.note, note))))
        return [(index, outcome)]

    def _timeout(self, worker: Worker) -> Failure:
        if worker.loaded is None:
            return Failure("", f"the file was not imported within {LOAD_SECONDS:g} s", output=worker.printed)
        hint = "make it faster, or raise [reward] timeout_seconds"
        return Failure("", f"no answer within {self.timeout:g} s; its worker was ended", (), hint, worker.printed)


def _name_of(runs: WorkerReward) -> str:
    """Return the reward's name in messages."""
    return runs.function if isinstance(runs, UserReward) else runs.name


def inspect_user_reward(user: UserReward, *, memory_mb: int = 4096) -> dict[str, Any]:
    """Import the user's file in a worker and return the facts about its function (see `WorkerPool.describe`)."""
    pool = WorkerPool(user, size=1, memory_mb=memory_mb, timeout_seconds=LOAD_SECONDS)
    try:
        return pool.describe()
    finally:
        pool.close()


def _check(frame: Frame, worker: Worker) -> None:
    """Raise a GarbledError unless the frame is the answer that is due from this worker."""
    if worker.loaded is None:
        if frame.request or not frame.body.keys() & {"loaded", "fatal"}:
            raise GarbledError("it came before the file was imported")
    elif frame.pid != worker.pid:
        raise GarbledError(f"process {frame.pid} wrote it, which is not its worker ({worker.pid})")
    elif not worker.busy:
        raise GarbledError("it is an answer, but no request is pending")
    elif frame.request != worker.request:
        raise GarbledError(f"it answers request {frame.request}, not {worker.request}")
    elif frame.item != (WHOLE if "failed" in frame.body else worker.item):
        raise GarbledError(f"it answers item {frame.item}, not {worker.item}")


def _result(answer: dict[str, Any], blobs: Sequence[bytes]) -> Outcome:
    parts, note, seconds, detail = (answer.get(name) for name in ("parts", "note", "seconds", "detail"))
    if not isinstance(parts, dict) or not all(v is None or isinstance(v, float) for v in parts.values()):
        raise GarbledError(f"its parts are not numbers: {str(parts)[:200]}")
    if not isinstance(note, str) or not isinstance(seconds, float):
        raise GarbledError(f"it is not a score: {str(answer)[:200]}")
    names = answer.get("artifacts", [])
    if not isinstance(detail, str | None) or not isinstance(names, list) or len(names) != len(blobs):
        raise GarbledError(f"its images have no names: {str(answer)[:200]}")
    try:
        artifacts, files = read_artifacts({part_name(n, "artifact"): b for n, b in zip(names, blobs, strict=True)})
        return Result(parts, note, seconds, read_detail(detail), artifacts, files)
    except RewardError as error:
        return Failure(CONTRACT, error.message, hint=error.hint)


def _failure(error: dict[str, Any], worker: Worker) -> Failure:
    return Failure(error["kind"], error["message"], tuple(error["lines"]), error["hint"], worker.printed)


def _crash(ending: str, printed: str) -> Failure:
    """Return the reason why a worker ended by itself, from its keeper's word (keeper.py)."""
    word, _, number = ending.partition(" ")
    if word == "signal":
        name = _signal_name(int(number))
        hint = "it may be out of memory: see [reward] memory_mb" if name in ("SIGKILL", "SIGABRT", "SIGSEGV") else None
        return Failure("", f"its worker process was ended by {name}", (), hint, printed)
    if word == "crowd":
        message = f"more than {MOST_PROCESSES} processes ran below its worker, which was ended with all of them"
        return Failure("", message, (), "end every process that a call starts before it returns", printed)
    if word == "alive" or number == str(LOST_PIPE):
        return Failure("", "it closed or took over the pipes through which its worker answers", (), ONE_VOICE, printed)
    if number == str(BROKEN):
        hint = "does it replace functions of the standard library? keep such changes inside the call"
        return Failure("", "it changed its worker's Python so much that the worker cannot continue", (), hint, printed)
    message = f"it ended its worker process with exit code {number}" if word else "its worker process was killed"
    return Failure("", message, (), None, printed)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
