"""Renderer of hostile SVG text: worker processes with limits of time and memory, which are killed at the limit."""

from __future__ import annotations

import json
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

import numpy as np

from vlmrl.errors import VlmrlError
from vlmrl.svg.build import Images
from vlmrl.svg.draw import Drawer, Drawing, DrawJob
from vlmrl.svg.parse import SvgLimits, SvgRefused
from vlmrl.svg.worker import LENGTH, frame
from vlmrl.untrusted import parse_json

START_SECONDS = 60.0
"""Longest time that a worker may need to start."""
FIGURE_SECONDS = 20
"""Processor time that is enough for every text within the limits of work."""
__all__ = ["DrawJob", "Drawing", "SvgRenderer"]


class SvgRenderer:
    """Pool of processes that draw SVG text. Use it as a context manager; `draw` may be called from any thread.

    Args:
        workers: number of processes.
        limits: limits of one text. One that needs more time or memory is refused, and its process replaced.
        images: what happens to embedded pictures.
        drawer: who draws; the checks and the limits are the same.
    """

    def __init__(
        self,
        workers: int = 1,
        limits: SvgLimits | None = None,
        images: Images = "refuse",
        drawer: Drawer = "vlmrl",
    ) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers")
        self.limits = limits or SvgLimits()
        self._settings = json.dumps({"limits": asdict(self.limits), "images": images, "drawer": drawer}).encode()
        self._wanted, self._workers, self._lock = workers, list[_Worker](), threading.Lock()

    def __enter__(self) -> SvgRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            for worker in self._workers:
                worker.end()
            self._workers.clear()

    def draw(self, jobs: Sequence[DrawJob]) -> list[Drawing | SvgRefused]:
        """Return the picture of each text, or why there is none.

        Raises: VlmrlError if no process starts, or the shell's limit of processor time is too low for a text.
        """
        results: list[Drawing | SvgRefused | None] = [None] * len(jobs)
        with self._lock:
            while len(self._workers) < min(self._wanted, len(jobs)):
                self._workers.append(_Worker(self._settings))
            try:
                self._run(jobs, results)
            except BaseException:
                for worker in self._workers:
                    worker.end()
                self._workers.clear()
                raise
        return [result for result in results if result is not None]

    def _run(self, jobs: Sequence[DrawJob], results: list[Drawing | SvgRefused | None]) -> None:
        waiting = deque(enumerate(jobs))
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.output, selectors.EVENT_READ, worker)
            while waiting or any(worker.busy is not None for worker in self._workers):
                for worker in self._workers:
                    while waiting and worker.ready and worker.busy is None:
                        place, job = waiting.popleft()
                        worker.send(place, job, self.limits.seconds)
                left = min(worker.deadline for worker in self._workers) - time.monotonic()
                for key, _ in selector.select(max(0.0, min(left, 1.0))):
                    self._take(key.data, results)
                for position, worker in enumerate(self._workers):
                    if worker.failed or time.monotonic() > worker.deadline:
                        selector.unregister(worker.output)
                        place = worker.busy
                        refusal = self._refusal(worker)
                        if place is not None and refusal is None:
                            waiting.appendleft((place, jobs[place]))
                        elif place is not None:
                            results[place] = refusal
                        self._workers[position] = _Worker(self._settings)
                        selector.register(self._workers[position].output, selectors.EVENT_READ, self._workers[position])

    def _take(self, worker: _Worker, results: list[Drawing | SvgRefused | None]) -> None:
        answer = worker.receive()
        if answer is None or worker.busy is None:
            return
        head, pixels = answer
        results[worker.busy] = _result(head, pixels)
        worker.busy, worker.has_answered = None, True
        worker.deadline = float("inf")

    def _refusal(self, worker: _Worker) -> SvgRefused | None:
        """End a process that died or takes too long. Return the refusal of its text; None = a new one tries it.

        A process that has drawn other texts may have used up what the shell allows: that is not the fault of a text.

        Raises: VlmrlError if it did not start, or if the shell allows too little.
        """
        ending, allowed = worker.end(), resource.getrlimit(resource.RLIMIT_CPU)[1]
        if worker.busy is not None and not worker.failed:
            return SvgRefused("limit", f"drawing takes longer than {self.limits.seconds:g} s")
        if worker.has_answered:
            return None
        if ending in (-signal.SIGXCPU, -signal.SIGKILL) and 0 <= allowed < FIGURE_SECONDS:
            raise VlmrlError(
                f"the process that draws SVG was ended: this shell allows it {allowed} s of processor time",
                hint=f"`ulimit -t` must be {FIGURE_SECONDS} or more; a new shell has the system's limit",
            )
        if worker.busy is None:
            raise VlmrlError(
                f"the process that draws SVG did not start (it ended with status {ending})",
                hint="see whether `python -m vlmrl.svg.worker < /dev/null` reports an error",
            )
        if ending == -signal.SIGXCPU:
            return SvgRefused("limit", f"drawing takes more than {self.limits.cpu_seconds:g} s of processor time")
        return SvgRefused("limit", f"drawing ended its process; the limit of memory is {self.limits.memory_mb} MB")


def _result(head: dict, pixels: bytes) -> Drawing | SvgRefused:
    if "kind" in head:
        return SvgRefused(head["kind"], head["reason"])
    width, height = head["size"]
    return Drawing(np.frombuffer(pixels, np.uint8).reshape(height, width, 3), head["digest"], head["seconds"])


class _Worker:
    """One process.

    Attributes:
        ready: it has started.
        busy: position of the text that it draws; None = none.
        deadline: time at which it is killed, of `time.monotonic`.
        failed: it has ended by itself.
        has_answered: it has answered a request.
    """

    def __init__(self, settings: bytes) -> None:
        # Without the environment: a key of a service must not be where hostile text is read.
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"}
        if "LD_LIBRARY_PATH" in os.environ:
            environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vlmrl.svg.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            bufsize=0,
        )
        assert self._process.stdout is not None and self._process.stdin is not None
        self.output, self._input = self._process.stdout, self._process.stdin
        self._received = bytearray()
        self.ready, self.failed, self.busy, self.has_answered = False, False, None, False
        self.deadline = time.monotonic() + START_SECONDS
        self._write(frame(settings))

    def send(self, position: int, job: DrawJob, seconds: float) -> None:
        """Begin to draw a text."""
        self.busy = position
        text = job.svg.encode("utf-8", "surrogatepass")
        self._write(frame(json.dumps({"size": job.size}).encode()) + frame(text))
        self.deadline = time.monotonic() + seconds

    def _write(self, content: bytes) -> None:
        view = memoryview(content)
        try:
            while view:
                view = view[self._input.write(view) :]
        except OSError:
            self.failed = True

    def receive(self) -> tuple[dict, bytes] | None:
        """Take what the process has sent. Return its answer if it is complete."""
        block = os.read(self.output.fileno(), 1 << 20)
        if not block:
            self.failed = True
            return None
        self._received += block
        if not self.ready:
            if len(self._received) >= LENGTH.size + 5:
                del self._received[: LENGTH.size + 5]
                self.ready, self.deadline = True, float("inf")
            return None
        head = self._frame_at(0)
        pixels = self._frame_at(LENGTH.size + len(head)) if head is not None else None
        if head is None or pixels is None:
            return None
        self._received.clear()
        return parse_json(head), pixels

    def _frame_at(self, place: int) -> bytes | None:
        begin = place + LENGTH.size
        if len(self._received) < begin:
            return None
        end = begin + LENGTH.unpack(self._received[place:begin])[0]
        return bytes(self._received[begin:end]) if len(self._received) >= end else None

    def end(self) -> int:
        """Kill the process, if it has not ended. Return its status."""
        if not self.failed:
            self._process.kill()
        for stream in (self._input, self.output):
            stream.close()
        return self._process.wait()
