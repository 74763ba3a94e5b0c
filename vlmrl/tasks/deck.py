"""Order of the rows of one source: each epoch is a shuffle that follows from the seed and the number of the epoch."""

from __future__ import annotations

import random

from vlmrl.types import hash64


class Deck:
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
