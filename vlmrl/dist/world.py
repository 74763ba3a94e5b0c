"""The processes of a run: who they are, and the few things they tell each other.

No torch until there are several. Each is started with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR
and MASTER_PORT (torchrun's names).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All processes of a run and this one's place among them. Every method must be called by all of them.

    Args:
        rank: 0 <= rank < size; the one of rank 0 talks and writes.      local_rank, local_size: on this machine.
        group: torch's group that they talk in; None = the one of all processes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """What every process gave, in order of rank. Small things: numbers, ids, names."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, mine, group=self.group)
        return found  # type: ignore[return-value]  # all places are filled

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, where alone it is called. When it raises there, the others lose their peer."""
        return self.gather(make() if self.is_main else None)[0]  # type: ignore[return-value]  # rank 0 gave a T

    def wait(self) -> None:
        """Return when all processes are here."""
        self.gather(None)

    def apart(self) -> World:
        """The same processes in a second group (gloo), for a thread of each that talks to the others' beside them."""
        if self.size == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo"))

    def mine(self, count: int) -> range:
        """Which of `count` things, numbered from 0, are this process's: every size-th, from its rank."""
        return range(self.rank, count, self.size)

    def interleave(self, own: Sequence[T]) -> list[T]:
        """All processes' things in order, where each gives those of `mine`."""
        given = self.gather(list(own))
        return [given[i % self.size][i // self.size] for i in range(sum(map(len, given)))]


ALONE = World()


def is_main_process() -> bool:
    """Whether this process is the one of rank 0, by its environment: before `join_world` too."""
    return int(os.environ.get("RANK", "0")) == 0


@contextmanager
def join_world(device: str, timeout_seconds: float = 1800.0) -> Iterator[World]:
    """This process's place, as its environment says; the group of all of them exists inside the `with`.

    Args: device: "cpu" (gloo), "cuda" (NCCL, with gloo for what lies in main memory), or "auto".
        timeout_seconds: how long a process waits for the others before it gives up with an error.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist

    world = World(
        int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )  # fmt: skip
    backend = "gloo"
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    yield world
    # Not after an error: the others would lose this process before it has said what happened to it.
    dist.destroy_process_group()
