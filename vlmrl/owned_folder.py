"""Temporary folders that are removed even if their process was killed.

The owner holds an advisory lock on its folder, which the kernel releases. The next process that makes a folder of the
same kind removes those without a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path


class OwnedFolder:
    """New, empty folder of this process, which exists until `close` or the end of the process.

    Args:
        prefix: beginning of the folder's name, the same for all folders of a kind.
        parent: where it is created; None = in the temporary folder.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        for path in parent.glob(f"{prefix}*"):
            if (handle := _lock(path)) is not None:
                self.bury(path)
                os.close(handle)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            handle = _lock(self.path)
            if handle is not None:
                break  # else another process locked and removed it between the two lines above
        self._handle: int | None = handle

    def remove(self, path: Path) -> None:
        """Remove a folder of this kind, as far as possible. Its content is not to be trusted."""
        shutil.rmtree(path, ignore_errors=True)

    def bury(self, path: Path) -> None:
        """Remove the folder of a process that was killed."""
        self.remove(path)

    def close(self) -> None:
        """Remove the folder and what is in it. Safe to call twice."""
        if self._handle is not None:
            self.remove(self.path)
            os.close(self._handle)
            self._handle = None


def _lock(folder: Path) -> int | None:
    """Return a handle that locks the folder; None if another process holds it, it is gone, or another user owns it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(handle)
        if status.st_uid == os.getuid() and os.path.samestat(status, os.stat(folder)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return None
