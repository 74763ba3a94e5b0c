"""SQLite file that the processes of a run share.

The file is in WAL mode, so it belongs on a local disk: several processes of one machine may use it, and a network file
system may not hold it. A damaged file is renamed, and a new one begins; one that was never ours is refused.
"""

from __future__ import annotations

import fcntl
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from vlmrl.errors import RecipeError, RewardError
from vlmrl.redaction.redact import excerpt

BUSY_SECONDS = 60.0
"""Longest wait for the lock of another process, in seconds. Each transaction takes about a millisecond."""
ALONE = ":memory:"
_CHECKED = set[int]()
"""Inodes of the files that this process, or the one that it was forked from, has read whole for damage."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class FileKind:
    """Kind of a file.

    Args:
        name: what messages call the file.
        application: mark in its head: other programs' databases are never touched.
        version: of its tables.
        schema: SQL that makes the tables.
        loss: what a new file in the place of a damaged one means, in words.
        setting: setting that names the file.
    """

    name: str
    application: int
    version: int
    schema: str
    loss: str
    setting: str

    @property
    def hint(self) -> str:
        """Next step where the file cannot be used."""
        return f"name another file on a local disk: {self.setting}"


def open_to_read(path: Path) -> sqlite3.Connection:
    """Return a file, which may be another process's, for reading alone. Raises: sqlite3.Error."""
    # A file that another process writes has a log beside it. Without one, the folder need not be writable.
    has_log = path.with_name(f"{path.name}-wal").exists()
    address = f"{path.absolute().as_uri()}?mode=ro{'' if has_log else '&immutable=1'}"
    return sqlite3.connect(address, uri=True, check_same_thread=False)


class _DamagedError(Exception):
    """File that is no SQLite database, or a damaged one."""


class Database:
    """Open file. Its methods may be called from any thread; a process that was forked must open it anew.

    Args:
        path: the file; its folder is made if it is missing. None = in memory, for this process alone.
        notify: called with a line for the user before a damaged file is renamed; it may raise instead.
    Raises: RecipeError when the path cannot be used, or is a file of another program or version.
    """

    def __init__(self, kind: FileKind, path: Path | None, *, notify: Callable[[str], Any] = lambda text: None) -> None:
        self.kind, self.path, self._notify, self._lock, self._inode = kind, path, notify, threading.Lock(), 0
        self._connection = self._open()

    def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return `work(connection)`, in one transaction that no other process interrupts.

        Raises: RewardError when the disk is full, or the file stays locked; and as `work`.
        """
        with self._lock:
            if not self._is_current():
                self._reopen()
            for last in (False, True):
                try:
                    with self._transaction() as connection:
                        return work(connection)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, (sqlite3.OperationalError, sqlite3.ProgrammingError)) or last:
                        hint = "is the disk full, or the file on a network file system?"
                        raise RewardError(f"{self.kind.name} fails: {error}", where=self._name, hint=hint) from None
                    _CHECKED.discard(self._inode)
                    self._reopen()
        raise AssertionError("not reached")

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        with self._lock:
            self._connection.close()

    @property
    def _name(self) -> str:
        return str(self.path) if self.path is not None else ALONE

    def _is_current(self) -> bool:
        """Return whether the open file is the one at the path: another process may have renamed a damaged one."""
        if self.path is None:
            return True
        try:
            return self.path.stat().st_ino == self._inode
        except OSError:
            return False

    def _reopen(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()
        self._connection = self._open()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")
            raise

    def _open(self) -> sqlite3.Connection:
        if self.path is None:
            return _prepared(self.kind, ALONE)
        try:
            if not self._inode:  # later, a folder that is gone was removed on purpose, such as a whole run
                self.path.parent.mkdir(parents=True, exist_ok=True)
            if not _was_ours(self.path, self.kind):
                raise RecipeError(f"{self.kind.name} belongs to another program", where=self._name, hint=self.kind.hint)
            # Two processes that find the same damage must not rename each other's new file.
            with self.path.with_name(f"{self.path.name}.lock").open("a") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                try:
                    connection = _prepared(self.kind, str(self.path))
                except _DamagedError as error:
                    aside = self._aside()
                    self._notify(
                        f"{self.kind.name} {self.path} is damaged ({error}); it is now {aside.name}, and a new one "
                        f"begins: {self.kind.loss}"
                    )
                    self.path.rename(aside)
                    for ending in ("-wal", "-shm"):
                        self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
                    connection = _prepared(self.kind, str(self.path))
                self._inode = self.path.stat().st_ino
                _CHECKED.add(self._inode)
                return connection
        except (OSError, sqlite3.Error, _DamagedError) as error:
            why = getattr(error, "strerror", None) or error
            message = f"{self.kind.name} cannot be opened: {why}"
            raise RecipeError(message, where=str(self.path), hint=self.kind.hint) from None

    def _aside(self) -> Path:
        """Return the new path of the damaged file."""
        assert self.path is not None
        number = int(time.time())
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        return aside


def _was_ours(path: Path, kind: FileKind) -> bool:
    """Return whether a file is missing, empty, marked as of the kind, or was opened by us: its lock lies beside it."""
    if not path.exists() or path.with_name(f"{path.name}.lock").exists():
        return True
    with path.open("rb") as file:
        head = file.read(100)
    return not head or head[68:72] == kind.application.to_bytes(4, "big")


def _prepared(kind: FileKind, name: str) -> sqlite3.Connection:
    """Open and check a database, and create its tables. Raises: sqlite3.Error, RecipeError or _DamagedError."""
    connection = sqlite3.connect(name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (application != kind.application and (tables or application)) or version not in (0, kind.version):
            what = "another program" if application != kind.application else "another version of vlmrl"
            raise RecipeError(f"{kind.name} belongs to {what}", where=name, hint=kind.hint)
        if name == ALONE or Path(name).stat().st_ino not in _CHECKED:  # it reads all of the file
            problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if problem != "ok":
                raise _DamagedError(excerpt(str(problem), 100))
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if tables == 0 or version == 0:
            marks = f"PRAGMA application_id={kind.application}; PRAGMA user_version={kind.version};"
            connection.executescript(f"BEGIN IMMEDIATE; {kind.schema} {marks} COMMIT;")
        return connection
    except BaseException as error:
        connection.close()
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            raise _DamagedError(excerpt(str(error), 100)) from None
        raise
