"""Workers of a reward: started when there is work, watched by the clock, replaced when they are lost.

One thread and one `select` loop serve all workers. `run` stays in that loop until all rows are done. A caller with
other work in the same thread uses `begin` and `add`, and calls `advance` again and again.

An answer is accepted only if it matches the request: its number, the item that is due, and the process that was
started. A worker that sends anything else counts as lost, like one that has ended. A row on which a worker is lost is
sent once more, to a new worker, if the lost worker had answered before: an alarm, a thread or a child of an earlier row
may have caused it. If the second worker is lost too, the row itself is the cause.

A worker's descriptors have high numbers on both sides. So a standard descriptor that was closed (`vlmrl check <&-`) is
never taken for a pipe, and a reward that writes to all low descriptors reaches none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.process import has_terminal, kill_all, marked, patience, send
from vlmrl.redaction.redact import CUT_MARGIN, excerpt
from vlmrl.rewards.base import UserReward, WorkerReward, part_name
from vlmrl.rewards.outcomes import Failure, Outcome, Place, Result, as_error, read_artifacts, read_detail
from vlmrl.types import RewardInput
from vlmrl.workers.frames import (
    ASK,
    BROKEN,
    CONTRACT,
    END,
    LOST_PIPE,
    MOST_ANSWER_BYTES,
    MOST_BLOB_BYTES,
    MOST_PROCESSES,
    TOKEN_BYTES,
    WHOLE,
    Frame,
    FrameBuffer,
    GarbledError,
    pack_frame,
)
from vlmrl.workers.images import HELD_SHARE, HeldImages, ImageKeys

LOAD_SECONDS = 60.0
"""Minimum time limit for importing the user's file, in seconds of wall clock."""
OUTPUT_BYTES = 4096
"""Number of bytes of a reward's output that are kept to be shown with its error."""
MOST_READ_BYTES = 1 << 20
"""Maximum number of bytes to read from a channel at once: a reward that prints without end must not block the pool."""
END_SECONDS = 30.0
"""Longest wait for a keeper to end its processes."""
LOWEST_FD, LAST_RESORT_FD = 200, 3
SENT = (
    "response",
    "truth",
    "columns",
    "finish",
    "num_tokens",
    "prompt",
    "token_ids",
    "step",
    "prompt_id",
    "sample",
    "seen_sizes",
)
"""Fields of a RewardInput that are sent as they are.

Images are sent as pixels (images.py), references and turns as JSON objects.
"""
MOST_MARK = 1 << 62
BOOT = "import sys; sys.path[:] = sys.argv[6:]; from vlmrl.rewards.keeper import main; main(*map(int, sys.argv[1:6]))"


class Worker:
    """Worker and its keeper (keeper.py).

    Attributes:
        busy: places of the inputs that it has not answered yet.
        deadline: time at which it will be ended.
        request: number of its current request.
        item: index of the next answer.
        answered: number of items of all requests so far.
        loaded: facts about the function; None until the file is imported.
        sent_bytes: bytes of all requests so far.
        pid: process id of the worker itself.
    """

    def __init__(self, runs: WorkerReward, memory_mb: int) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        request_read, self.request_fd = _pipe()
        self.response_fd, response_write = _pipe()
        self.output_fd, output_write = _pipe()
        self._control, control = (_raised(end.detach()) for end in socket.socketpair())
        passed_fds = (request_read, response_write, control)
        self._mark = secrets.randbelow(MOST_MARK)
        argv = [sys.executable, "-c", BOOT, *map(str, (*passed_fds, os.getpid(), self._mark)), *sys.path]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        stdin, printed = (None, None) if has_terminal() else (subprocess.DEVNULL, output_write)
        try:
            self._keeper = subprocess.Popen(
                argv, stdin=stdin, stdout=printed, stderr=printed, pass_fds=passed_fds, env=env, start_new_session=True
            )
        finally:
            for fd in (*passed_fds, output_write):
                os.close(fd)
        for fd in (self.request_fd, self.response_fd, self.output_fd):
            os.set_blocking(fd, False)
        self._frames = FrameBuffer(self._token, (MOST_ANSWER_BYTES, MOST_BLOB_BYTES))
        self._output, self.output_open = b"", True
        self.loaded: dict[str, Any] | None = None
        self.busy: list[Place] = []
        self.pid = self.request = self.answered = self.item = self.sent_bytes = 0
        self._held = HeldImages((memory_mb << 20) // HELD_SHARE)
        self.deadline = time.monotonic() + patience(LOAD_SECONDS)
        kind = "user" if isinstance(runs, UserReward) else "builtin"
        load = pack_frame(
            self._token, 0, WHOLE, os.getpid(), {"op": "load", kind: asdict(runs), "memory_mb": memory_mb}
        )
        self.unsent = memoryview(self._token + load)

    @property
    def printed(self) -> str:
        """End of the output since the last answer."""
        return excerpt(self._output.decode(errors="replace"), OUTPUT_BYTES, end=True)

    @property
    def receiving(self) -> bool:
        """Return whether a part of an answer has arrived, and the rest has not."""
        return self._frames.has_part

    @property
    def has_ended(self) -> bool:
        return self._keeper.poll() is not None

    def assign(
        self, places: Sequence[Place], inputs: Mapping[Place, RewardInput], keys: ImageKeys, timeout: float
    ) -> None:
        """Queue one request. The clock starts now. Images that the worker has are not sent again."""
        self.busy, self._output = list(places), b""
        self.request, self.item = self.request + 1, 0
        own = [inputs[place] for place in places]
        parcel, items = self._held.parcel(own, keys), []
        for x, of_x in zip(own, parcel.keys, strict=True):
            item = {name: getattr(x, name) for name in SENT}
            item |= {"media": [asdict(m) for m in x.media], "turns": [asdict(turn) for turn in x.turns]}
            items.append({**item, "images": of_x})
        body = {"op": "score", "items": items, "sent": parcel.sent, "dropped": parcel.dropped}
        self.unsent = memoryview(pack_frame(self._token, self.request, WHOLE, os.getpid(), body, parcel.blobs))
        self.sent_bytes += len(self.unsent)
        self.deadline = time.monotonic() + patience(timeout)

    def send(self) -> None:
        """Write as much as the pipe takes. A closed pipe is noticed by `receive`."""
        try:
            self.unsent = self.unsent[os.write(self.request_fd, self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent = memoryview(b"")

    def receive(self) -> bool:
        """Read what has arrived. Return False if no process holds the other end any more."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.response_fd, MOST_READ_BYTES)
            self._frames.feed(data)
            return bool(data)
        return True

    def frame(self) -> Frame | None:
        """Return the next whole frame. Raises: GarbledError."""
        return self._frames.pop()

    def drain(self) -> None:
        """Keep the end of the function's output. If it prints without end, read only what fits MOST_READ_BYTES."""
        total = 0
        with contextlib.suppress(BlockingIOError):
            while total < MOST_READ_BYTES and (data := os.read(self.output_fd, 1 << 16)):
                total += len(data)
                self._output = (self._output + data)[-OUTPUT_BYTES - CUT_MARGIN :]
            self.output_open = total > 0

    def forget_output(self) -> None:
        """Drop the output: it belongs to the answer that has come."""
        self._output = b""

    def end(self, *, ask: bool = False) -> str:
        """End the process and all that it started, and close the channels.

        Args:
            ask: the worker seems to have ended by itself: its keeper waits a moment to see how.
        Returns: how it ended, in the keeper's words (keeper.py); "" if even the keeper was killed.
        """
        word = b""
        with contextlib.suppress(OSError):
            os.write(self._control, ASK if ask else END)
        try:
            self._keeper.wait(END_SECONDS)
            with contextlib.suppress(OSError):
                word = os.read(self._control, 100)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if not word:  # the keeper was killed
            send({-self.pid} if self.pid else (), signal.SIGKILL)
            until = time.monotonic() + END_SECONDS
            while kill_all(lambda: marked(self._mark)) and time.monotonic() < until:
                time.sleep(0.001)
        self.drain()
        for fd in (self.request_fd, self.response_fd, self.output_fd, self._control):
            os.close(fd)
        return word.decode()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, as descriptors that are no standard ones."""
    read, write = os.pipe()
    return _raised(read), _raised(write)


def _raised(fd: int) -> int:
    """Return the same file under a high descriptor that is not inherited; `fd` is closed."""
    for lowest in (LOWEST_FD, LAST_RESORT_FD):
        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
            break
        except OSError:  # the limit of open files is low
            if lowest == LAST_RESORT_FD:
                raise
    os.close(fd)
    return high


MOST_NOTE_CHARS, MOST_MESSAGE_CHARS, MOST_LINE_CHARS = 2000, 1000, 400
"""Maximum numbers of characters that are kept of a note, of an error, and of a line of code."""
AWAY_SECONDS = 1.0
"""Longest pause between two calls of a pool that counts for the time limits of its workers, in seconds."""
ONE_VOICE = "only the return value may be an answer: look for os.write, os.fork, os.dup2 and the like"


class WorkerPool:
    """Up to `size` workers of one reward; started when there is work, ended by `close`."""

    def __init__(self, runs: WorkerReward, *, size: int, memory_mb: int, timeout_seconds: float) -> None:
        self.runs, self.memory_mb, self.timeout = runs, memory_mb, timeout_seconds
        self.size = 1 if has_terminal() else size
        self._workers: list[Worker] = []
        self.begin()

    @property
    def pending(self) -> bool:
        """Return whether an input that was added has no outcome yet."""
        return bool(self._queue) or any(w.busy for w in self._workers)

    @property
    def transfers(self) -> bool:
        """Return whether a part of a request or of an answer is on its way."""
        return any(w.busy and (w.unsent or w.receiving) for w in self._workers)

    def run(
        self,
        batches: Sequence[Sequence[Place]],
        inputs: Mapping[Place, RewardInput],
        stop: Callable[[Outcome], bool] = lambda outcome: False,
        *,
        fresh: bool = False,
    ) -> dict[Place, Outcome]:
        """Score the inputs of `batches` and wait for all outcomes.

        Args:
            batches: a worker gets one request for each batch.
            stop: called with every outcome; True ends the run early.
            fresh: each request gets a worker that has had no other one.
        Raises: RewardError when the user's file cannot be loaded.
        """
        outcomes: dict[Place, Outcome] = {}
        self.begin(fresh=fresh)
        self.add(batches, inputs)
        while self.pending:
            for place, outcome in self.advance():
                outcomes[place] = outcome
                if stop(outcome):
                    self.close()
                    return outcomes
        return outcomes

    def begin(self, *, fresh: bool = False) -> None:
        """Begin with an empty queue. `fresh`: see `run`."""
        self._queue: deque[list[Place]] = deque()
        self._inputs: dict[Place, RewardInput] = {}
        self._images = ImageKeys()
        self._asked_again: dict[Place, str] = {}
        self._fresh = fresh
        self._last_seen = time.monotonic()

    def add(self, batches: Sequence[Sequence[Place]], inputs: Mapping[Place, RewardInput]) -> None:
        """Queue requests, one for each batch, and give them to idle workers. Does not wait."""
        self._excuse_pause()
        self._queue += [list(batch) for batch in batches if batch]
        self._inputs |= inputs
        self._images.add(inputs[place] for batch in batches for place in batch)
        self._feed()

    def hold(self) -> list[Place]:
        """Remove the inputs that no worker has yet from the queue, and return them."""
        places = [place for batch in self._queue for place in batch]
        self._queue.clear()
        for place in places:
            self._images.done(self._inputs[place])
        return places

    def advance(self, seconds: float | None = None) -> list[tuple[Place, Outcome]]:
        """Wait until something happens, at most `seconds` (None = until then), and return the outcomes that follow.

        Raises: RewardError when the user's file cannot be loaded.
        """
        self._excuse_pause()
        try:
            self._feed()
            outcomes = [pair for worker in self._wait(seconds) for pair in self._answers(worker)]
            for place, _ in outcomes:
                self._images.done(self._inputs[place])
            self._feed()
        except BaseException:
            self.close()
            raise
        self._last_seen = time.monotonic()
        return outcomes

    def describe(self) -> dict[str, Any]:
        """Return facts about the function that a worker found: style, batched, needs_images, weights, ranges."""
        worker = self._start()
        while worker.loaded is None:
            self.advance()
        return worker.loaded

    def pids(self) -> list[int]:
        """Return the workers that are running and have loaded the reward."""
        return [worker.pid for worker in self._workers if worker.pid]

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        self._queue.clear()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def _excuse_pause(self) -> None:
        """Extend all time limits by the time since the last call, if that was longer than AWAY_SECONDS.

        An answer that was ready in time, but that no call has received, is not late.
        """
        now = time.monotonic()
        if (pause := now - self._last_seen) > AWAY_SECONDS:
            for worker in self._workers:
                worker.deadline += pause
        self._last_seen = now

    def _start(self) -> Worker:
        worker = Worker(self.runs, self.memory_mb)
        self._workers.append(worker)
        return worker

    def _feed(self) -> None:
        """Start as many workers as there is work for, and give each idle one a request."""
        if not self._queue:
            return
        idle = [w for w in self._workers if not w.busy and w.loaded is not None]
        for worker in [w for w in idle if w.has_ended or (self._fresh and w.request)]:
            self._workers.remove(worker)
            worker.end()
        num_workers = min(self.size, len(self._queue) + sum(bool(w.busy) for w in self._workers))
        while len(self._workers) < num_workers:
            self._start()
        for worker in self._workers:
            if self._queue and worker.loaded is not None and not worker.busy:
                worker.assign(self._queue.popleft(), self._inputs, self._images, self.timeout)

    def _wait(self, seconds: float | None) -> list[Worker]:
        """Sleep until something happens, at most `seconds`. Return workers that answered, ended or ran out of time."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.response_fd, selectors.EVENT_READ, worker)
                if worker.output_open:
                    selector.register(worker.output_fd, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.request_fd, selectors.EVENT_WRITE, worker)
            pending = [w.deadline for w in self._workers if w.busy or w.loaded is None]
            limit = max(0.0, min(pending, default=0.0) - time.monotonic())
            events = selector.select(limit if seconds is None else min(limit, seconds))
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

    def _answers(self, worker: Worker) -> list[tuple[Place, Outcome]]:
        """Return the outcomes that follow from a worker's answers, from its end, or from its timeout."""
        alive, outcomes = worker.receive(), []
        try:
            while (frame := worker.frame()) is not None:
                _check(frame, worker)
                outcomes += self._answer(worker, frame)
        except GarbledError as error:
            worker.drain()
            message = f"its worker's pipe had a wrong message: {error}"
            failure = Failure("", message, (), ONE_VOICE, worker.printed)
            return [*outcomes, *self._lost(worker, failure, again=True)]
        if not alive:
            return [*outcomes, *self._lost(worker, None, again=True)]
        if (worker.busy or worker.loaded is None) and time.monotonic() >= worker.deadline:
            worker.drain()
            return [*outcomes, *self._lost(worker, self._timeout(worker), again=False)]
        return outcomes

    def _lost(self, worker: Worker, failure: Failure | None, *, again: bool) -> list[tuple[Place, Outcome]]:
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
            self._queue.appendleft(rest)
        if again and worker.answered and lost[0] not in self._asked_again:
            self._asked_again |= dict.fromkeys(lost, failure.message)
            self._queue.appendleft(lost)
            return []
        return [(index, failure) for index in lost]

    def _answer(self, worker: Worker, frame: Frame) -> list[tuple[Place, Outcome]]:
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
        raise GarbledError(f"its parts are not numbers: {excerpt(str(parts), 200)}")
    if not isinstance(note, str) or not isinstance(seconds, float):
        raise GarbledError(f"it is not a score: {excerpt(str(answer), 200)}")
    names = answer.get("artifacts", [])
    if not isinstance(detail, str | None) or not isinstance(names, list) or len(names) != len(blobs):
        raise GarbledError(f"its images have no names: {excerpt(str(answer), 200)}")
    try:
        named = {part_name(n, "artifact"): b for n, b in zip(names, blobs, strict=True)}
        artifacts, files = read_artifacts(named) if named else ({}, {})
        detail = None if detail is None else read_detail(detail)
        return Result(parts, excerpt(note, MOST_NOTE_CHARS), seconds, detail, artifacts, files)
    except RewardError as error:
        return Failure(CONTRACT, excerpt(error.message, MOST_MESSAGE_CHARS), hint=error.hint)


def _failure(error: dict[str, Any], worker: Worker) -> Failure:
    kind, message = excerpt(error["kind"], MOST_LINE_CHARS), excerpt(error["message"], MOST_MESSAGE_CHARS)
    hint = None if error["hint"] is None else excerpt(error["hint"], MOST_MESSAGE_CHARS)
    lines = tuple(excerpt(line, MOST_LINE_CHARS) for line in error["lines"])
    return Failure(kind, message, lines, hint, worker.printed)


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
