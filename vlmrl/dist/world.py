"""The ranks of a run, and the few collective operations between them.

torch is not imported until there is a process group. Each of several ranks is started with RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun's names).

On one machine, the ranks of vlmrl's launcher meet at a file in a folder that only this user can open, gloo and NCCL
listen on the loopback interface alone, and torch's object collectives, those of its checkpoints too, unpickle only what
is signed with a key from that folder. On several machines nothing is signed: see OPEN_PORTS.
"""

from __future__ import annotations

import atexit
import hmac
import os
import secrets
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from vlmrl.errors import Problem

T = TypeVar("T")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface that gloo listens on. By default it is the one of the machine's name."""
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
MEETING_VARIABLE = "VLMRL_MEETING"
"""Variable with the file at which the ranks of one machine meet. It lies in a folder that only this user can open."""

OPEN_PORTS = Problem(
    "on several machines the rendezvous (`--rdzv-endpoint`) and the ports of gloo and NCCL accept anyone who reaches "
    "them, and who reaches them can run code as you",
    hint="let a firewall admit only the machines of the job: all TCP ports between them, none from elsewhere",
    level="warning",
)
"""Warning of a run on several machines: what must be firewalled."""

SILENT_SECONDS = 3.0
KEY_FILE, SIGNATURE_BYTES = "key", 32


@dataclass(frozen=True)
class World:
    """All ranks of a run, with the rank of this process. Every method must be called by all ranks.

    Args:
        rank: 0 <= rank < size; rank 0 prints and writes.
        local_rank, local_size: rank on this machine, and number of ranks on it.
        group: torch's process group for the operations; None = the default group of all ranks.
        store: torch's store of small values, which all ranks read and write at any time; None = there is none. It is
            a file, or a server on rank 0. Its counters (`add`) are for work that is not the same on all ranks.
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
    from torch.distributed import FileStore, PrefixStore, rendezvous  # pyright: ignore[reportPrivateImportUsage]

    rank, timeout = int(os.environ["RANK"]), timedelta(seconds=timeout_seconds)
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    meeting = os.environ.pop(MEETING_VARIABLE, None)
    if meeting is not None:
        store: Any = FileStore(meeting, size)
    else:
        store = _met(lambda: next(rendezvous("env://", rank, size, timeout=timeout))[0], rank, size)
    store.set_timeout(timeout)
    own_store = PrefixStore("vlmrl", store)
    if local_size == size:
        os.environ[GLOO_INTERFACE] = os.environ[NCCL_INTERFACE] = _loopback()
        _sign_objects(_shared_key(own_store, rank, meeting))
    world = World(rank, size, int(os.environ.get("LOCAL_RANK", rank)), local_size, store=own_store)
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
    os.environ[GLOO_INTERFACE] = _loopback()
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


def _met(meet: Callable[[], T], rank: int, size: int) -> T:
    """Return what `meet` returns, and stay interruptible: torch waits for the other ranks in C++.

    After a few seconds the ranks that are waited for are named: the variables may be left over from another program.
    """
    from vlmrl.dist.rank_process import stderr

    results: list[T] = []
    failures: list[Exception] = []

    def wait() -> None:
        try:
            results.append(meet())
        except Exception as error:  # raised below, in the main thread
            failures.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(SILENT_SECONDS)
    if thread.is_alive():
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        print(
            f"rank {rank} waits at {where} for {size - 1} more processes, since the environment has WORLD_SIZE={size}\n"
            "if no program has started them: stop this one (Ctrl-C), `unset WORLD_SIZE RANK`; several GPUs: --gpus N",
            file=stderr(),
            flush=True,
        )
    while thread.is_alive():
        thread.join(0.2)
    if failures:
        raise failures[0]
    return results[0]


def _loopback() -> str:
    """Return the name of the loopback interface."""
    return next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def _shared_key(store: Any, rank: int, meeting: str | None) -> bytes:
    """Return the key of the ranks, from a file that only this user can read.

    Rank 0 makes it: in the launcher's folder, or in a new one under torchrun.

    Raises: OSError if the file is open to other users.
    """
    if rank == 0:
        folder = Path(meeting).parent if meeting is not None else Path(tempfile.mkdtemp(prefix="vlmrl-key-"))
        if meeting is None:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        (folder / KEY_FILE).write_bytes(secrets.token_bytes(SIGNATURE_BYTES))
        store.set("key", str(folder / KEY_FILE))
    path = Path(store.get("key").decode())
    facts = path.parent.stat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077:
        raise OSError(f"{path.parent} is open to other users")
    return path.read_bytes()


def _sign_objects(key: bytes) -> None:
    """Make torch's object collectives sign what they send, and refuse to unpickle what is not signed with the key."""
    import torch
    from torch.distributed import distributed_c10d as c10d

    pack, unpack = c10d._object_to_tensor, c10d._tensor_to_object

    def signature(content: bytes) -> bytes:
        return hmac.digest(key, content, "sha256")

    def signed(value: Any, device: Any, *more: Any) -> tuple[Any, Any]:
        tensor, size = pack(value, device, *more)
        mark = torch.frombuffer(bytearray(signature(tensor.cpu().numpy().tobytes())), dtype=torch.uint8)
        return torch.cat([mark.to(tensor.device), tensor]), size + SIGNATURE_BYTES

    def verified(tensor: Any, size: Any, *more: Any) -> Any:
        content = tensor.cpu().numpy().tobytes()[: int(size)]
        if not hmac.compare_digest(content[:SIGNATURE_BYTES], signature(content[SIGNATURE_BYTES:])):
            raise RuntimeError("a message between the ranks is not signed: it comes from another program")
        return unpack(tensor[SIGNATURE_BYTES:], int(size) - SIGNATURE_BYTES, *more)

    c10d._object_to_tensor, c10d._tensor_to_object = signed, verified  # pyright: ignore[reportAttributeAccessIssue]


def _backend(device: str) -> str:
    """Return the name of torch's backends for a device, as `join_world` gets it."""
    import torch

    return "cpu:gloo,cuda:nccl" if device != "cpu" and torch.cuda.is_available() else "gloo"
