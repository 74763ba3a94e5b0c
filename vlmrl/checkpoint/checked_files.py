"""Check of a checkpoint's files, which the ranks of a run share among them; and fsync of folders."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmrl.dist.world import World
from vlmrl.errors import CheckpointError
from vlmrl.store import checkpoints

_compared: Path | None = None
"""Checkpoint whose files have all been read and compared, each by one rank of this run; None = none."""


def check_files(folder: Path, under: str = "") -> list[str]:
    """Check files as `store.checkpoints.check_files` does. Within `compared_once`, their content is not read again."""
    return checkpoints.check_files(folder, under, read=folder != _compared)


@contextmanager
def compared_once(folder: Path | None, world: World) -> Iterator[None]:
    """Context manager: at its start, each file of the checkpoint is compared by one of the ranks, and then not again.

    Raises: CheckpointError on all ranks, with the name of the first file that is missing or differs.
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
    except CheckpointError as problem:
        error = problem
    first = next((e for e in world.gather(error) if e is not None), None)
    if first is not None:
        raise first
    _compared = folder
    try:
        yield
    finally:
        _compared = None


def sync_tree(folder: Path) -> None:
    """Write everything in a folder, and the folder itself, to disk (fsync)."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
