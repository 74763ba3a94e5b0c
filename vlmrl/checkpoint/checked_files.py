"""The files of a checkpoint, compared once by all processes of a run, and made durable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmrl.dist.world import World
from vlmrl.errors import CheckpointError
from vlmrl.store import checkpoints

_compared: Path | None = None
"""A checkpoint all of whose files the processes of this run have just read."""


def check_files(folder: Path, under: str = "") -> list[str]:
    """As `sealed.check_files`; within `compared_once` of this checkpoint no file is read again."""
    return checkpoints.check_files(folder, under, read=folder != _compared)


@contextmanager
def compared_once(folder: Path | None, world: World) -> Iterator[None]:
    """Inside, `check_files` reads no file of this checkpoint again: each was read once, by one of the processes.

    Raises: CheckpointError on all of them, naming the first file that is missing or differs.
    """
    global _compared
    if folder is None or world.size == 1:
        yield
        return
    error: CheckpointError | None = None
    try:
        table = list(checkpoints.listed(folder).items())
        for i in world.mine(len(table)):
            checkpoints.check_file(folder, *table[i])
    except CheckpointError as found:
        error = found
    first = next((e for e in world.gather(error) if e is not None), None)
    if first is not None:
        raise first
    _compared = folder
    try:
        yield
    finally:
        _compared = None


def sync_tree(folder: Path) -> None:
    """Write everything in a folder, and the folder, to the disk."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
