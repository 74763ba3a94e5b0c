"""Worker processes of a user's reward, seen from the parent: start, feed, watch the clock, end, start again.

One thread and one `select` loop serve all workers. A worker lives in a session of its own: Ctrl-C does not reach it,
and everything it started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vlmrl.errors import RewardError
from vlmrl.rewards.base import UserReward
from vlmrl.rewards.frames import CONTRACT, FrameBuffer, pack_frame
from vlmrl.types import RewardInput

LOAD_SECONDS = 60.0
"""Wall clock for importing the user's file, at least."""
OUTPUT_BYTES = 4096
"""How much of what a reward printed is kept to be shown with its error."""
BOOT = "import sys; sys.path[:] = sys.argv[4:]; from vlmrl.rewards.worker import main; main(*map(int, sys.argv[1:4]))"


@dataclass(frozen=True)
class Result:
    """What the function returned for one input: checked parts, its note, and the seconds it took."""

    parts: dict[str, float | None]
    note: str
    seconds: float


@dataclass(frozen=True)
class Failure:
    """Why there is no result.

    Args:
        kind: the exception's class; CONTRACT when what came back is not a score; "" when the worker was lost.
        lines: the user's own lines of the traceback.    output: what the function printed during that call.
    """

    kind: str
    message: str
    lines: tuple[str, ...] = ()
    hint: str | None = None
    output: str = ""

    def __str__(self) -> str:
        line = f" ({self.lines[-1].partition(' in ')[0]})" if self.lines else ""
        return (self.raised or self.message) + line

    @property
    def raised(self) -> str:
        return f"{self.kind}: {self.message}".removesuffix(": ") if self.kind not in ("", CONTRACT) else ""


Outcome = Result | Failure


def as_error(failure: Failure, name: str, where: str | None = None) -> RewardError:
    """A failure as the error a user reads: the exception, their own lines, what was printed."""
    said = f"raised {failure.raised}" if failure.raised else f"failed: {failure.message}"
    lines = "".join(f"\n    {line}" for line in failure.lines)
    printed = "".join(f"\n    {line}" for line in failure.output.strip().splitlines()[-5:])
    printed = f"\n  it had printed:{printed}" if printed else ""
    return RewardError(f"reward `{name}` {said}{lines}{printed}", where=where, hint=failure.hint)


class Worker:
    """One worker process. `busy` holds the inputs it has not answered yet; `deadline` when it will be ended."""

    def __init__(self, user: UserReward, memory_mb: int) -> None:
        request_read, self.request = os.pipe()
        self.response, response_write = os.pipe()
        self.output_fd, output_write = os.pipe()
        argv = [sys.executable, "-c", BOOT, str(request_read), str(response_write), str(os.getpid()), *sys.path]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output_write,
            stderr=output_write,
            pass_fds=(request_read, response_write),
            env=env,
            start_new_session=True,
        )
        for fd in (request_read, response_write, output_write):
            os.close(fd)
        for fd in (self.request, self.response, self.output_fd):
            os.set_blocking(fd, False)
        self.frames, self.printed, self.output_open = FrameBuffer(), b"", True
        self.loaded: dict[str, Any] | None = None
        self.busy: list[int] = []
        self.deadline = time.monotonic() + LOAD_SECONDS
        self.unsent = memoryview(pack_frame({"op": "load", "user": asdict(user), "memory_mb": memory_mb}))

    def assign(self, indices: Sequence[int], inputs: Sequence[RewardInput], timeout: float) -> None:
        """Queue one request. The clock starts now."""
        self.busy, self.printed = list(indices), b""
        items, blobs = [], []
        for x in (inputs[i] for i in indices):
            item = {k: getattr(x, k) for k in ("response", "truth", "columns", "finish", "num_tokens", "prompt")}
            images = [image.convert("RGB") for image in x.images]
            items.append({**item, "images": [image.size for image in images]})
            blobs += [image.tobytes() for image in images]
        self.unsent = memoryview(pack_frame({"op": "score", "items": items}, blobs))
        self.deadline = time.monotonic() + timeout

    def send(self) -> None:
        """Write as much as the pipe takes. A closed pipe is noticed by `receive`."""
        try:
            self.unsent = self.unsent[os.write(self.request, self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent = memoryview(b"")

    def receive(self) -> bool:
        """Read what there is. Returns False when the worker has ended."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.response, 1 << 20)
            self.frames.feed(data)
            return bool(data)
        return True

    def drain(self) -> None:
        """Keep the tail of what the function printed."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.output_fd, 1 << 16):
                self.printed = (self.printed + data)[-OUTPUT_BYTES:]
            self.output_open = False

    def end(self) -> int:
        """Kill the process and whatever it started; close the pipes. Returns the exit code it had."""
        code = self.process.poll()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.drain()
        for fd in (self.request, self.response, self.output_fd):
            os.close(fd)
        return self.process.returncode if code is None else code


class WorkerPool:
    """Up to `size` workers of one user's reward; started when there is work, ended by `close`."""

    def __init__(self, user: UserReward, *, size: int, memory_mb: int, timeout_seconds: float) -> None:
        self.user, self.size, self.memory_mb, self.timeout = user, size, memory_mb, timeout_seconds
        self._workers: list[Worker] = []

    def run(
        self, batches: Sequence[Sequence[int]], inputs: Sequence[RewardInput], stop: Callable[[Outcome], bool]
    ) -> dict[int, Outcome]:
        """Score the inputs named by `batches` (one request each). Ends early once `stop` says so of an outcome.

        Raises: RewardError when the user's file cannot be loaded.
        """
        queue, outcomes = deque(list(b) for b in batches if b), {}
        try:
            while queue or any(w.busy for w in self._workers):
                self._feed(queue, inputs)
                for worker in self._wait():
                    for index, outcome in self._answers(worker, queue):
                        outcomes[index] = outcome
                        if stop(outcome):
                            self.close()
                            return outcomes
        except BaseException:
            self.close()
            raise
        return outcomes

    def describe(self) -> dict[str, Any]:
        """What a worker found out about the function: style, batched, needs_images, weights, ranges."""
        worker = self._start()
        while worker.loaded is None:
            for ready in self._wait():
                list(self._answers(ready, deque()))
        return worker.loaded

    def pids(self) -> list[int]:
        """The workers that are running."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End all workers. The pool can be used again."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end()

    def _start(self) -> Worker:
        worker = Worker(self.user, self.memory_mb)
        self._workers.append(worker)
        return worker

    def _feed(self, queue: deque[list[int]], inputs: Sequence[RewardInput]) -> None:
        for worker in [w for w in self._workers if not w.busy and w.process.poll() is not None]:
            if worker.loaded is not None:
                self._workers.remove(worker)
                worker.end()
        wanted = min(self.size, len(queue) + sum(bool(w.busy) for w in self._workers))
        while len(self._workers) < wanted:
            self._start()
        for worker in self._workers:
            if queue and worker.loaded is not None and not worker.busy:
                worker.assign(queue.popleft(), inputs, self.timeout)

    def _wait(self) -> list[Worker]:
        """Sleep until something happens. Returns the workers that spoke, ended or ran out of time."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.response, selectors.EVENT_READ, worker)
                if worker.output_open:
                    selector.register(worker.output_fd, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.request, selectors.EVENT_WRITE, worker)
            pending = [w.deadline for w in self._workers if w.busy or w.loaded is None]
            events = selector.select(max(0.0, min(pending, default=0.0) - time.monotonic()))
        ready: dict[int, Worker] = {}
        for key, _ in events:
            worker: Worker = key.data
            if key.fd == worker.request:
                worker.send()
            elif key.fd == worker.output_fd:
                worker.drain()
            else:
                ready[id(worker)] = worker
        now = time.monotonic()
        late = {id(w): w for w in self._workers if (w.busy or w.loaded is None) and now >= w.deadline}
        return list({**late, **ready}.values())

    def _answers(self, worker: Worker, queue: deque[list[int]]) -> list[tuple[int, Outcome]]:
        """Outcomes that follow from what the worker said, from its end, or from its silence."""
        alive, found = worker.receive(), []
        while (frame := worker.frames.pop()) is not None:
            found += self._answer(worker, frame[0])
        late = (worker.busy or worker.loaded is None) and time.monotonic() >= worker.deadline
        if alive and not late:
            return found
        self._workers.remove(worker)
        code = worker.end()
        failure = self._timeout(worker) if alive else self._crash(worker, code)
        if worker.loaded is None:
            raise as_error(failure, self.user.function, self.user.file)
        if worker.busy:
            lost = len(worker.busy) if self.user.batched else 1
            found += [(index, failure) for index in worker.busy[:lost]]
            if worker.busy[lost:]:
                queue.appendleft(worker.busy[lost:])
        return found

    def _answer(self, worker: Worker, answer: dict[str, Any]) -> list[tuple[int, Outcome]]:
        if "loaded" in answer:
            worker.loaded = answer["loaded"]
            return []
        if "fatal" in answer:
            worker.drain()
            raise as_error(_failure(answer["fatal"], worker), self.user.function, self.user.file)
        worker.deadline = time.monotonic() + self.timeout
        worker.drain()
        if "failed" in answer:
            indices, worker.busy = worker.busy, []
            return [(index, _failure(answer["failed"], worker)) for index in indices]
        index, error = worker.busy.pop(0), answer.get("error")
        outcome = _failure(error, worker) if error else None
        worker.printed = b""
        if outcome is not None:
            return [(index, outcome)]
        return [(index, Result(answer["parts"], answer["note"], answer["seconds"]))]

    def _timeout(self, worker: Worker) -> Failure:
        if worker.loaded is None:
            return Failure("", f"the file was not imported within {LOAD_SECONDS:g} s", output=_printed(worker))
        hint = "make it faster, or raise [reward] timeout_seconds"
        return Failure("", f"no answer within {self.timeout:g} s; its worker was ended", (), hint, _printed(worker))

    def _crash(self, worker: Worker, code: int) -> Failure:
        if code < 0:
            name = signal.Signals(-code).name
            hint = "out of memory? see [reward] memory_mb" if name in ("SIGKILL", "SIGABRT", "SIGSEGV") else None
            return Failure("", f"its worker process was ended by {name}", (), hint, _printed(worker))
        return Failure("", f"it ended its worker process with exit code {code}", (), None, _printed(worker))


def inspect_user_reward(user: UserReward, *, memory_mb: int = 4096) -> dict[str, Any]:
    """Import the user's file in a worker and return what it found (see `WorkerPool.describe`)."""
    pool = WorkerPool(user, size=1, memory_mb=memory_mb, timeout_seconds=LOAD_SECONDS)
    try:
        return pool.describe()
    finally:
        pool.close()


def _failure(error: dict[str, Any], worker: Worker) -> Failure:
    return Failure(error["kind"], error["message"], tuple(error["lines"]), error["hint"], _printed(worker))


def _printed(worker: Worker) -> str:
    return worker.printed.decode(errors="replace")
