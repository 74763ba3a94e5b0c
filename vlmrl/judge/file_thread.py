"""Thread for work on the judge's file. Work that waits is done together, in one transaction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from vlmrl.judge.database import Database

MOST_TOGETHER = 64
"""Largest number of pieces of work in one transaction."""
Result = TypeVar("Result")
_Item = tuple["asyncio.Future[Any]", Callable[[], Any]]


class FileThread:
    """Thread for work on a database: another process may hold its lock for a while."""

    def __init__(self, database: Database) -> None:
        self._database, self._items = database, SimpleQueue[_Item | None]()
        self._thread = threading.Thread(target=self._work, name="judge-file", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[..., Result], *args: Any) -> Result:
        """Return `work(*args)`, which may use the database. Raises: as the work."""
        future = asyncio.get_running_loop().create_future()
        self._items.put((future, partial(work, *args)))
        return await future

    def close(self) -> None:
        """Wait for the work, and end the thread."""
        self._items.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            items, ends = self._waiting()
            if items:
                outcomes = self._database.run_together([work for _, work in items])
                pairs = [(future, outcome) for (future, _), outcome in zip(items, outcomes, strict=True)]
                with suppress(RuntimeError):  # the event loop is closed, and nobody waits
                    items[0][0].get_loop().call_soon_threadsafe(_deliver, pairs)
            if ends:
                return

    def _waiting(self) -> tuple[list[_Item], bool]:
        """Wait for work. Return what is there, and whether the thread ends after it."""
        item = self._items.get()
        items: list[_Item] = []
        with suppress(Empty):
            while item is not None:
                items.append(item)
                if len(items) == MOST_TOGETHER:
                    return items, False
                item = self._items.get_nowait()
            return items, True
        return items, False


def _deliver(pairs: Sequence[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, outcome in pairs:
        if future.done():  # cancelled
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
