"""Transports of weights from a trainer to engines in other processes: which one is used, and the trainer's side of it.

The messages of each transport describe themselves: weight_loading.py reads them, and needs no setting. Nothing is
pickled. Files are passed in a folder in memory, which is removed even if its process was killed (owned_folder.py), with
the shared memory that it lists.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from vlmrl.dist.engine_isolation import BroadcastGroup
from vlmrl.owned_folder import OwnedFolder
from vlmrl.rollout.vllm import wire

Transport = Literal["memory", "ipc", "nccl", "socket"]
WORDS: Mapping[str, str] = {
    "memory": "within the process",
    "ipc": "as handles of GPU memory",
    "nccl": "from GPU to GPU by NCCL",
    "socket": "through sockets and main memory",
}
"""Transport -> words for users."""
BATCH_BYTES = 1 << 26
"""Bytes after which a batch of tensors is complete. The trainer keeps a batch in memory until its engines have it, and
an engine copies it."""


def choose_transport(
    device: str, own_gpu: str | None, engine_gpus: Sequence[str], *, own_process: bool, setting: str = "auto"
) -> Transport:
    """Return the transport from a trainer to an engine.

    Args:
        device: "cuda" or "cpu".
        own_gpu: CUDA's name of the trainer's GPU.
        engine_gpus: CUDA's names of the GPUs of the engine's parts.
        own_process: whether the engine is in the trainer's process and on its GPU.
        setting: `rollout.weight_transport`; "socket" = never GPU to GPU.
    Returns: "ipc" where the engine shares the trainer's GPU: NCCL refuses two processes on one GPU. "nccl" where it
        does not.
    """
    if own_process:
        return "memory"
    if device != "cuda" or setting == "socket":
        return "socket"
    return "ipc" if own_gpu in engine_gpus else "nccl"


class Peer(Protocol):
    """Engine's process as a sender sees it. `parts`: number of processes that take the weights there."""

    @property
    def parts(self) -> int: ...

    def send(self, header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None: ...

    def receive(self) -> Mapping[str, Any]:
        """Return the peer's reply. Raises: EngineError when it fails."""
        ...


class Sender(Protocol):
    """Trainer's side of a transport."""

    def send(self, tensors: Iterable[tuple[str, Tensor]], peers: Sequence[Peer]) -> int:
        """Send all tensors to every peer, and return their bytes, counted once.

        All ranks of a sharded policy call it together. Without peers the tensors are only gathered.
        """
        ...


class BySocket:
    """Sender that copies every tensor through main memory."""

    def send(self, tensors: Iterable[tuple[str, Tensor]], peers: Sequence[Peer]) -> int:
        """Send everything: see `Sender.send`."""
        count = 0
        for name, tensor in tensors:
            count += tensor.nbytes
            if peers:
                header, blobs = wire.pack_tensor(name, tensor)
                for peer in peers:
                    peer.send(header, blobs)
        _end(peers)
        return count


class ByHandle:
    """Sender that lends its tensors: receivers copy them out of its memory.

    Args:
        export: tensor -> JSON fields with which another process opens it. It is called once per receiving process.
        device: "cuda", to which offloaded tensors are moved, or "cpu".
    """

    def __init__(self, export: Callable[[Tensor], Mapping[str, Any]], device: str) -> None:
        self.export, self.device = export, device

    def send(self, tensors: Iterable[tuple[str, Tensor]], peers: Sequence[Peer]) -> int:
        """Send everything: see `Sender.send`. A batch stays in memory until every receiver has copied it."""
        count = 0
        for batch in batches(tensors):
            count += sum(t.nbytes for _, t in batch)
            if peers:
                batch = [(name, t.to(self.device).contiguous()) for name, t in batch]
            for peer in peers:
                lent = [{**wire.entry(n, t), "handles": [self.export(t) for _ in range(peer.parts)]} for n, t in batch]
                peer.send({"lent": lent})
            for peer in peers:
                peer.receive()
        _end(peers)
        return count


class ByBroadcast:
    """Sender that broadcasts every tensor to all processes of all its engines at once.

    Args:
        store: path of a new file, where the group of processes meets at the first use.
        device: "cuda", or "cpu" (gloo).
    """

    def __init__(self, store: Path, device: str) -> None:
        self.store, self.device = store, device
        self._group: BroadcastGroup | None = None

    def send(self, tensors: Iterable[tuple[str, Tensor]], peers: Sequence[Peer]) -> int:
        """Send everything: see `Sender.send`. Nothing is sent before every receiver is ready: a failure ends here."""
        count = 0
        if peers and self._group is None:
            self._join(peers)
        for batch in batches(tensors):
            count += sum(t.nbytes for _, t in batch)
            for peer in peers:
                peer.send({"broadcast": [wire.entry(n, t) for n, t in batch]})
            for peer in peers:
                peer.receive()
            if self._group is not None:
                for _, tensor in batch:
                    self._group.broadcast(tensor.to(self._group.device).contiguous())
                # Before the next batch is gathered: collectives of two groups must not wait for each other.
                self._group.finish()
        _end(peers)
        return count

    def _join(self, peers: Sequence[Peer]) -> None:
        size = 1 + sum(peer.parts for peer in peers)
        first = 1
        for peer in peers:
            peer.send({"join": {"store": str(self.store), "rank": first, "size": size, "device": self.device}})
            first += peer.parts
        self._group = BroadcastGroup(self.store, 0, size, self.device)
        for peer in peers:
            peer.receive()


def _end(peers: Sequence[Peer]) -> None:
    for peer in peers:
        peer.send({"tensor": None})


def batches(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors in batches of about `BATCH_BYTES`."""
    batch: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        batch.append((name, tensor.detach()))
        size += tensor.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


TMPFS = Path("/dev/shm")
PREFIX = "vlmrl-adapter-"
SEGMENTS = "segments"
"""File in the folder: names of shared memory that an engine's processes would leave behind when they are killed."""


class SharedFolder(OwnedFolder):
    """Folder of weights for engines: in memory where the system has /dev/shm. See owned_folder.py."""

    def __init__(self, parent: Path | None = None) -> None:
        super().__init__(PREFIX, parent or (TMPFS if TMPFS.is_dir() else None))

    def adopt_segments(self) -> None:
        """Record all shared memory that this process and its descendants use now: it is removed after a kill."""
        (self.path / SEGMENTS).write_text("\n".join(_segments(os.getpid())))

    def bury(self, path: Path) -> None:
        """Remove the folder of a process that was killed, and the shared memory that it lists."""
        if (path / SEGMENTS).is_file():
            for name in (path / SEGMENTS).read_text().splitlines():
                with suppress(OSError):
                    (TMPFS / Path(name).name).unlink()  # only in /dev/shm, whatever path the file names
        super().bury(path)


def _segments(pid: int) -> list[str]:
    """Return the names under /dev/shm that a process or a descendant has mapped; empty where there is no /proc."""
    try:
        maps, below = Path(f"/proc/{pid}/maps").read_text(), Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    names = {line.partition(f"{TMPFS}/")[2] for line in maps.splitlines() if f" {TMPFS}/" in line}
    names = {name for name in names if "/" not in name and not name.endswith(" (deleted)")}
    return sorted(names.union(*(_segments(int(child)) for child in below.split())))
