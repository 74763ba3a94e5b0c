"""Results of search engines in a file: each query is asked once, at a bounded rate, and a run can be replayed."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vlmrl.search.index import Passage
from vlmrl.services.protocol import EndpointDown
from vlmrl.services.shared_file import Database, FileKind
from vlmrl.untrusted import parse_json

SEARCHES = FileKind(
    "the file of search results",
    application=0x766C6D73,
    version=1,
    schema="""
CREATE TABLE results (
    engine TEXT, query TEXT, count INTEGER, refusal TEXT NOT NULL, passages TEXT NOT NULL, written REAL NOT NULL,
    PRIMARY KEY (engine, query, count)
) WITHOUT ROWID;
CREATE TABLE rate (engine TEXT PRIMARY KEY, next REAL NOT NULL) WITHOUT ROWID;
""",
    loss="queries are asked again",
    setting="environment.args.cache",
)


@dataclass(frozen=True)
class Results:
    """Results for a query. `refusal`: why the engine refuses the query; "" = it does not."""

    passages: Sequence[Passage] = ()
    refusal: str = ""


class SearchCache:
    """Results of one engine, shared by the processes of this machine. A forked process must open its own.

    Args:
        engine: name of the engine, with its address where the user names one.
        per_second: requests a second of all processes together; 0 = no limit.
        clock: seconds since 1970.
        notify: as for `Database`.
    """

    def __init__(
        self,
        path: Path,
        engine: str,
        per_second: float = 0.0,
        clock: Callable[[], float] = time.time,
        notify: Callable[[str], Any] = lambda text: None,
    ) -> None:
        self._database, self._engine = Database(SEARCHES, path, notify=notify), engine
        self._interval, self._clock = 1 / per_second if per_second else 0.0, clock

    def get(self, query: str, most: int) -> Results | None:
        """Return the results for a query; None if it was not asked before."""
        select = "SELECT refusal, passages FROM results WHERE engine = ? AND query = ? AND count = ?"
        row = self._database.run(lambda c: c.execute(select, (self._engine, query, most)).fetchone())
        try:
            return None if row is None else Results([Passage(**one) for one in parse_json(row[1])], row[0])
        except (ValueError, TypeError):
            return None

    def keep(self, query: str, most: int, results: Results) -> None:
        """Keep the results for a query, unless another process has kept its own."""
        passages = json.dumps([asdict(one) for one in results.passages])
        values = (self._engine, query, most, results.refusal, passages, self._clock())
        self._database.run(lambda c: c.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?, ?, ?)", values))

    def pause(self, most: float) -> float:
        """Take the next place in the queue of requests. Return the seconds until it is due.

        Raises: EndpointDown if these are more than `most`; the place is not taken then.
        """
        if not self._interval:
            return 0.0

        def work(connection: sqlite3.Connection) -> float:
            now = self._clock()
            row = connection.execute("SELECT next FROM rate WHERE engine = ?", (self._engine,)).fetchone()
            place = max(now, row[0] if row else 0.0)
            if place - now > most:
                hint = "raise `seconds` or `per_second` in environment.args, or lower rollout.prompts_per_step"
                raise EndpointDown("the queue of requests is longer than half of `seconds`", hint=hint)
            connection.execute("INSERT OR REPLACE INTO rate VALUES (?, ?)", (self._engine, place + self._interval))
            return place - now

        return self._database.run(work)

    def count(self) -> int:
        """Return the number of queries of this engine."""
        select = "SELECT count(*) FROM results WHERE engine = ?"
        return self._database.run(lambda c: int(c.execute(select, (self._engine,)).fetchone()[0]))

    def close(self) -> None:
        """Close the file."""
        self._database.close()
