"""The processes of a run: who they are, and the few things they tell each other.

Each is started with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun's names).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All processes of a run and this one's place among them. Every method must be called by all of them.

    Args: rank: 0 <= rank < size; the one of rank 0 talks and writes. local_rank, local_size: on this machine.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """What every process gave, in order of rank. Small things: numbers, ids, names."""
        if self.size == 1:
            return [mine]
        found: list[T | None] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found  # type: ignore[return-value]  # all places are filled


ALONE = World()


@contextmanager
def join_world(device: str, timeout_seconds: float = 1800.0) -> Iterator[World]:
    """This process's place, as its environment says; the group of all of them exists inside the `with`.

    Args: device: "cpu" (gloo) or "cuda" (NCCL, with gloo for what lies in main memory).
        timeout_seconds: how long a process waits for the others before it gives up with an error.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    world = World(
        int(os.environ["RANK"]), size, int(os.environ.get("LOCAL_RANK", os.environ["RANK"])),
        int(os.environ.get("LOCAL_WORLD_SIZE", size)),
    )  # fmt: skip
    if device == "cuda":
        torch.cuda.set_device(world.local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_seconds))
    try:
        yield world
    finally:
        dist.destroy_process_group()
