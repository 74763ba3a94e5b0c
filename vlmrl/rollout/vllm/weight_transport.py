"""Transport of the weights to an engine's workers: directly in this process, or over sockets to worker processes.

An engine in parts (tensor parallel) has a process for each part. Each process gets every tensor whole and keeps its
slice.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, Protocol, TypeVar

from torch import Tensor

from vlmrl.process import die_with_parent
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.weight_sync import Delivery, WeightSource, check_arrival

T = TypeVar("T")
SOCKET_VARIABLE, PARENT_VARIABLE = "VLMRL_WEIGHTS_SOCKET", "VLMRL_ENGINE_PID"
"""Environment variables of worker processes: the socket that sends the weights, and the engine's process id."""
LOOK_SECONDS = 0.2
"""Interval in seconds for checking whether the engine still waits for weights that its workers have not requested."""
_delivery: Delivery | None = None
"""Delivery that is in progress in this process."""


class Handover(Protocol):
    """Transport of a policy's weights into one engine."""

    def during(self, what: str, load: Callable[[], T]) -> T:
        """Return the result of `load`, during which every worker of the engine calls `take_weights` once.

        Raises: EngineError, which names `what`, when a tensor did not arrive.
        """
        ...


class InProcess:
    """Transport to an engine whose only worker is in this process."""

    def __init__(self, weights: WeightSource) -> None:
        self.weights = weights

    def during(self, what: str, load: Callable[[], T]) -> T:
        """Run `load`: see `Handover.during`."""
        global _delivery
        delivery = _delivery = Delivery(self.weights)
        try:
            result = load()
        finally:
            _delivery = None
        check_arrival(what, delivery.lost)
        return result


class ToWorkers:
    """Transport to an engine with `workers` worker processes. Create it before this process starts the workers.

    Args:
        path: of a socket.
    """

    def __init__(self, weights: WeightSource, path: Path, workers: int) -> None:
        self.weights, self.path, self.workers = weights, path, workers
        os.environ |= {SOCKET_VARIABLE: str(path), PARENT_VARIABLE: str(os.getpid())}

    def during(self, what: str, load: Callable[[], T]) -> T:
        """Run `load`: see `Handover.during`. A thread sends the weights while the engine waits for its workers."""
        over = Event()
        with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            listener.listen(self.workers)
            listener.settimeout(LOOK_SECONDS)
            sending = thread.submit(self._send, listener, over)
            try:
                result = load()  # its exception has priority: it says more than the thread's
            finally:
                over.set()
            check_arrival(what, sending.result())
        return result

    def _send(self, listener: socket.socket, over: Event) -> list[str] | None:
        """Return the names that got lost on the way to any worker; None when not all workers requested the weights."""
        links: list[socket.socket] = []
        try:
            while len(links) < self.workers:
                try:
                    links.append(listener.accept()[0])
                except TimeoutError:
                    if over.is_set():
                        return None
            for name, tensor in self.weights.tensors():
                header, blobs = wire.pack_tensor(name, tensor)
                for link in links:
                    wire.send(link, header, blobs)
            for link in links:
                wire.send(link, {"tensor": None})
            return sorted({name for link in links for name in wire.receive(link)[0]["lost"]})
        finally:
            for link in links:
                link.close()


class SentWeights:
    """Weights that arrive over a connection.

    Attributes:
        written: folder into which the sender wrote its newest adapter.
    """

    def __init__(self, sender: socket.socket) -> None:
        self.sender, self.written = sender, ""
        self.model_type, self.adapted, self.two_way_images = "", False, False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return wire.receive_tensors(self.sender)

    def write_adapter(self, folder: Path) -> None:
        shutil.copytree(self.written, folder)


def take_weights(model: Any, load: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> None:
    """Load all weights into the model of an engine's worker, by the model's own loader `load`.

    From here on a worker process ends when the process that started it ends.
    """
    if _delivery is not None:
        _delivery.load_into(model, load)
        return
    die_with_parent(int(os.environ[PARENT_VARIABLE]))
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ[SOCKET_VARIABLE])
        delivery = Delivery(SentWeights(link))
        delivery.load_into(model, load)
        wire.send(link, {"lost": delivery.lost})
