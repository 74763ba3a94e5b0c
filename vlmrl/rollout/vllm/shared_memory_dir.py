"""Folder in memory for files passed to an engine, which is removed even if its process was killed.

The owner holds an advisory lock on the folder itself. The kernel releases the lock when the owner ends, in any way. The
next process that creates such a folder removes those without a lock, and the shared memory that they list.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

TMPFS = Path("/dev/shm")
PREFIX = "vlmrl-adapter-"
SEGMENTS = "segments"
"""File in the folder: names of shared memory that an engine's processes would leave behind when they are killed."""


class OwnedFolder:
    """New, empty folder of this process, which exists until `close` or the end of the process.

    Args:
        parent: where it is created; None = in memory where the system has /dev/shm, else in the temporary folder.
    """

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or (TMPFS if TMPFS.is_dir() else Path(tempfile.gettempdir()))
        _remove_ownerless(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            handle = _lock(self.path)
            if handle is not None:
                break  # else another process locked and removed it between the two lines above
        self._handle: int | None = handle

    def adopt_segments(self) -> None:
        """Record all shared memory that this process and its descendants use now: it is removed with the folder."""
        (self.path / SEGMENTS).write_text("\n".join(_segments(os.getpid())))

    def close(self) -> None:
        """Remove the folder and what is in it. Safe to call twice."""
        if self._handle is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._handle)
            self._handle = None


def _remove_ownerless(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*"):
        if (handle := _lock(path)) is not None:
            if (path / SEGMENTS).is_file() and path.stat().st_uid == os.getuid():
                for name in (path / SEGMENTS).read_text().splitlines():
                    with suppress(OSError):
                        (TMPFS / Path(name).name).unlink()  # only in /dev/shm, whatever path the file names
            shutil.rmtree(path, ignore_errors=True)
            os.close(handle)


def _segments(pid: int) -> list[str]:
    """Return the names under /dev/shm that a process or a descendant has mapped; empty where there is no /proc."""
    try:
        maps, below = Path(f"/proc/{pid}/maps").read_text(), Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    names = {line.partition(f"{TMPFS}/")[2] for line in maps.splitlines() if f" {TMPFS}/" in line}
    names = {name for name in names if "/" not in name and not name.endswith(" (deleted)")}
    return sorted(names.union(*(_segments(int(child)) for child in below.split())))


def _lock(folder: Path) -> int | None:
    """Return a handle that locks the folder; None if another process holds it, it is gone, or another user owns it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(folder)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None
