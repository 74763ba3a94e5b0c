"""Work in parts, on all cores. Each part is a file; a part is finished if its file exists.

The content of a part depends only on its input. A run that was killed and started again therefore writes the same files
as an uninterrupted run, with any number of processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from vlmrl.errors import DataError
from vlmrl.process import die_with_parent
from vlmrl.store.provenance import usable_cores

Make = Callable[[Any, Path], None]
"""Function of (input of a part, path) that writes the part's content to the path. It must be picklable, because it is
sent to each process once. Pass large data of a single part in its input, not in this function.
"""
Progress = Callable[[str, int, int], None]
"""Function of (description of the work, number of parts done, number of all parts)."""
FEW = 2
"""Maximum number of parts for which no other processes are started: starting them takes longer than the work."""
_make: Make | None = None


class LostWorkerError(DataError):
    """Error: a process that made parts was killed. The finished parts remain."""


def make_parts(
    make: Make,
    inputs: Sequence[Any],
    paths: Sequence[Path],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    what: str = "",
) -> int:
    """Make every missing file of `paths`. A file gets its final name when it is complete and synced to disk.

    Args:
        make: see `Make`; it is called with a temporary path in the same folder.
        inputs: input of each part; picklable.
        workers: number of processes; None = one per core. They end with this process, however it ends.
        progress: called at the start and whenever parts are done.
        what: description of the work, for `progress`.
    Returns: number of files that had existed before the call.
    Raises: any error of `make` (finished files remain); LostWorkerError when a process was killed.
    """
    missing = [index for index, path in enumerate(paths) if not path.exists()]
    num_existing = len(paths) - len(missing)
    report = progress or (lambda what, done, total: None)
    report(what, num_existing, len(paths))
    count = min(workers or usable_cores(), len(missing))
    if count <= 1 or len(missing) <= FEW:
        for done, index in enumerate(missing, start=num_existing + 1):
            _make_part(make, inputs[index], paths[index])
            report(what, done, len(paths))
        return num_existing
    work = [(inputs[index], paths[index]) for index in missing]
    _in_processes(make, work, count, lambda done: report(what, num_existing + done, len(paths)))
    return num_existing


def _in_processes(make: Make, work: Sequence[tuple[Any, Path]], count: int, report: Callable[[int], None]) -> None:
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(make, os.getpid()))
    left, running, done = list(reversed(work)), set[Future[None]](), 0
    try:
        while left or running:
            with _block_interrupts():
                while left and len(running) < 2 * count:
                    running.add(pool.submit(_work, *left.pop()))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()
            done += len(ended)
            report(done)
    except BrokenProcessPool as error:
        raise LostWorkerError(
            "a process was killed while it read images, most often because memory ran out",
            hint="run the same command again, with fewer --workers: finished parts are kept",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _block_interrupts() -> Iterator[None]:
    """Block SIGINT inside this context. Processes that are started in it inherit the block: Ctrl-C never stops them.

    This process handles Ctrl-C, and ends the workers in order. If Ctrl-C arrives inside the context, it is delivered at
    the end of the context.
    """
    resource_tracker.ensure_running()  # starting the tracker unblocks the signal: do this before the signal is blocked
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(make: Make, parent_pid: int) -> None:
    """Initialise a worker process."""
    global _make
    die_with_parent(parent_pid)
    _make = make


def _work(part_input: Any, path: Path) -> None:
    assert _make is not None
    _make_part(_make, part_input, path)


def _make_part(make: Make, part_input: Any, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make(part_input, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    """Write rows as JSON, one per line."""
    import json

    text = "".join(json.dumps(row, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_text(text, encoding="ascii")
