"""Atomic writes: after a kill at any time, either the old file or the new one exists, never a part of it."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.store.layout import LOGGER_FOLDERS
from vlmrl.untrusted import entry_problems

TEMP_PREFIX = ".tmp-"
TRASH_PREFIX = ".trash-"


def temp_path(path: Path) -> Path:
    """Return a temporary name beside `path`. Readers ignore such names, and no other process uses the same one."""
    return path.with_name(f"{TEMP_PREFIX}{path.name}-{os.getpid()}-{secrets.token_hex(3)}")


def write_atomic(path: Path, content: bytes, *, crash: str | None = None) -> None:
    """Write a whole file: temporary name, fsync, rename, fsync of the folder.

    Args:
        crash: name of the crash point in the middle of the write (see `crash_point`).
    Raises: StoreError if the write fails (disk full, read-only, no such folder). No temporary file is left then.
    """
    temp = temp_path(path)
    half = len(content) // 2
    try:
        with open(temp, "wb") as file:
            file.write(content[:half])
            if crash is not None:
                file.flush()
                crash_point(crash)
            file.write(content[half:])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temp.unlink()
        raise StoreError(f"cannot write: {error.strerror or error}", where=str(path)) from error


def write_json(path: Path, value: Any, *, crash: str | None = None) -> None:
    """Write a JSON value atomically, indented. Raises: ValueError for NaN and infinities, which are not JSON."""
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomic(path, (text + "\n").encode("utf-8", "backslashreplace"), crash=crash)


def sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames inside the folder durable, if the file system supports it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def require_ordinary(run_dir: Path) -> None:
    """Check, before anything in a run folder is read, that no reader will wait for a pipe or follow a link out of it.

    Raises: StoreError for the first entry that must not be opened.
    """
    for path, problem in entry_problems(run_dir, LOGGER_FOLDERS):
        raise StoreError(f"this {problem}; no command opens it", where=str(path), hint=ENTRY_HINT)


ENTRY_HINT = "remove it from the run, or put a copy of the file in its place"


def link_tree(source: Path, target: Path) -> None:
    """Create a copy `target` of a folder whose files are hard links, or copies if the file system has no hard links.

    Use it only for files that are never changed in place. The links are on disk when the function returns.

    Raises: OSError.
    """
    target.mkdir(parents=True)
    for path in sorted(source.rglob("*")):
        other = target / path.relative_to(source)
        if path.is_dir():
            other.mkdir()
            continue
        try:
            os.link(path, other)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copy2(path, other)
            sync_file(other)
    for folder in (target, *(p for p in target.rglob("*") if p.is_dir())):
        sync_folder(folder)


def remove_tree(path: Path, *, strict: bool = False) -> None:
    """Delete a folder. It is renamed first, so that a kill never leaves a half-deleted folder under its name.

    Args:
        strict: whether to raise a StoreError for what cannot be deleted; else it stays under a hidden name.
    """
    if not path.name.startswith(TRASH_PREFIX):
        trash = path.with_name(f"{TRASH_PREFIX}{path.name}-{secrets.token_hex(3)}")
        os.replace(path, trash)
        sync_folder(path.parent)
        path = trash
    crash_point("mid-prune")
    shutil.rmtree(path, ignore_errors=True)
    if strict and path.exists():
        deepest = max(path.rglob("*"), default=path)
        hint = f"allow it (chmod -R u+w), then delete what is left by hand: {path}"
        raise StoreError("this cannot be deleted", where=str(deepest), hint=hint)


def leftovers(folder: Path) -> list[Path]:
    """Return temporary and half-deleted files and folders under `folder`, left by a process that was killed."""
    paths: list[Path] = []
    for base, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if name.startswith((TEMP_PREFIX, TRASH_PREFIX)):
                paths.append(Path(base, name))
        folders[:] = [name for name in folders if not name.startswith((TEMP_PREFIX, TRASH_PREFIX))]
    return sorted(paths)


def sweep(folder: Path) -> list[Path]:
    """Remove the leftovers under `folder` and return them. Only the process that owns the run may call this."""
    removed = leftovers(folder)
    for path in removed:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
    return removed


@contextlib.contextmanager
def folder_guard(folder: Path) -> Iterator[None]:
    """Context manager: lock a folder while a small file in it is read, changed and written, so that no change is lost.

    It is an advisory lock on the folder itself. If the file system has no locks, the file is changed without one.
    """
    handle = None
    try:
        import fcntl

        handle = os.open(folder, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


VARIABLE = "VLMRL_CRASH_AT"
EXIT_CODE = 137
_hits: dict[str, int] = {}


def crash_point(name: str) -> None:
    """End this process at once, as a kill would, if the environment variable `VLMRL_CRASH_AT` names this point.

    The value is the name of a point, or `name:3` for the third time that the point is passed. Buffers are not flushed
    and no `finally` block runs. Points: mid-manifest, mid-rollout, mid-save, before-complete, mid-prune,
    mid-answers.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    point, _, count = setting.partition(":")
    if point != name:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] >= int(count or 1):
        os._exit(EXIT_CODE)
