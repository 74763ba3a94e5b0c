"""Check before opening that a user's path is a regular file: opening a named pipe would wait forever."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

MOST_BYTES = 64 << 20
"""Maximum size of a small file, such as a manifest of a few KB."""
RUN_RECORD = "manifest.json"
"""File that every run has."""
RUN_PARTS = ("rollouts", "checkpoints", "eval", "resolved.json", "metrics.jsonl")
"""Further files and folders of runs (store/layout.py): a folder with one of them beside the record is a run."""
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
    if problem := _kind_problem(path.stat().st_mode):
        return problem
    with path.open("rb") as file:
        if file.read(len(LFS_START)) == LFS_START:
            return "is a Git LFS pointer: run git lfs pull"
    return None


def run_around(path: Path) -> Path | None:
    """Return the run in whose folder a file lies, links followed; None if it lies in no run.

    A run may be a stranger's, so no code in it is ever run: neither the copies in `kept/` nor any other file.
    """
    runs = (one for one in path.resolve().parents if os.path.lexists(one / RUN_RECORD))
    return next((one for one in runs if any(os.path.lexists(one / part) for part in RUN_PARTS)), None)


def read_regular(path: Path | str, most_bytes: int = MOST_BYTES, *, last: int | None = None) -> bytes:
    """Return the content of a small file of an untrusted folder, without waiting for a pipe or reading without end.

    Args:
        last: return only so many bytes at the end; the file may then be of any size.
    Raises: OSError, also for a link, for a file that is no regular one, and for more than `most_bytes` bytes.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link, which is not followed", path) from None
        raise
    try:
        status = os.fstat(handle)
        if problem := _kind_problem(status.st_mode):
            raise OSError(errno.EINVAL, f"it {problem}", path)
        if last is not None:
            return os.pread(handle, last, max(0, status.st_size - last))
        if status.st_size > most_bytes:
            raise OSError(errno.EFBIG, f"it has {status.st_size:,} bytes; at most {most_bytes:,} are read", path)
        blocks = [os.read(handle, 1 << 16)]
        # The end is the first short block: this takes half the time of `open(...).read()`, with 10,000 files.
        while len(blocks[-1]) == 1 << 16 and len(blocks) << 16 <= most_bytes:
            blocks.append(os.read(handle, 1 << 16))
    finally:
        os.close(handle)
    return b"".join(blocks)


def entry_problems(folder: Path, unread: Collection[str] = ()) -> Iterator[tuple[Path, str]]:
    """Yield (path, problem) of each entry of an untrusted folder, at any depth, that must not be opened.

    It is neither a file nor a folder, or it is a link out of the folder. No entry is opened, and no link is followed.

    Args:
        unread: names of folders directly in `folder` that no reader opens; their content is not looked at.
    """
    root, pending = os.path.realpath(folder), [os.fspath(folder)]
    while pending:
        path = pending.pop()
        try:
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.is_symlink():
                        if not os.path.realpath(entry.path).startswith(f"{root}{os.sep}"):
                            yield Path(entry.path), "is a link that leads outside the run"
                    elif entry.is_dir():
                        pending += [] if path == os.fspath(folder) and entry.name in unread else [entry.path]
                    elif not entry.is_file():
                        yield Path(entry.path), _kind_problem(entry.stat().st_mode) or "changed while it was looked at"
        except FileNotFoundError:
            continue  # a process that writes the run has removed it
        except OSError as error:
            yield Path(path), f"cannot be read: {error.strerror}"


def _kind_problem(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
    return f"is {kind}, not a regular file"
