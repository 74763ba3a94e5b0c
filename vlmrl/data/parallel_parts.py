"""Work in parts, on all cores: each part is a file, and a file that is there is done.

A part's content depends on its input alone, so that a run which was killed and started again makes the same files as
one that was not, whatever the number of processes.
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
"""(input of a part, path) -> writes its content there. Picklable: it is sent to each process once, so what is large and
a part's own belongs into the inputs.
"""
Progress = Callable[[str, int, int], None]
"""(what is done, parts done, parts in all)."""
FEW = 2
"""So many parts are made in this process: starting others takes longer."""
_make: Make | None = None


class LostWorkerError(DataError):
    """A process that made parts was killed; the parts that are done stay."""


def make_parts(
    make: Make,
    inputs: Sequence[Any],
    paths: Sequence[Path],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    what: str = "",
) -> int:
    """Make every file of `paths` that is not there; each appears whole, durable, under its name.

    Args:
        make: see `Make`; it is called with a path beside the file's.
        inputs: of each part; picklable.
        workers: processes; None = one a core. They end with this process, however it ends.
    Returns: how many were there already.
    Raises: what `make` raises (the files made until then stay); LostWorkerError when a process was killed.
    """
    missing = [index for index, path in enumerate(paths) if not path.exists()]
    there = len(paths) - len(missing)
    told = progress or (lambda what, done, total: None)
    told(what, there, len(paths))
    count = min(workers or usable_cores(), len(missing))
    if count <= 1 or len(missing) <= FEW:
        for done, index in enumerate(missing, start=there + 1):
            _make_part(make, inputs[index], paths[index])
            told(what, done, len(paths))
        return there
    work = [(inputs[index], paths[index]) for index in missing]
    _in_processes(make, work, count, lambda done: told(what, there + done, len(paths)))
    return there


def _in_processes(make: Make, work: Sequence[tuple[Any, Path]], count: int, told: Callable[[int], None]) -> None:
    from multiprocessing import get_context

    pool = ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_begin, initargs=(make, os.getpid()))
    left, running, done = list(reversed(work)), set[Future[None]](), 0
    try:
        while left or running:
            with _born_deaf():
                while left and len(running) < 2 * count:
                    running.add(pool.submit(_work, *left.pop()))
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for future in ended:
                future.result()
            done += len(ended)
            told(done)
    except BrokenProcessPool as error:
        raise LostWorkerError(
            "a process was killed while it read images, most often for lack of memory",
            hint="run the same command again, with fewer --workers: what is done is kept",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _born_deaf() -> Iterator[None]:
    """Processes that start meanwhile never hear Ctrl-C, not even while they import: it is for this one, which ends
    their parts in order. It hears it when they have started.
    """
    resource_tracker.ensure_running()  # it unblocks the signal when the first process starts it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(make: Make, parent_pid: int) -> None:
    """In each process, once."""
    global _make
    die_with_parent(parent_pid)
    _make = make


def _work(given: Any, path: Path) -> None:
    assert _make is not None
    _make_part(_make, given, path)


def _make_part(make: Make, given: Any, path: Path) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        make(given, part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def write_lines(path: Path, rows: Sequence[Any]) -> None:
    """Rows as one JSON value a line."""
    import json

    text = "".join(json.dumps(row, ensure_ascii=True, allow_nan=False, separators=(",", ":")) + "\n" for row in rows)
    path.write_text(text, encoding="ascii")
