"""The ranks of a run, and the few collective operations between them.

torch is not imported until there is a process group. Each of several ranks is started with RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun's names).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

T = TypeVar("T")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface that gloo listens on. By default it is the one of the machine's name."""


@dataclass(frozen=True)
class World:
    """All ranks of a run, with the rank of this process. Every method must be called by all ranks.

    Args:
        rank: 0 <= rank < size; rank 0 prints and writes.
        local_rank, local_size: rank on this machine, and number of ranks on it.
        group: torch's process group for the operations; None = the default group of all ranks.
        store: torch's store of small values, which all ranks read and write at any time; None = there is none. It is
            a server on rank 0. Its counters (`add`) are for work that is not the same on all ranks.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    group: Any = field(default=None, compare=False, repr=False)
    store: Any = field(default=None, compare=False, repr=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, mine: T) -> list[T]:
        """Return the values of all ranks, in order of rank. For small values: numbers, ids, names."""
        if self.size == 1:
            return [mine]
        import torch.distributed as dist

        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, mine, group=self.group)
        return values  # type: ignore[return-value]  # all entries are filled

    def from_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 and return its result on all ranks. If it raises, the other ranks fail too."""
        return self.gather(make() if self.is_main else None)[0]  # type: ignore[return-value]  # rank 0 returns a T

    def wait(self) -> None:
        """Return when all ranks have called this."""
        self.gather(None)

    def apart(self) -> World:
        """Return the same ranks with a second group (gloo), for communication by a thread beside the main thread."""
        if self.size == 1:
            return self
        import torch.distributed as dist

        return replace(self, group=dist.new_group(backend="gloo"))

    def mine(self, count: int) -> range:
        """Return the indices of this rank's items among `count` items: every size-th index, beginning with its rank."""
        return range(self.rank, count, self.size)

    def interleave(self, own: Sequence[T]) -> list[T]:
        """Return the items of all ranks in the order of their indices. `own`: items of this rank, as in `mine`."""
        values = self.gather(list(own))
        return [values[i % self.size][i // self.size] for i in range(sum(map(len, values)))]


ALONE = World()


def is_main_process() -> bool:
    """Return whether this process is rank 0, according to its environment. This works before `join_world` too."""
    return int(os.environ.get("RANK", "0")) == 0


LAST_SECONDS = 0.1
"""Time in seconds that a rank waits after its last collective operation.

A thread of gloo lets go of the operation's tensors a moment after it is complete. If the interpreter ends before, that
thread aborts the process (`terminate called without an active exception`): on a busy machine one of 64 ranks that ended
at once, and none of 128 that waited.
"""


@contextmanager
def join_world(device: str, timeout_seconds: float = 1800.0) -> Iterator[World]:
    """Context manager: join the process group of all ranks, with the rank that the environment gives this process.

    Args:
        device: "cpu" (gloo), "cuda" (NCCL, with gloo for tensors in main memory), or "auto".
        timeout_seconds: time in seconds that a rank waits for the others before it fails with an error.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_seconds)
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    world = World(
        rank,
        size,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", size)),
        store=PrefixStore("vlmrl", store),
    )
    if device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(world.local_rank)
    dist.init_process_group(
        _backend(device), store=PrefixStore("default_pg", store), rank=rank, world_size=size, timeout=timeout
    )
    yield world
    # Not after an error: the other ranks would fail before this rank has reported its own error.
    dist.destroy_process_group()
    time.sleep(LAST_SECONDS)


@contextmanager
def group_of_one(device: str) -> Iterator[None]:
    """Context manager: torch's process group of this process alone, which FSDP2 needs. No effect if there is a group.

    No other machine can reach it: its store is in this process, and gloo listens on the loopback interface only.

    Args:
        device: as in `join_world`.
    """
    import torch.distributed as dist
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    if dist.is_initialized():
        yield
        return
    configured = os.environ.get(GLOO_INTERFACE)
    os.environ[GLOO_INTERFACE] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    try:
        dist.init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
    finally:
        del os.environ[GLOO_INTERFACE]
        if configured is not None:
            os.environ[GLOO_INTERFACE] = configured
    try:
        yield
    finally:
        dist.destroy_process_group()


def _backend(device: str) -> str:
    """Return the name of torch's backends for a device, as `join_world` gets it."""
    import torch

    return "cpu:gloo,cuda:nccl" if device != "cpu" and torch.cuda.is_available() else "gloo"
