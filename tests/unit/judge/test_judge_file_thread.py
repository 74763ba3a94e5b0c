"""The judge's file under load: waiting work shares a transaction, and stored verdicts are read where none may write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from vlmrl.services.judge_database import Database, FileThread, StoredVerdicts, VerdictCache
from vlmrl.services.rubric import VFIG, Verdict

COUNTS = {"input_tokens": 1, "output_tokens": 1, "seconds": 0.1}


def verdict(number: float) -> Verdict:
    return Verdict(dict.fromkeys(VFIG.names, number), "why")


def test_waiting_work_shares_a_transaction_and_an_error_is_that_of_its_own_work(tmp_path: Path) -> None:
    database = Database(tmp_path / "judge.sqlite")
    commits, gate = [], threading.Event()
    database._connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    cache, thread = VerdictCache(database, VFIG), FileThread(database)

    def refuse() -> None:
        raise ValueError("not this one")

    async def work() -> list[Any]:
        first = asyncio.ensure_future(thread.run(gate.wait))
        keeps = [thread.run(lambda n=n: cache.keep(str(n), verdict(n / 10), **COUNTS)) for n in range(5)]
        tasks = [asyncio.ensure_future(one) for one in [*keeps, thread.run(refuse)]]
        await asyncio.sleep(0.05)
        gate.set()
        return await asyncio.gather(first, *tasks, return_exceptions=True)

    outcomes = asyncio.run(work())
    thread.close()
    # The gate was alone; the six others waited for it, and share one transaction although one of them fails.
    assert [type(outcome) for outcome in outcomes[1:]] == [Verdict] * 5 + [ValueError]
    assert len(commits) == 1 and cache.count() == 5
    database.close()


def test_work_is_repeated_alone_when_the_shared_transaction_fails(tmp_path: Path) -> None:
    database, calls = Database(tmp_path / "judge.sqlite"), []

    def broken(connection: sqlite3.Connection) -> None:
        calls.append(len(calls))
        raise sqlite3.OperationalError("disk I/O error")

    def fine(connection: sqlite3.Connection) -> int:
        connection.execute("INSERT INTO verdicts VALUES ('k', '{}', 1, 1, 0.1, 0.1)")
        return 7

    outcomes = database.run_together([lambda: database.run(fine), lambda: database.run(broken)])
    assert outcomes[0] == 7 and "disk I/O error" in str(outcomes[1]) and len(calls) == 2
    count = database.run(lambda c: c.execute("SELECT count(*) FROM verdicts").fetchone()[0])
    assert count == 1
    database.close()


@pytest.mark.parametrize("is_open", [False, True])
def test_stored_verdicts_are_read_and_never_written(tmp_path: Path, is_open: bool) -> None:
    path, notes = tmp_path / "judge.sqlite", []
    database = Database(path)
    VerdictCache(database, VFIG).keep("key", verdict(0.25), **COUNTS)
    if not is_open:
        database.close()
    before = sorted(file.name for file in tmp_path.iterdir())
    stored = StoredVerdicts(path, VFIG, notes.append)
    assert stored.get("key") == verdict(0.25) and stored.get("other") is None and notes == []
    assert sorted(file.name for file in tmp_path.iterdir()) == before
    stored.close()
    database.close()


def test_stored_verdicts_that_cannot_be_read_are_told_once(tmp_path: Path) -> None:
    path, notes = tmp_path / "judge.sqlite", []
    path.write_bytes(b"no database at all, but long enough to look like one" * 20)
    stored = StoredVerdicts(path, VFIG, notes.append)
    assert stored.get("key") is None and stored.get("key") is None
    assert len(notes) == 1 and str(path) in notes[0]
    missing = StoredVerdicts(tmp_path / "none.sqlite", VFIG, notes.append)
    assert missing.get("key") is None and len(notes) == 1 and not (tmp_path / "none.sqlite").exists()
