"""File of a judge that the processes of a run share: judgements, and what the calls have cost. It never has a key.

Each request is paid for once, whatever the process and the run that asks.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from vlmrl.services.judge_prompt import PROMPT_VERSION, JudgeRequest
from vlmrl.services.protocol import InvalidJudgement
from vlmrl.services.rubric import Judgement, Rubric, read_judgement
from vlmrl.services.shared_file import Database, FileKind, Result, open_to_read

JUDGEMENTS = FileKind(
    "the judge's file",
    application=0x766C6D6A,
    version=1,
    schema="""
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
""",
    loss="judgements are asked for again, and calls and cost are counted from 0",
    setting="[judge] cache",
)


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
