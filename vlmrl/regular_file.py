"""Check before opening that a user's path is a regular file: opening a named pipe would wait forever."""

from __future__ import annotations

import stat
from pathlib import Path

LFS_START = b"version https://git-lfs.github.com/spec/"
_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a folder"),
)


def file_problem(path: Path) -> str | None:
    """Return why a path is no regular file with content, as text; None when it is one.

    A pointer of Git LFS is a regular file, but the file that it points to was never downloaded: it is refused as well.

    Raises: OSError when the path cannot be inspected.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        return f"is {kind}, not a regular file"
    with path.open("rb") as file:
        if file.read(len(LFS_START)) == LFS_START:
            return "is a Git LFS pointer: run git lfs pull"
    return None
