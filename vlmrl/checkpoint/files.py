"""The files of a checkpoint against the table in its meta.json."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrl.checkpoint.format import read_meta
from vlmrl.dist.world import World
from vlmrl.errors import CheckpointError
from vlmrl.store.layout import META

_compared: Path | None = None
"""A checkpoint all of whose files the processes of this run have just read."""


def check_files(folder: Path, under: str = "") -> list[str]:
    """Compare the files under `folder/under` with the table in meta.json: names, sizes and sha256.

    Returns: the names checked. Raises: CheckpointError naming the first file that is missing or differs.
    """
    table = {n: f for n, f in read_meta(folder)["files"].items() if n == under or n.startswith(under and f"{under}/")}
    if not table:
        raise CheckpointError(f"{META} says nothing of {under or 'any file'}", where=str(folder),
                              hint="use another checkpoint of the run")  # fmt: skip
    for name, wanted in table.items():
        _check_file(folder, name, wanted, read=folder != _compared)
    return sorted(table)


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
        table = sorted(read_meta(folder)["files"].items())
        for i in world.mine(len(table)):
            _check_file(folder, *table[i])
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


def _check_file(folder: Path, name: str, wanted: dict[str, Any], *, read: bool = True) -> None:
    path = folder / name
    there = path.is_file()
    if there and path.stat().st_size == wanted["bytes"] and not (read and sha256_of(path) != wanted["sha256"]):
        return
    raise CheckpointError(
        f"{name} {'was changed since it was saved' if there else 'is missing'}", where=str(folder),
        hint="use another checkpoint of the run; --resume takes the one before when this folder is gone",
    )  # fmt: skip


def file_facts(path: Path) -> dict[str, Any]:
    """A file's line in the table."""
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_tree(folder: Path) -> None:
    """Everything in a folder, and it, on the disk."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
