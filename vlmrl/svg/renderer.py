"""Renderer of hostile SVG text: worker processes with limits of time and memory, which are killed at the limit."""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import VlmrlError
from vlmrl.svg.build import Images
from vlmrl.svg.draw import FONT_SAMPLE, Drawer, Drawing, DrawJob, draw_svg
from vlmrl.svg.parse import BrokenPainter, SvgLimits
from vlmrl.untrusted import CodeRefused
from vlmrl.workers.frames import WHOLE, Channel, Frame, pack
from vlmrl.workers.pool import Limits, Lost, Pool, Worker
from vlmrl.workers.serve import Answer, Handler, limit_cpu, limit_memory

FIGURE_SECONDS = 20
"""Processor time that is enough for every text within the limits of work."""
__all__ = ["DrawJob", "Drawing", "SvgRenderer"]


class SvgRenderer(Pool[int, Drawing | CodeRefused]):
    """Pool of processes that draw SVG text. Use it as a context manager; `draw` may be called from any thread.

    Args:
        limits: limits of one text. One that needs more time or memory is refused, and its process replaced.
        images: what happens to embedded pictures.
        drawer: who draws; the checks and the limits are the same.
    """

    def __init__(
        self, workers: int = 1, limits: SvgLimits | None = None, images: Images = "refuse", drawer: Drawer = "vlmrl"
    ) -> None:
        if workers < 1:
            raise ValueError(f"{workers} workers")
        self._svg, self._lock, self._jobs = limits or SvgLimits(), threading.RLock(), list[DrawJob]()
        setup = {"limits": asdict(self._svg), "images": images, "drawer": drawer}
        surroundings = Limits(self._svg.seconds, environment=False)
        super().__init__(__name__, setup, size=workers, limits=surroundings)

    def __enter__(self) -> SvgRenderer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the processes."""
        with self._lock:
            super().close()

    def draw(self, jobs: Sequence[DrawJob]) -> list[Drawing | CodeRefused]:
        """Return the picture of each text, or why there is none.

        Raises: VlmrlError if no process starts, or the shell's limit of processor time is too low for a text.
        """
        with self._lock:
            self._jobs = list(jobs)
            results = self.run([position] for position in range(len(jobs)))
            return [results[position] for position in range(len(jobs))]

    def _message(self, worker: Worker, keys: Sequence[int]) -> bytes:
        job = self._jobs[keys[0]]
        return pack({"size": job.size}, [job.svg.encode("utf-8", "surrogatepass")])

    def _outcome(self, worker: Worker, keys: Sequence[int], frame: Frame) -> list[tuple[int, Drawing | CodeRefused]]:
        head = frame.body
        if "kind" in head:
            return [(keys[0], CodeRefused(head["kind"], head["reason"]))]
        width, height = head["size"]
        pixels = np.frombuffer(frame.blobs[0], np.uint8).reshape(height, width, 3)
        return [(keys[0], Drawing(pixels, head["digest"], head["seconds"]))]

    def _lost(self, worker: Worker, lost: Lost) -> list[tuple[int, Drawing | CodeRefused]]:
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
                hint="see whether `python -m vlmrl.svg.renderer` reports an error",
            )
        elif lost.code == -signal.SIGXCPU:
            reason = f"drawing takes more than {self._svg.cpu_seconds:g} s of processor time"
        else:
            reason = f"drawing ended its process; the limit of memory is {self._svg.memory_mb} MB"
        return [(position, CodeRefused("limit", reason)) for position in worker.busy]


def begin(setup: dict[str, Any], channel: Channel) -> tuple[dict[str, Any], Handler]:
    """Begin as a worker. Return the handler of requests: {"size"} and a UTF-8 text -> a head and pixels."""
    limits, draw = SvgLimits(**setup["limits"]), draw_svg
    if setup["drawer"] == "cairosvg":
        from vlmrl.svg.cairosvg_drawing import draw_with_cairosvg as draw
    draw(DrawJob(FONT_SAMPLE))  # what is loaded once is not a request's memory
    if (statm := Path("/proc/self/statm")).exists():
        pages = int(statm.read_text("ascii").split()[0])
        limit_memory(pages * resource.getpagesize() + (limits.memory_mb << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    def answer(body: dict[str, Any], blobs: Sequence[bytes]) -> Iterator[Answer]:
        limit_cpu(limits.cpu_seconds)
        job = DrawJob(blobs[0].decode("utf-8", "surrogatepass"), tuple(body["size"]) if body["size"] else None)
        head, pixels, is_broken = _answer(partial(draw, job, limits, images=setup["images"]), limits)
        yield WHOLE, head, (pixels,)
        if is_broken:
            os._exit(0)

    return {}, answer


def _answer(draw: Callable[[], Drawing], limits: SvgLimits) -> tuple[dict[str, Any], bytes, bool]:
    """Return the answer, its pixels, and whether this process must not draw again."""
    try:
        drawing = draw()
    except CodeRefused as error:
        return {"kind": error.kind, "reason": error.reason}, b"", isinstance(error, BrokenPainter)
    except MemoryError:
        return {"kind": "limit", "reason": f"drawing needs more than {limits.memory_mb} MB"}, b"", True
    except RecursionError:
        return {"kind": "limit", "reason": "its elements are nested too deep"}, b"", False
    height, width = drawing.pixels.shape[:2]
    head = {"size": [width, height], "digest": drawing.digest, "seconds": drawing.seconds}
    return head, drawing.pixels.tobytes(), False
