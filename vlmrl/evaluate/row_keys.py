"""Cluster ids of many rows in compact form, and the units that they make: 8 bytes per id instead of Python objects."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


class RowKeys(Sequence[tuple[int, ...]]):
    """Cluster ids of rows, as integers: equal ids are equal integers.

    Args:
        starts_N1: [N + 1] place of the first id of each row in `keys_K`, and its length at the end.
        keys_K: [K] the ids, row by row.
    """

    def __init__(self, starts_N1: Integers, keys_K: Integers) -> None:
        self.starts_N1, self.keys_K = starts_N1, keys_K

    @classmethod
    def of(cls, clusters: Iterable[Sequence[Hashable]]) -> RowKeys:
        """Return the ids of rows, numbered in the order in which they appear."""
        numbers: dict[Hashable, int] = {}
        starts, keys = array("q", [0]), array("q")
        for ids in clusters:
            keys.extend(numbers.setdefault(key, len(numbers)) for key in ids)
            starts.append(len(keys))
        return cls(as_numbers(starts), as_numbers(keys))

    def __len__(self) -> int:
        return len(self.starts_N1) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return tuple(self.keys_K[self.starts_N1[number] : self.starts_N1[number + 1]].tolist())

    def take(self, use_N: NDArray[np.bool_]) -> RowKeys:
        """Return the ids of the rows where `use_N` is true."""
        counts_N = np.diff(self.starts_N1)
        starts = np.concatenate([[0], np.cumsum(counts_N[use_N])]).astype(np.int64)
        return RowKeys(starts, self.keys_K[np.repeat(use_N, counts_N)])


class Incidence(NamedTuple):
    """Rows and units: the row and the unit of every pair, sorted by row, and the number of units."""

    rows_in: Integers
    unit_of: Integers
    count: int


def as_numbers(values: array[int]) -> Integers:
    """Return the numbers of an array, without a copy."""
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.zeros(0, dtype=np.int64)


def incidence_of(keys: RowKeys) -> Incidence:
    """Return the units of rows: ids that occur in exactly the same rows are one unit; a row without ids is its own.

    Units are numbered in the order in which their ids first appear; then come the rows without ids.
    """
    num_rows, counts_N = len(keys), np.diff(keys.starts_N1)
    row_K = np.repeat(np.arange(num_rows, dtype=np.int64), counts_N)
    order_K = np.lexsort((row_K, keys.keys_K))  # stable: within an id and a row, in the order of the row
    key_K, row_K = keys.keys_K[order_K], row_K[order_K]
    # An id that is twice in a row counts once. [K] -> [P] pairs of an id and a row
    is_new_K = np.ones(len(key_K), dtype=bool)
    is_new_K[1:] = (key_K[1:] != key_K[:-1]) | (row_K[1:] != row_K[:-1])
    key_P, row_P, place_P = key_K[is_new_K], row_K[is_new_K], order_K[is_new_K]
    # [P] -> [G] ids: begin of each id's pairs
    begin_G = np.flatnonzero(np.concatenate([[True], key_P[1:] != key_P[:-1]])) if len(key_P) else np.zeros(0, np.int64)
    own_rows = np.flatnonzero(counts_N == 0)
    if not len(begin_G):
        return Incidence(own_rows, np.arange(len(own_rows), dtype=np.int64), len(own_rows))
    size_G = np.diff(np.concatenate([begin_G, [len(key_P)]]))
    # Ids of the same rows have the same two sums of 64-bit hashes; others have equal sums with a chance of 2^-128.
    sums_G3 = np.stack([size_G.astype(np.uint64), *(np.add.reduceat(_hashed(row_P, s), begin_G) for s in (1, 2))], 1)
    _, unit_G = np.unique(sums_G3, axis=0, return_inverse=True)
    first_G = np.minimum.reduceat(place_P, begin_G)
    by_first_G = np.argsort(first_G)  # ids in the order in which they appear
    # [G] -> [M]: the first id of each unit, in that order
    _, chosen = np.unique(unit_G.ravel()[by_first_G], return_index=True)
    group_M = by_first_G[np.sort(chosen)]
    counts_M = size_G[group_M]
    offset = np.arange(counts_M.sum()) - np.repeat(np.cumsum(counts_M) - counts_M, counts_M)
    rows = np.concatenate([row_P[np.repeat(begin_G[group_M], counts_M) + offset], own_rows])
    own_units = np.arange(len(group_M), len(group_M) + len(own_rows))
    units = np.concatenate([np.repeat(np.arange(len(group_M)), counts_M), own_units])
    sorted_pairs = np.lexsort((units, rows))
    return Incidence(rows[sorted_pairs], units[sorted_pairs], len(group_M) + len(own_rows))


def _hashed(values: Integers, salt: int) -> NDArray[np.uint64]:
    """Return well mixed 64-bit hashes of integers (splitmix64, Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))
