"""Renderer of hostile SVG text: worker processes with limits of time and memory, which are killed at the limit."""

from __future__ import annotations

import resource
import signal
import threading
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

import numpy as np

from vlmrl.errors import VlmrlError
from vlmrl.svg.build import Images
from vlmrl.svg.draw import Drawer, Drawing, DrawJob
from vlmrl.svg.parse import SvgLimits, SvgRefused
from vlmrl.workers.frames import Frame, pack
from vlmrl.workers.pool import Limits, Lost, Pool, Worker

FIGURE_SECONDS = 20
"""Processor time that is enough for every text within the limits of work."""
__all__ = ["DrawJob", "Drawing", "SvgRenderer"]


class SvgRenderer(Pool[int, Drawing | SvgRefused]):
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
        self._svg, self._lock, self._jobs = limits or SvgLimits(), threading.RLock(), list[DrawJob]()
        setup = {"limits": asdict(self._svg), "images": images, "drawer": drawer}
        surroundings = Limits(self._svg.seconds, environment=False)
        super().__init__("vlmrl.svg.draw", setup, size=workers, limits=surroundings)

    def __enter__(self) -> SvgRenderer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            super().close()

    def draw(self, jobs: Sequence[DrawJob]) -> list[Drawing | SvgRefused]:
        """Return the picture of each text, or why there is none.

        Raises: VlmrlError if no process starts, or the shell's limit of processor time is too low for a text.
        """
        with self._lock:
            self._jobs, results = list(jobs), dict[int, Drawing | SvgRefused]()
            self.begin()
            try:
                self.add([position] for position in range(len(jobs)))
                while self.pending:
                    results.update(self.advance())
            except BaseException:
                self.close()
                raise
            return [results[position] for position in range(len(jobs))]

    def _message(self, worker: Worker, keys: Sequence[int]) -> bytes:
        job = self._jobs[keys[0]]
        return pack({"size": job.size}, [job.svg.encode("utf-8", "surrogatepass")])

    def _outcome(self, worker: Worker, keys: Sequence[int], frame: Frame) -> list[tuple[int, Drawing | SvgRefused]]:
        head = frame.body
        if "kind" in head:
            return [(keys[0], SvgRefused(head["kind"], head["reason"]))]
        width, height = head["size"]
        pixels = np.frombuffer(frame.blobs[0], np.uint8).reshape(height, width, 3)
        return [(keys[0], Drawing(pixels, head["digest"], head["seconds"]))]

    def _lost(self, worker: Worker, lost: Lost) -> list[tuple[int, Drawing | SvgRefused]]:
        """Return the refusal of the text of a process that died or takes too long.

        A process that has drawn other texts may have used up what the shell allows: that is not the fault of a text,
        and a new process draws it.

        Raises: VlmrlError if it did not start, or if the shell allows too little.
        """
        allowed, reason = resource.getrlimit(resource.RLIMIT_CPU)[1], ""
        if worker.busy and lost.why == "time":
            reason = f"drawing takes longer than {self._svg.seconds:g} s"
        elif worker.answered:
            self._queue.extendleft([[position] for position in worker.busy])
            return []
        elif lost.code in (-signal.SIGXCPU, -signal.SIGKILL) and 0 <= allowed < FIGURE_SECONDS:
            raise VlmrlError(
                f"the process that draws SVG was ended: this shell allows it {allowed} s of processor time",
                hint=f"`ulimit -t` must be {FIGURE_SECONDS} or more; a new shell has the system's limit",
            )
        elif worker.facts is None:
            raise VlmrlError(
                f"the process that draws SVG did not start (it ended with status {lost.code})",
                hint="see whether `python -m vlmrl.svg.draw` reports an error",
            )
        elif lost.code == -signal.SIGXCPU:
            reason = f"drawing takes more than {self._svg.cpu_seconds:g} s of processor time"
        else:
            reason = f"drawing ended its process; the limit of memory is {self._svg.memory_mb} MB"
        return [(position, SvgRefused("limit", reason)) for position in worker.busy]
