"""Things that are costly to make, kept while there is room for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Values by key, the least recently used going first when they are too large together.

    Args: limit_bytes: of all values; the newest stays, however large it is.    size_of: bytes of a value.
    """

    def __init__(self, limit_bytes: int, size_of: Callable[[T], int]) -> None:
        self.limit_bytes, self.size_of = limit_bytes, size_of
        self.bytes = 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made by `make` unless it is there. What `make` raises goes on, and nothing is kept."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        made = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = made
                self.bytes += self.size_of(made)
            while self.bytes > self.limit_bytes and len(self._values) > 1:
                self.bytes -= self.size_of(self._values.popitem(last=False)[1])
        return made
