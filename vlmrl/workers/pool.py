"""Workers of one kind: started when there is work, watched by the clock, replaced when they are lost.

One thread and one `select` loop serve all workers of a pool. An answer is accepted only if it matches the request: its
number, the item that is due, and the process that was started. A worker that sends anything else counts as lost, like
one that has ended. A user of the kit says what is in a request, what an answer means, and what follows from a loss.

A worker's descriptors have high numbers on both sides. So a standard descriptor that was closed (`vlmrl check <&-`) is
never taken for a pipe, and code that writes to all low descriptors reaches none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from vlmrl.process import has_terminal, kill_all, marked, patience, send, signal_name
from vlmrl.redaction.redact import CUT_MARGIN, excerpt
from vlmrl.workers.frames import (
    ASK,
    END,
    HEAD,
    PIPE_BYTES,
    TOKEN_BYTES,
    WHOLE,
    Frame,
    FrameBuffer,
    GarbledError,
    pack_frame,
)

OUTPUT_BYTES = 4096
"""Number of bytes of a worker's output that are kept to be shown with its error."""
KEPT_BYTES = 4 * (OUTPUT_BYTES + CUT_MARGIN + 1)
"""Number of bytes that are kept to be cut: more characters than `excerpt` looks at, of four bytes each."""
MOST_READ_BYTES = 1 << 20
"""Maximum number of bytes of output to read at once: a worker that prints without end must not block the pool."""
END_SECONDS = 30.0
"""Longest wait for a keeper to end its processes."""
MOST_POLL_SECONDS = 1e6
"""A longer time limit is none: poll(2) takes milliseconds in 31 bits."""
AWAY_SECONDS = 1.0
"""Longest pause between two calls of a pool that counts for the time limits of its workers, in seconds."""
LOWEST_FD, LAST_RESORT_FD = 200, 3
MOST_MARK = 1 << 62
BOOT = (
    "import sys; sys.path[:] = sys.argv[7:]; from vlmrl.workers.keeper import main; "
    "main(*map(int, sys.argv[1:6]), sys.argv[6])"
)
Key = TypeVar("Key")
Outcome = TypeVar("Outcome")


@dataclass(frozen=True)
class Limits:
    """Limits and surroundings of a worker.

    Args:
        seconds: longest time until the next answer.
        start_seconds: longest time until the worker is ready.
        answer_bytes: (longest JSON, most bytes of blobs) of an answer; None = any.
        environment: whether the worker has this process's environment. No key of a service may be near hostile text.
        terminal: whether the worker gets the terminal if this process has it, so that `breakpoint()` works.
    """

    seconds: float
    start_seconds: float = 60.0
    answer_bytes: tuple[int, int] | None = None
    environment: bool = True
    terminal: bool = False


@dataclass(frozen=True)
class Lost:
    """Loss of a worker.

    Args:
        why: it ended, took too long, or sent a wrong message.
        ending: how it ended, in the keeper's words (keeper.py); "" if even the keeper was killed.
        printed: end of its output since the last answer.
        text: the fault of the wrong message.
    """

    why: Literal["ended", "time", "garbled"]
    ending: str
    printed: str
    text: str = ""

    @property
    def code(self) -> int | None:
        """Exit code; a negative signal; None if it did not end by itself."""
        word, _, number = self.ending.partition(" ")
        return {"exit": 1, "signal": -1}[word] * int(number) if number else None

    @property
    def signal(self) -> str | None:
        """Name of the signal that ended it."""
        if self.code is None or self.code >= 0:
            return None
        return signal_name(-self.code)


class Worker:
    """Worker and its keeper (keeper.py).

    Attributes:
        busy: keys of the items that it has not answered yet.
        deadline: time at which it will be ended.
        request: number of its current request.
        item: index of the next answer.
        answered: number of items of all requests so far.
        facts: what it said about itself when it was ready; None until then.
        sent_bytes: bytes of all requests so far.
        pid: process id of the worker itself.
    """

    def __init__(
        self, module: str, setup: Mapping[str, Any], limits: Limits, hear: Callable[[bytes], object] | None
    ) -> None:
        self._token, self._hear = secrets.token_bytes(TOKEN_BYTES), hear
        request_read, self.request_fd = _pipe()
        self.response_fd, response_write = _pipe()
        self.output_fd, output_write = _pipe()
        self._control, control = (_raised(end.detach()) for end in socket.socketpair())
        passed_fds = (request_read, response_write, control)
        self._mark = secrets.randbelow(MOST_MARK)
        argv = [sys.executable, "-c", BOOT, *map(str, (*passed_fds, os.getpid(), self._mark, module)), *sys.path]
        bare = {"LANG": "C.UTF-8", "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}
        inherited = os.environ if limits.environment else bare
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **inherited, "PYTHONHASHSEED": "0"}
        stdin, printed = (None, None) if limits.terminal and has_terminal() else (subprocess.DEVNULL, output_write)
        try:
            self._keeper = subprocess.Popen(
                argv, stdin=stdin, stdout=printed, stderr=printed, pass_fds=passed_fds, env=env, start_new_session=True
            )
        finally:
            for fd in (*passed_fds, output_write):
                os.close(fd)
        for fd in (self.request_fd, self.response_fd, self.output_fd):
            os.set_blocking(fd, False)
        self._frames = FrameBuffer(self._token, limits.answer_bytes)
        self._output, self.output_open = b"", True
        self.facts: dict[str, Any] | None = None
        self.busy: list[Any] = []
        self.pid = self.request = self.answered = self.item = self.sent_bytes = 0
        self.deadline = time.monotonic() + patience(limits.start_seconds)
        self.unsent = memoryview(self._token + pack_frame(self._token, 0, WHOLE, os.getpid(), setup))

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

    @property
    def is_awaited(self) -> bool:
        """Return whether its clock runs: it starts, or has a request."""
        return self.facts is None or bool(self.busy)

    def assign(self, keys: Sequence[Any], message: bytes, seconds: float) -> None:
        """Begin to send one request. The clock starts now."""
        self.busy, self._output = list(keys), b""
        self.request, self.item = self.request + 1, 0
        self.unsent = memoryview(HEAD.pack(self._token, self.request, WHOLE, os.getpid()) + message)
        self.sent_bytes += len(self.unsent)
        self.deadline = time.monotonic() + seconds
        self.send()

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
            data = os.read(self.response_fd, PIPE_BYTES)
            self._frames.feed(data)
            return bool(data)
        return True

    def frame(self) -> Frame | None:
        """Return the next whole frame, if it is the answer that is due. Raises: GarbledError."""
        frame = self._frames.pop()
        if frame is None:
            return None
        if self.facts is None:
            if frame.request or frame.item != WHOLE:
                raise GarbledError("it came before the file was imported")
        elif frame.pid != self.pid:
            raise GarbledError(f"process {frame.pid} wrote it, which is not its worker ({self.pid})")
        elif not self.busy:
            raise GarbledError("it is an answer, but no request is pending")
        elif frame.request != self.request:
            raise GarbledError(f"it answers request {frame.request}, not {self.request}")
        elif frame.item not in (WHOLE, self.item):
            raise GarbledError(f"it answers item {frame.item}, not {self.item}")
        return frame

    def drain(self) -> None:
        """Keep the end of the output. If the worker prints without end, read only what fits MOST_READ_BYTES."""
        total = 0
        with contextlib.suppress(BlockingIOError):
            while total < MOST_READ_BYTES and (data := os.read(self.output_fd, PIPE_BYTES)):
                total += len(data)
                self._output = (self._output + data)[-KEPT_BYTES:]
                if self._hear:
                    self._hear(data)
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


class Pool(Generic[Key, Outcome]):
    """Up to `size` workers; started when there is work, ended by `close`. A subclass is a user of the kit.

    Args:
        module: module of the code of the workers; its function `begin` is called first (see serve.py).
        setup: what that function gets, as JSON values.
    """

    def __init__(self, module: str, setup: Mapping[str, Any], *, size: int, limits: Limits) -> None:
        self._code, self.size, self.limits = (module, setup), size, limits
        self._call_seconds = patience(limits.seconds)
        self._workers: list[Worker] = []
        self._hear: Callable[[bytes], object] | None = None
        self.begin()

    def _message(self, worker: Worker, keys: Sequence[Key]) -> bytes:
        """Return the packed request of these keys for a worker."""
        raise NotImplementedError

    def _outcome(self, worker: Worker, keys: Sequence[Key], frame: Frame) -> Iterable[tuple[Key, Outcome]]:
        """Return the outcomes of an answer to these keys. Raises: GarbledError for one that cannot be read."""
        raise NotImplementedError

    def _lost(self, worker: Worker, lost: Lost) -> Iterable[tuple[Key, Outcome]]:
        """Return the outcomes of the keys that were lost with a worker, which has ended."""
        raise NotImplementedError

    @property
    def pending(self) -> bool:
        """Return whether a key that was added has no outcome yet."""
        return bool(self._queue) or any(w.busy for w in self._workers)

    @property
    def transfers(self) -> bool:
        """Return whether a part of a request or of an answer is on its way."""
        return any(w.busy and (w.unsent or w.receiving) for w in self._workers)

    def begin(self, *, fresh: bool = False) -> None:
        """Begin with an empty queue. `fresh`: each request gets a worker that has had no other one."""
        self._queue: deque[list[Key]] = deque()
        self._fresh = fresh
        self._last_seen = time.monotonic()

    def add(self, requests: Iterable[Sequence[Key]]) -> None:
        """Queue requests, and give them to idle workers. Does not wait."""
        self._excuse_pause()
        self._queue += [list(keys) for keys in requests if keys]
        self._feed()

    def hold(self) -> list[Key]:
        """Remove the keys that no worker has yet from the queue, and return them."""
        keys = [key for request in self._queue for key in request]
        self._queue.clear()
        return keys

    def advance(self, seconds: float | None = None) -> list[tuple[Key, Outcome]]:
        """Wait until something happens, at most `seconds` (None = until then), and return the outcomes that follow."""
        self._excuse_pause()
        try:
            self._feed()
            outcomes = [pair for worker in self._wait(seconds) for pair in self._answers(worker)]
            self._feed()
        except BaseException:
            self.close()
            raise
        self._last_seen = time.monotonic()
        return outcomes

    def run(self, requests: Iterable[Sequence[Key]]) -> dict[Key, Outcome]:
        """Return the outcomes of requests: wait for all of them. An error ends the workers."""
        outcomes: dict[Key, Outcome] = {}
        try:
            self.begin()
            self.add(requests)
            while self.pending:
                outcomes.update(self.advance())
        except BaseException:
            self.close()
            raise
        return outcomes

    def pids(self) -> list[int]:
        """Return the workers that are running and ready."""
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
        worker = Worker(*self._code, self.limits, self._hear)
        self._workers.append(worker)
        return worker

    def _feed(self) -> None:
        """Start as many workers as there is work for, and give each idle one a request."""
        if not self._queue:
            return
        for worker in [w for w in self._workers if not w.is_awaited]:
            if worker.has_ended or (self._fresh and worker.request):
                self._workers.remove(worker)
                worker.end()
        num_workers = min(self.size, len(self._queue) + sum(bool(w.busy) for w in self._workers))
        while len(self._workers) < num_workers:
            self._start()
        for worker in self._workers:
            if self._queue and not worker.is_awaited:
                keys = self._queue.popleft()
                worker.assign(keys, self._message(worker, keys), self._call_seconds)

    def _wait(self, seconds: float | None) -> list[Worker]:
        """Sleep until something happens, at most `seconds`. Return workers that answered, ended or ran out of time."""
        poll, workers = select.poll(), dict[int, Worker]()
        for worker in self._workers:
            waits = (
                (worker.response_fd, True),
                (worker.output_fd, worker.output_open),
                (worker.request_fd, worker.unsent),
            )
            for fd in [fd for fd, is_awaited in waits if is_awaited]:
                poll.register(fd, select.POLLOUT if fd == worker.request_fd else select.POLLIN)
                workers[fd] = worker
        limit = min((w.deadline for w in self._workers if w.is_awaited), default=0.0) - time.monotonic()
        limit = max(0.0, limit if seconds is None else min(limit, seconds))
        ready: dict[int, Worker] = {}
        for fd, _ in poll.poll(math.ceil(1000 * limit) if limit < MOST_POLL_SECONDS else None):
            worker = workers[fd]
            if fd == worker.request_fd:
                worker.send()
            elif fd == worker.output_fd:
                worker.drain()
            else:
                ready[id(worker)] = worker
        late = {id(w): w for w in self._workers if w.is_awaited and time.monotonic() >= w.deadline}
        return list({**late, **ready}.values())

    def _answers(self, worker: Worker) -> list[tuple[Key, Outcome]]:
        """Return the outcomes that follow from a worker's answers, from its end, or from its timeout."""
        alive, outcomes = worker.receive(), []
        try:
            while (frame := worker.frame()) is not None:
                if worker.facts is None:
                    worker.facts, worker.pid = frame.body, frame.pid
                    self._started(worker)
                    continue
                worker.drain()
                keys = worker.busy if frame.item == WHOLE else worker.busy[:1]
                outcomes += self._outcome(worker, keys, frame)
                worker.busy = worker.busy[len(keys) :]
                worker.item, worker.answered = worker.item + 1, worker.answered + len(keys)
                worker.deadline = time.monotonic() + self._call_seconds
                worker.forget_output()
        except GarbledError as error:
            return [*outcomes, *self._remove(worker, "garbled", str(error))]
        if not alive:
            return [*outcomes, *self._remove(worker, "ended")]
        if worker.is_awaited and time.monotonic() >= worker.deadline:
            return [*outcomes, *self._remove(worker, "time")]
        return outcomes

    def _started(self, worker: Worker) -> None:
        """Look at the facts of a worker that is ready."""

    def _remove(
        self, worker: Worker, why: Literal["ended", "time", "garbled"], text: str = ""
    ) -> Iterable[tuple[Key, Outcome]]:
        """End a worker that cannot be used any more."""
        self._workers.remove(worker)
        ending = worker.end(ask=why == "ended")
        return self._lost(worker, Lost(why, ending, worker.printed, text))
