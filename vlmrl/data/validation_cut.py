"""Separation of a validation split from training rows: nothing that rows share (an image, a text) is in both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vlmrl.types import hash64

MAX_LOST = 0.1
"""Largest share of the training rows that may be left out because their images would be in both splits."""


class RowUnits(NamedTuple):
    """Units of a row (such as its images and its text), and its label."""

    units: tuple[Hashable, ...]
    label: Hashable


@dataclass(frozen=True)
class Cut:
    """Positions of the rows that move to the new split, and of those that fit neither split; both sorted.

    All other rows stay in the training split.
    """

    taken: list[int]
    lost: list[int]


def cut_rows(rows: Sequence[RowUnits], num_rows: int, *, seed: int) -> Cut:
    """Select about `num_rows` rows for a new split, so that no unit is both in it and in the rows that stay.

    If the rows form groups that share no unit, whole groups are selected, and no row is lost. Otherwise units are drawn
    for the new split. A row is lost if some, but not all, of its units are drawn. At most 10% of all rows may be lost;
    to keep this limit, fewer rows than `num_rows` are selected. In the new split, each label has the same share as
    among all rows.

    Args:
        seed: the result depends on the seed and on the rows, not on the order of units within a row.
    """
    if num_rows <= 0 or not rows:
        return Cut([], [])
    taken = _whole_groups(rows, num_rows, seed)
    if 2 * len(taken) >= min(num_rows, len(rows)):
        return Cut(taken, [])
    return _drawn_units(rows, num_rows, seed)


def _whole_groups(rows: Sequence[RowUnits], num_rows: int, seed: int) -> list[int]:
    """Go through the groups in a random order, select each that keeps the total within `num_rows`; return the rows."""
    parent: dict[Hashable, Hashable] = {}

    def root(unit: Hashable) -> Hashable:
        parent.setdefault(unit, unit)
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    for row in rows:
        for unit in row.units[1:]:
            parent[root(unit)] = root(row.units[0])
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        groups[root(row.units[0])].append(position)
    if len(groups) == 1:
        return []
    taken: list[int] = []
    order = sorted(groups.values(), key=lambda members: hash64(seed, "group", members[0]))
    for members in order:
        if len(taken) + len(members) <= num_rows:
            taken += members
    return sorted(taken)


def _drawn_units(rows: Sequence[RowUnits], num_rows: int, seed: int) -> Cut:
    units = sorted({unit for row in rows for unit in row.units}, key=lambda unit: (hash64(seed, "unit", unit), unit))
    rank = {unit: number for number, unit in enumerate(units)}
    first = [min(rank[unit] for unit in row.units) for row in rows]
    last = [max(rank[unit] for unit in row.units) for row in rows]
    shares = {label: count / len(rows) for label, count in Counter(row.label for row in rows).items()}
    low, high, best = 1, len(units), Cut([], [])
    while low <= high:  # binary search: the more units are drawn, the more rows are selected, and the more are lost
        drawn = (low + high) // 2
        cut = _cut_at(rows, first, last, drawn, num_rows, shares, seed)
        affordable = len(cut.lost) <= MAX_LOST * len(rows)
        if affordable and (len(cut.taken), -len(cut.lost)) > (len(best.taken), -len(best.lost)):
            best = cut
        if affordable and len(cut.taken) < num_rows:
            low = drawn + 1
        else:
            high = drawn - 1
    return best


def _cut_at(
    rows: Sequence[RowUnits],
    first: Sequence[int],
    last: Sequence[int],
    drawn: int,
    num_rows: int,
    shares: dict[Hashable, float],
    seed: int,
) -> Cut:
    """Return the cut when the first `drawn` units belong to the new split."""
    inside: dict[Hashable, list[int]] = {label: [] for label in shares}
    for position, row in enumerate(rows):
        if last[position] < drawn:
            inside[row.label].append(position)
    total = min(num_rows, *(int(len(positions) / shares[label]) for label, positions in inside.items()))
    taken: list[int] = []
    for label, positions in inside.items():
        positions.sort(key=lambda position: hash64(seed, "row", position))
        taken += positions[: round(total * shares[label])]
    kept = set(taken)
    lost = [position for position in range(len(rows)) if first[position] < drawn and position not in kept]
    return Cut(sorted(taken), lost)
