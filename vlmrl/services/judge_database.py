"""SQLite file that the processes of a run share: judgements, and what the calls have cost. It never has a key.

Each request is paid for once, whatever the process and the run that asks. The file is in WAL mode, so it belongs on a
local disk: several processes of one machine may use it, and a network file system may not hold it. A damaged file is
renamed, and a new one begins.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vlmrl.errors import RecipeError, RewardError
from vlmrl.redaction.redact import excerpt
from vlmrl.services.judge_prompt import PROMPT_VERSION, JudgeRequest
from vlmrl.services.protocol import InvalidJudgement
from vlmrl.services.rubric import Judgement, Rubric, read_judgement

APPLICATION = 0x766C6D6A
"""Mark in the head of the file: other programs' databases are never touched."""
VERSION = 1
BUSY_SECONDS = 60.0
"""Longest wait for the lock of another process, in seconds. Each transaction takes about a millisecond."""
ALONE = ":memory:"
SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    key TEXT PRIMARY KEY, verdict TEXT NOT NULL, input_tokens INTEGER, output_tokens INTEGER,
    seconds REAL NOT NULL, written REAL NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (
    account TEXT PRIMARY KEY, calls INTEGER NOT NULL, cost REAL NOT NULL,
    input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL, largest_input INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reserved (
    id INTEGER PRIMARY KEY AUTOINCREMENT, account TEXT NOT NULL, cost REAL NOT NULL, until REAL NOT NULL
);
"""
Result = TypeVar("Result")


def open_to_read(path: Path) -> sqlite3.Connection:
    """Return a file of judgements, which may be another process's, for reading alone. Raises: sqlite3.Error."""
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
        notify: called with a line for the user when a damaged file was renamed.
    Raises: RecipeError when the path cannot be used, or is the database of another program or version.
    """

    def __init__(self, path: Path | None, *, notify: Callable[[str], Any] = lambda text: None) -> None:
        self.path, self._notify, self._lock, self._inode = path, notify, threading.Lock(), 0
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
                        raise RewardError(f"the judge's file fails: {error}", where=self._name, hint=hint) from None
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
            return _prepared(ALONE)
        try:
            if not self._inode:  # later, a folder that is gone was removed on purpose, such as a whole run
                self.path.parent.mkdir(parents=True, exist_ok=True)
            # Two processes that find the same damage must not rename each other's new file.
            with self.path.with_name(f"{self.path.name}.lock").open("a") as guard:
                fcntl.flock(guard, fcntl.LOCK_EX)
                try:
                    connection = _prepared(str(self.path))
                except _DamagedError as error:
                    aside = self._rename()
                    self._notify(
                        f"the judge's file {self.path} is damaged ({error}); it is now {aside.name}, and a new one "
                        f"begins: judgements are asked for again, and calls and cost are counted from 0"
                    )
                    connection = _prepared(str(self.path))
                self._inode = self.path.stat().st_ino
                return connection
        except OSError as error:
            raise RecipeError(
                f"the judge's file cannot be opened: {error.strerror or error}", where=str(self.path), hint=_PLACE_HINT
            ) from None
        except (sqlite3.Error, _DamagedError) as error:
            raise RecipeError(
                f"the judge's file cannot be opened: {error}", where=str(self.path), hint=_PLACE_HINT
            ) from None

    def _rename(self) -> Path:
        """Rename the damaged file, and drop what SQLite keeps beside it. Return its new path."""
        assert self.path is not None
        number = int(time.time())
        while (aside := self.path.with_name(f"{self.path.name}.damaged-{number}")).exists():
            number += 1
        self.path.rename(aside)
        for ending in ("-wal", "-shm"):
            self.path.with_name(self.path.name + ending).unlink(missing_ok=True)
        return aside


_PLACE_HINT = "name another file on a local disk: [judge] cache"


def _prepared(name: str) -> sqlite3.Connection:
    """Open and check a database, and create its tables. Raises: sqlite3.Error, RecipeError or _DamagedError."""
    connection = sqlite3.connect(name, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if (application != APPLICATION and (tables or application)) or version not in (0, VERSION):
            what = "another program" if application != APPLICATION else "another version of vlmrl"
            raise RecipeError(f"the judge's file belongs to {what}", where=name, hint=_PLACE_HINT)
        problem = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if problem != "ok":
            raise _DamagedError(excerpt(str(problem), 100))
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if tables == 0 or version == 0:
            connection.executescript(
                f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA application_id={APPLICATION}; PRAGMA user_version={VERSION}; COMMIT;"
            )
        return connection
    except sqlite3.OperationalError:
        connection.close()
        raise
    except sqlite3.DatabaseError as error:
        connection.close()
        raise _DamagedError(excerpt(str(error), 100)) from None
    except BaseException:
        connection.close()
        raise


class FileThread:
    """Thread for work on a database: another process may hold its lock for a while."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="judge-file")

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Return `work(*args)`, which may use the database. Raises: as the work."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(work, *args))

    def close(self) -> None:
        """Wait for the work, and end the thread."""
        self._pool.shutdown()


def request_key(
    request: JudgeRequest, rubric: Rubric, *, provider: str, model: str, parameters: Mapping[str, Any]
) -> str:
    """Return the sha256 of all that a judgement depends on. The server's address and the key are no part of it."""
    reference, candidate, texts = request.hashes()
    fields = {
        "prompt": PROMPT_VERSION,
        "reference": reference,
        "candidate": candidate,
        "texts": texts,
        "rubric": rubric.sha256,
        "provider": provider,
        "model": model,
        "parameters": dict(parameters),
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode("ascii")).hexdigest()


class StoredJudgements:
    """Judgements in a file that is only read, such as that of a packed run or of another folder.

    Args:
        path: the file; it need not exist.
        notify: called with a line for the user when the file cannot be read.
    """

    def __init__(self, path: Path, rubric: Rubric, notify: Callable[[str], Any]) -> None:
        self._path, self._rubric, self._notify = path, rubric, notify
        self._connection: sqlite3.Connection | None = None
        if path.is_file():
            try:
                self._connection = open_to_read(path)
            except sqlite3.Error as error:
                notify(f"stored judgements cannot be read: {error} ({path})")

    def get(self, key: str) -> Judgement | None:
        """Return a judgement; None if it is not there, or cannot be read."""
        if self._connection is None:
            return None
        try:
            row = self._connection.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()
            return None if row is None else read_judgement(self._rubric, str(row[0]))
        except InvalidJudgement:
            return None
        except sqlite3.Error as error:
            self._notify(f"stored judgements cannot be read: {error} ({self._path})")
            self.close()
            return None

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class JudgementCache:
    """Judgements in a database, by the key of their request."""

    def __init__(self, database: Database, rubric: Rubric) -> None:
        self._database, self._rubric = database, rubric

    def get(self, key: str) -> Judgement | None:
        """Return a judgement; None if it is not there. One that cannot be read is deleted."""

        def work(connection: sqlite3.Connection) -> Judgement | None:
            row = connection.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            try:
                return read_judgement(self._rubric, str(row[0]))
            except InvalidJudgement:
                connection.execute("DELETE FROM verdicts WHERE key = ?", (key,))
                return None

        return self._database.run(work)

    def keep(
        self, key: str, judgement: Judgement, *, input_tokens: int | None, output_tokens: int | None, seconds: float
    ) -> Judgement:
        """Keep a judgement. Return the one that the cache has: another process may have kept its own before.

        Raises: ValueError for a score that is not finite, or for a score of an outage.
        """
        if judgement.is_outage:
            raise ValueError("a score of an outage is not a judgement")
        text = judgement.as_json()

        def work(connection: sqlite3.Connection) -> str:
            values = (key, text, input_tokens, output_tokens, seconds, time.time())
            connection.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", values)
            return str(connection.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()[0])

        kept = self._database.run(work)
        try:
            return judgement if kept == text else read_judgement(self._rubric, kept)
        except InvalidJudgement:
            return judgement

    def count(self) -> int:
        """Return the number of judgements."""
        return self._database.run(lambda c: int(c.execute("SELECT count(*) FROM verdicts").fetchone()[0]))
