"""Order in which dataset rows are drawn: sources mixed by share, each shuffled anew in every epoch.

The order can be resumed at any row.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from vlmrl.errors import DataError
from vlmrl.types import hash64


class Draw(NamedTuple):
    """Drawn row: index of its source, its index in that source, and the number of times it was drawn before."""

    source: int
    row: int
    occurrence: int


@dataclass(frozen=True)
class SavedDeck:
    """Position in the order of one source, as a checkpoint has it."""

    epoch: int
    position: int
    waiting: list[tuple[int, int]]


@dataclass(frozen=True)
class SavedStream:
    """Position of a stream, as a checkpoint has it. Each list has one entry per source."""

    seed: int
    lengths: list[int]
    shares: list[float]
    drawn: list[int]
    decks: list[SavedDeck]

    def __post_init__(self) -> None:
        parts = zip(self.lengths, self.decks, strict=False)
        within = all(0 <= one.position <= n and all(0 <= row < n for row, _ in one.waiting) for n, one in parts)
        if not within or {len(self.lengths)} != {len(one) for one in (self.shares, self.drawn, self.decks)}:
            raise ValueError("the position in the data does not fit the number of rows")


class PromptStream:
    """Endless, deterministic stream of dataset rows.

    In every epoch of a source, each of its rows is drawn once, in a new order. After any number of draws, the number of
    rows from a source is its exact share, rounded up or down. A step never contains a row twice, unless a source has
    fewer rows than its part of the step. If a new epoch begins within a step, a row that is already in the step is
    passed over and drawn in the next step.

    Args:
        lengths_by_source: number of rows of each source, all > 0.
        shares: relative share of each source, all > 0; 0.1 means exactly one tenth, not the nearest binary number.
    """

    def __init__(self, lengths_by_source: Sequence[int], shares: Sequence[float], seed: int) -> None:
        if not lengths_by_source or len(shares) != len(lengths_by_source):
            raise DataError(f"{len(lengths_by_source)} sources with {len(shares)} shares")
        for index, (length, share) in enumerate(zip(lengths_by_source, shares, strict=True)):
            if length <= 0:
                raise DataError(f"source {index} has no rows")
            if not share > 0:
                raise DataError(f"source {index} has the share {share}; shares are positive")
        self._lengths = tuple(int(length) for length in lengths_by_source)
        self._given = tuple(float(share) for share in shares)
        # Fraction(str(0.1)) is 1/10; Fraction(0.1) would be the binary number next to it.
        exact = [Fraction(str(share)) for share in self._given]
        self._shares = [share / sum(exact) for share in exact]
        self._seed = seed
        self._drawn = [0] * len(self._lengths)
        self._decks = [_Deck(length, hash64(seed, "order", i)) for i, length in enumerate(self._lengths)]

    def next(self, count: int) -> list[Draw]:
        """Draw the `count` rows of the next step."""
        used: list[set[int]] = [set() for _ in self._lengths]
        draws = []
        for _ in range(count):
            source = self._next_source()
            self._drawn[source] += 1
            row, occurrence = self._decks[source].draw(used[source])
            draws.append(Draw(source, row, occurrence))
        return draws

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the stream, as JSON values. Call it between steps only."""
        return {
            "schema": 1,
            "seed": self._seed,
            "lengths": list(self._lengths),
            "shares": list(self._given),
            "drawn": list(self._drawn),
            "decks": [
                {"epoch": d.epoch, "position": d.position, "waiting": [list(w) for w in d.waiting]} for d in self._decks
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of `state`.

        Raises: DataError when `state` belongs to other sources, shares or another seed.
        """
        mine = {"schema": 1, "seed": self._seed, "lengths": list(self._lengths), "shares": list(self._given)}
        for key, value in mine.items():
            if state.get(key) != value:
                raise DataError(
                    f"the saved data order has {key} {state.get(key)}, this run has {value}",
                    hint="resume with the data, shares and seed of the run, or start a new run from its checkpoint",
                )
        self.adopt(state)

    def adopt(self, state: Mapping[str, Any]) -> list[str]:
        """Continue at the position of `state` as far as possible; sources, shares and seed may have changed.

        If the seed is the same, a source with the same number of rows as before continues at its position. Any other
        source begins its first epoch. If the shares or the number of sources have changed, the rows drawn so far do not
        count for the shares.

        Returns: a sentence for each thing that begins anew; [] = everything continues.
        """
        lengths, shares = list(self._lengths), list(self._given)
        if state.get("seed") != self._seed:
            return ["the order of the rows begins anew: train.seed has changed"]
        notes = []
        for index, (deck, saved) in enumerate(zip(self._decks, state["decks"], strict=False)):
            if state["lengths"][index] == lengths[index]:
                waiting = [(int(r), int(e)) for r, e in saved["waiting"]]
                deck.restore(int(saved["epoch"]), int(saved["position"]), waiting)
            else:
                rows = f"{state['lengths'][index]} rows before, {lengths[index]} now"
                notes.append(f"source {index} begins its first epoch anew: {rows}")
        if state["shares"] == shares:
            self._drawn = [int(count) for count in state["drawn"]]
        else:
            notes.append(f"the shares of the sources are counted from here on: {state['shares']} before, {shares} now")
        return notes

    def _next_source(self) -> int:
        """Return the source of the next row, by the quota method.

        Sources whose count would exceed their exact share, rounded up, are excluded. Of the others, the one with the
        earliest deadline for its next row is returned. So after every draw, the count of each source differs from its
        exact share by less than one.

        Source: Balinski and Young 1975; Tijdeman 1980.
        """
        total = sum(self._drawn) + 1
        due = [i for i, share in enumerate(self._shares) if self._drawn[i] < share * total]
        return min(due, key=lambda i: (Fraction(self._drawn[i] + 1) / self._shares[i], i))


class _Deck:
    """Rows of one source in the order of the present epoch.

    `waiting` holds the (row, epoch) that were passed over because the row was already in the step.
    """

    def __init__(self, length: int, seed: int) -> None:
        self._length, self._seed = length, seed
        self.restore(0, 0, [])

    def restore(self, epoch: int, position: int, waiting: list[tuple[int, int]]) -> None:
        self.epoch, self.position, self.waiting = epoch, position, waiting
        self._order = self._shuffled(epoch)

    def draw(self, used: set[int]) -> tuple[int, int]:
        """Return the next row that is not in `used`, and its epoch.

        The row is added to `used`, which is emptied first if it holds all rows.
        """
        if len(used) == self._length:
            used.clear()
        for index, (row, epoch) in enumerate(self.waiting):
            if row not in used:
                del self.waiting[index]
                used.add(row)
                return row, epoch
        while True:
            if self.position == self._length:
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._shuffled(self.epoch)
            row = self._order[self.position]
            self.position += 1
            if row not in used:
                used.add(row)
                return row, self.epoch
            self.waiting.append((row, self.epoch))

    def _shuffled(self, epoch: int) -> list[int]:
        order = list(range(self._length))
        random.Random(hash64(self._seed, epoch)).shuffle(order)
        return order
