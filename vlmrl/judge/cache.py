"""Cache of verdicts: each request is paid for once, whatever the process and the run that asks."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmrl.judge.database import Database, open_to_read
from vlmrl.judge.failures import InvalidVerdict
from vlmrl.judge.prompt import PROMPT_VERSION, JudgeRequest
from vlmrl.judge.rubric import Rubric
from vlmrl.judge.verdict import Verdict, read_verdict


def request_key(
    request: JudgeRequest, rubric: Rubric, *, provider: str, model: str, parameters: Mapping[str, Any]
) -> str:
    """Return the sha256 of all that a verdict depends on. The server's address and the key are no part of it."""
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


class StoredVerdicts:
    """Verdicts in a file that is only read, such as that of a packed run or of another folder.

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
                notify(f"stored verdicts cannot be read: {error} ({path})")

    def get(self, key: str) -> Verdict | None:
        """Return a verdict; None if it is not there, or cannot be read."""
        if self._connection is None:
            return None
        try:
            row = self._connection.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()
            return None if row is None else read_verdict(self._rubric, str(row[0]))
        except InvalidVerdict:
            return None
        except sqlite3.Error as error:
            self._notify(f"stored verdicts cannot be read: {error} ({self._path})")
            self.close()
            return None

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class VerdictCache:
    """Verdicts in a database, by the key of their request."""

    def __init__(self, database: Database, rubric: Rubric) -> None:
        self._database, self._rubric = database, rubric

    def get(self, key: str) -> Verdict | None:
        """Return a verdict; None if it is not there. One that cannot be read is deleted."""

        def work(connection: sqlite3.Connection) -> Verdict | None:
            row = connection.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()
            if row is None:
                return None
            try:
                return read_verdict(self._rubric, str(row[0]))
            except InvalidVerdict:
                connection.execute("DELETE FROM verdicts WHERE key = ?", (key,))
                return None

        return self._database.run(work)

    def keep(
        self, key: str, verdict: Verdict, *, input_tokens: int | None, output_tokens: int | None, seconds: float
    ) -> Verdict:
        """Keep a verdict. Return the one that the cache has: another process may have kept its own before.

        Raises: ValueError for a score that is not finite, or for a score of an outage.
        """
        if verdict.is_outage:
            raise ValueError("a score of an outage is no verdict")
        text = verdict.as_json()

        def work(connection: sqlite3.Connection) -> str:
            values = (key, text, input_tokens, output_tokens, seconds, time.time())
            connection.execute("INSERT OR IGNORE INTO verdicts VALUES (?, ?, ?, ?, ?, ?)", values)
            return str(connection.execute("SELECT verdict FROM verdicts WHERE key = ?", (key,)).fetchone()[0])

        kept = self._database.run(work)
        try:
            return verdict if kept == text else read_verdict(self._rubric, kept)
        except InvalidVerdict:
            return verdict

    def count(self) -> int:
        """Return the number of verdicts."""
        return self._database.run(lambda c: int(c.execute("SELECT count(*) FROM verdicts").fetchone()[0]))
