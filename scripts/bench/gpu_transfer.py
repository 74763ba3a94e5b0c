"""Weights on their way to an engine, and checkpoints on their way to the disk.

`handover` needs torch and transformers, and pydantic for the recipe's types; `saves` needs what `vlmrl` needs.
"""

from __future__ import annotations

import multiprocessing
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from gpu_shards import start_group
from gpu_world import GIB, make_config
from torch import Tensor

from vlmrl.dist.fsdp import shard
from vlmrl.dist.world import World as Processes
from vlmrl.model.families import units_of
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.transports import ByHandle, BySocket, Sender
from vlmrl.rollout.vllm.weight_loading import SentWeights
from vlmrl.rollout.weight_sync import base_tensors, engine_names

Row = dict[str, Any]
PINNED_BYTES = 1 << 30


def handover(smoke: bool, model: str) -> Iterator[Row]:
    """A model's weights in bfloat16: whole from shards, into pinned main memory, and through a socket to a process."""
    from transformers import AutoModelForImageTextToText

    device = torch.device("cpu" if smoke else "cuda")
    with device:
        policy: Any = AutoModelForImageTextToText.from_config(make_config(model, smoke), dtype=torch.bfloat16)
    policy.requires_grad_(False)  # a frozen weight stays in bfloat16 when it is sharded: 7B fits any GPU of 40 GB
    tensors = lambda: base_tensors(policy, engine_names(policy))  # noqa: E731
    size = sum(t.nbytes for _, t in tensors())
    yield _line(f"{model}, one GPU's weights read through", size, _time(lambda: _drain(tensors()), device))
    start_group(device)
    shard(policy, units_of(policy), Processes(), device)
    yield _line(f"{model}, gathered from shards (a world of one)", size, _time(lambda: _drain(tensors()), device))
    pinned = torch.empty(min(PINNED_BYTES, size), dtype=torch.uint8, pin_memory=not smoke)
    yield _line(f"{model}, copied to pinned main memory", size, _time(lambda: _copy(tensors(), pinned), device))
    with _receiver() as link:
        seconds = _time(lambda: _send(tensors(), link, BySocket()), device)
    yield _line(f"{model}, to another process over a socket", size, seconds)
    if not smoke:  # handles of GPU memory need a GPU
        with _receiver() as link:
            seconds = _time(lambda: _send(tensors(), link, ByHandle(wire.export, "cuda")), device)
        yield _line(f"{model}, to another process on the same GPU by handles", size, seconds)


def _line(case: str, size: int, seconds: float) -> Row:
    return {"case": case, "gigabytes": size / 1e9, "seconds": seconds, "gigabytes_per_second": size / 1e9 / seconds}


def _time(run: Callable[[], None], device: torch.device) -> float:
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _drain(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Take every tensor and let go of it."""
    for _ in tensors:
        pass


def _copy(tensors: Iterable[tuple[str, Tensor]], pinned: Tensor) -> None:
    """Copy every tensor into the same slab of main memory, in pieces where it is larger."""
    for _, tensor in tensors:
        for piece in tensor.contiguous().reshape(-1).view(torch.uint8).split(len(pinned)):
            pinned[: len(piece)].copy_(piece, non_blocking=True)


def _receive(path: str) -> None:
    """In the process that stands for an engine: take every tensor, keep none, and say how many came."""
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        wire.send(link, {"received": sum(1 for _ in SentWeights(link).tensors())})


@contextmanager
def _receiver() -> Iterator[socket.socket]:
    """Connect to a process that takes tensors, as a hosted engine does (rollout/vllm/weight_loading.py)."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder, "weights"))
        listener.bind(path)
        listener.listen(1)
        receiver = multiprocessing.get_context("spawn").Process(target=_receive, args=(path,), daemon=True)
        receiver.start()
        if listener not in wait([listener, receiver.sentinel]):
            raise RuntimeError("the process that receives the weights ended before it connected")
        link, _ = listener.accept()
        with link:
            yield link
        receiver.join()


class _Engine:
    """The receiver as a sender of weights sees it."""

    parts = 1

    def __init__(self, link: socket.socket) -> None:
        self.link = link

    def send(self, header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
        wire.send(self.link, header, blobs)

    def receive(self) -> Mapping[str, Any]:
        return wire.receive(self.link)[0]


def _send(tensors: Iterator[tuple[str, Tensor]], link: socket.socket, sender: Sender) -> None:
    """Send every tensor and wait until all have arrived."""
    sent = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal sent
        for item in tensors:
            sent += 1
            yield item

    engine = _Engine(link)
    sender.send(counted(), [engine])
    received = engine.receive()["received"]
    assert received == sent, f"{received} of {sent} tensors arrived"


def saves(smoke: bool) -> Iterator[Row]:
    """Checkpoints of a float32 model with its moments: written at once, and from copies beside the training."""
    from save import measure

    device = "cpu" if smoke else "cuda"
    size: dict[str, int] = {"hidden": 128, "layers": 2} if smoke else {"hidden": 2048, "layers": 24}
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), saves=2, device=device, **size):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
            yield {**row, "host_peak_gib": peak}
