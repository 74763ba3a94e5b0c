"""Bounded cache of values that are costly to make."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Values by key, up to a total size; the least recently used values go first.

    Args:
        limit_bytes: limit of all values together, in bytes; the newest value stays, however large it is.
        size_of: returns the size of a value in bytes.
    """

    def __init__(self, limit_bytes: int, size_of: Callable[[T], int]) -> None:
        self.limit_bytes, self.size_of = limit_bytes, size_of
        self.bytes = 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; `make` is called if there is none.

        An exception of `make` is passed on, and nothing is stored.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        # `make` is called without the lock. So two threads may make the same value; the cache keeps the first one.
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self.bytes += self.size_of(value)
            while self.bytes > self.limit_bytes and len(self._values) > 1:
                self.bytes -= self.size_of(self._values.popitem(last=False)[1])
        return value
