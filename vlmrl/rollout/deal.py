"""Deal of a draw's prompts to the ranks, and the shared queue from which engines take prompts of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TypeVar

from vlmrl.dist.world import World

T = TypeVar("T")


class Deal:
    """Deal of the prompts of a draw. Prompt i belongs to rank i modulo the number of ranks.

    Iteration gives the indices of the prompts that this rank samples, one at a time. A rank begins with its first
    prompts, as many as its engine generates at the same time. Its other prompts are in a queue. A rank takes from its
    own queue, and when this is empty, from those of the other ranks. Every prompt is taken once. Which rank takes it
    depends on the time; its seed, and so its samples, do not.

    Args:
        count: number of prompts in the draw.
        name: name of the draw, the same on all ranks and used once in a run.
        first: number of prompts with which each rank begins, the same on all ranks; None = all that belong to it.

    Attributes:
        taken: the indices that this rank has taken, in this order.
    """

    def __init__(self, count: int, world: World, name: str = "", first: int | None = None) -> None:
        self.count, self.world, self.taken = count, world, list[int]()
        first = count if first is None else first
        self._own = world.mine(count)[:first]
        self._queues = [range(rank, count, world.size)[first:] for rank in range(world.size)]
        self._keys = [f"deal/{name}/{rank}" for rank in range(world.size)]

    def __iter__(self) -> Iterator[int]:
        for index in chain(self._own, self._queued()):
            self.taken.append(index)
            yield index

    def _queued(self) -> Iterator[int]:
        size = self.world.size
        for rank in (*range(self.world.rank, size), *range(self.world.rank)):
            queue = self._queues[rank]
            while queue and (number := self.world.store.add(self._keys[rank], 1)) <= len(queue):
                yield queue[number - 1]

    def join(self, own: Sequence[T]) -> list[T]:
        """Return the items of all ranks, in order of the prompts. All ranks call this.

        Args:
            own: this rank's items, in the order in which it took the prompts.
        """
        of_ranks = self.world.gather(list(zip(self.taken, own, strict=True)))
        if self.world.is_main:  # every rank has taken its last prompt
            for key, queue in zip(self._keys, self._queues, strict=True):
                if queue:
                    self.world.store.delete_key(key)
        items = {index: item for of_rank in of_ranks for index, item in of_rank}
        return [items[index] for index in range(self.count)]
