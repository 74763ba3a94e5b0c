"""How the workers of an engine get the weights: in this process as they are, in processes of their own over sockets.

An engine in parts (tensor parallel) has a process for each part. Each is given every tensor whole and keeps its slice.
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
"""What worker processes are told: where the weights come from, and whose workers they are."""
LOOK_SECONDS = 0.2
"""How often it is seen whether an engine still wants weights that its workers have not come for."""
_delivery: Delivery | None = None
"""The one under way in this process."""


class Handover(Protocol):
    """The way of a policy's weights into one engine."""

    def during(self, what: str, load: Callable[[], T]) -> T:
        """What `load` gives, in which every worker of the engine calls `take_weights` once.

        Raises: EngineError, which says `what`, when a tensor did not arrive.
        """
        ...


class InProcess:
    """To an engine whose one worker is in this process."""

    def __init__(self, weights: WeightSource) -> None:
        self.weights = weights

    def during(self, what: str, load: Callable[[], T]) -> T:
        """See `Handover.during`."""
        global _delivery
        delivery = _delivery = Delivery(self.weights)
        try:
            found = load()
        finally:
            _delivery = None
        check_arrival(what, delivery.lost)
        return found


class ToWorkers:
    """To an engine with so many worker processes, which this process starts after this is made.

    Args: path: of a socket.
    """

    def __init__(self, weights: WeightSource, path: Path, workers: int) -> None:
        self.weights, self.path, self.workers = weights, path, workers
        os.environ |= {SOCKET_VARIABLE: str(path), PARENT_VARIABLE: str(os.getpid())}

    def during(self, what: str, load: Callable[[], T]) -> T:
        """See `Handover.during`. The weights are sent by a thread, while the engine waits for its workers."""
        over = Event()
        with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as thread:
            self.path.unlink(missing_ok=True)
            listener.bind(str(self.path))
            listener.listen(self.workers)
            listener.settimeout(LOOK_SECONDS)
            sending = thread.submit(self._send, listener, over)
            try:
                found = load()  # what it raises says more than what the thread then sees
            finally:
                over.set()
            check_arrival(what, sending.result())
        return found

    def _send(self, listener: socket.socket, over: Event) -> list[str] | None:
        """Names of what got lost on the way to any worker; None when they did not all ask for the weights."""
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
    """Weights that somebody sends over a connection, as they arrive.

    Attributes: written: folder that their sender wrote its newest adapter into.
    """

    def __init__(self, sender: socket.socket) -> None:
        self.sender, self.written = sender, ""
        self.model_type, self.adapted, self.two_way_images = "", False, False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return wire.receive_tensors(self.sender)

    def write_adapter(self, folder: Path) -> None:
        shutil.copytree(self.written, folder)


def take_weights(model: Any, load: Callable[[Iterator[tuple[str, Tensor]]], Any]) -> None:
    """In a worker of an engine: load all weights into its model by the model's own loader `load`.

    A worker process lives no longer than the process that started it, from here on.
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
