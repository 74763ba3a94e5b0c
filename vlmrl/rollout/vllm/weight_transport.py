"""Transport of the weights to an engine's workers: directly in this process, or over sockets to worker processes.

An engine in parts (tensor parallel) has a process for each part. The first time, each process gets every tensor whole
and reports which numbers of it its model keeps (`kept_parts.py`); later it gets only those. Tensors that the trainer
lends or broadcasts (`transports.py`) are read by the process of the part itself; this process passes the message on.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from vlmrl.process import die_with_parent
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.kept_parts import Region, WatchedLoad
from vlmrl.rollout.vllm.receiving import Receiver
from vlmrl.rollout.weight_sync import Delivery, WeightSource, check_arrival

T = TypeVar("T")
SOCKET_VARIABLE, PARENT_VARIABLE = "VLMRL_WEIGHTS_SOCKET", "VLMRL_ENGINE_PID"
"""Environment variables of worker processes: the socket that sends the weights, and the engine's process id."""
LOOK_SECONDS = 0.2
"""Interval in seconds for checking whether the engine still waits for weights that its workers have not requested."""
_delivery: Delivery | None = None
"""Delivery that is in progress in this process."""
_receivers: WeakKeyDictionary[Any, Receiver] = WeakKeyDictionary()
"""Model of a part in this process -> the receiver of its weights."""


class Handover(Protocol):
    """Transport of a policy's weights into one engine.

    Attributes:
        sent_bytes: bytes of the tensors of the last transfer, each counted once.
    """

    sent_bytes: int

    def during(self, what: str, load: Callable[[], T]) -> T:
        """Return the result of `load`, during which every worker of the engine calls `take_weights` once.

        Raises: EngineError, which names `what`, when a tensor did not arrive.
        """
        ...


class InProcess:
    """Transport to an engine whose only worker is in this process."""

    def __init__(self, weights: WeightSource) -> None:
        self.weights, self.sent_bytes = weights, 0

    def during(self, what: str, load: Callable[[], T]) -> T:
        """Run `load`: see `Handover.during`."""
        global _delivery
        delivery = _delivery = Delivery(self.weights)
        try:
            result = load()
        finally:
            _delivery = None
        check_arrival(what, delivery.lost)
        self.sent_bytes = delivery.sent_bytes
        return result


@dataclass
class _Worker:
    """Connection to a worker process during one transfer, and the number of the worker: the same in all transfers."""

    link: socket.socket
    number: int
    kept: dict[str, list[Region]] = field(default_factory=dict)


class ToWorkers:
    """Transport to an engine with `workers` worker processes. Create it before this process starts the workers.

    Args:
        path: of a socket.

    Attributes:
        wire_bytes: bytes of tensors that went over the workers' sockets in the last transfer, over all workers.
    """

    def __init__(self, weights: WeightSource, path: Path, workers: int) -> None:
        self.weights, self.path, self.workers = weights, path, workers
        self.sent_bytes = self.wire_bytes = 0
        self._numbers: dict[str, int] = {}  # a worker's own name -> its number
        self._kept: dict[int, dict[str, list[Region]]] = {}
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
        workers: list[_Worker] = []
        self.sent_bytes = self.wire_bytes = 0
        try:
            while len(workers) < self.workers:
                try:
                    link = listener.accept()[0]
                except TimeoutError:
                    if over.is_set():
                        return None
                    continue
                name = wire.receive(link)[0]["worker"]
                number = self._numbers.setdefault(name, len(self._numbers))
                workers.append(_Worker(link, number, self._kept.get(number, {})))
            if isinstance(self.weights, SentWeights):
                self._pass_on(workers, self.weights)
            else:
                for name, tensor in self.weights.tensors():
                    self._send_tensor(workers, name, tensor)
            for worker in workers:
                wire.send(worker.link, {"tensor": None})
            answers = [(worker.number, wire.receive(worker.link)[0]) for worker in workers]
            self._kept |= {number: _regions(answer["kept"]) for number, answer in answers if "kept" in answer}
            return sorted({name for _, answer in answers for name in answer["lost"]})
        finally:
            for worker in workers:
                worker.link.close()

    def _send_tensor(self, workers: Sequence[_Worker], name: str, tensor: Tensor) -> None:
        """Send each worker what it keeps of a tensor."""
        self.sent_bytes += tensor.nbytes
        for worker in workers:
            header, blobs = wire.pack_tensor(name, tensor, worker.kept.get(name))
            self.wire_bytes += sum(len(b) for b in blobs)
            wire.send(worker.link, header, blobs)

    def _pass_on(self, workers: Sequence[_Worker], weights: SentWeights) -> None:
        """Give the trainer's messages to the workers, each the fields that are meant for it, and the answers back."""
        for header, blobs in weights.messages():
            if "tensor" in header:
                self._send_tensor(workers, *wire.unpack_tensor(header, blobs))
                continue
            for worker in workers:
                wire.send(worker.link, _for_worker(header, worker.number))
            for worker in workers:
                wire.receive(worker.link)
            weights.reply({"taken": True})


def _for_worker(header: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a message with the fields that one worker needs: its handle of each tensor, or its rank in a group."""
    if "lent" in header:
        return {"lent": [{**e, "handles": [e["handles"][number]]} for e in header["lent"]]}
    if "join" in header:
        return {"join": {**header["join"], "rank": header["join"]["rank"] + number}}
    return dict(header)


def _regions(kept: Mapping[str, Sequence[Any]]) -> dict[str, list[Region]]:
    return {name: [(o, tuple(size), tuple(stride)) for o, size, stride in parts] for name, parts in kept.items()}


class SentWeights:
    """Weights that arrive over a connection.

    Args:
        reply: sends an answer back over it; None = directly.
        receiver: reads the messages; None = a new one.

    Attributes:
        written: folder into which the sender wrote its newest adapter.
    """

    def __init__(
        self,
        sender: socket.socket,
        reply: Callable[[dict[str, Any]], Any] | None = None,
        receiver: Receiver | None = None,
    ) -> None:
        self.sender, self.written = sender, ""
        self.reply = reply or (lambda message: wire.send(sender, message))
        self.receiver = receiver or Receiver()
        self.model_type, self.adapted, self.two_way_images = "", False, False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return self.receiver.tensors(self.messages(), self.reply)

    def messages(self) -> Iterator[tuple[dict[str, Any], list[bytearray]]]:
        """Yield the messages of one transfer as they are, up to the one that ends it."""
        while "tensor" not in (message := wire.receive(self.sender))[0] or message[0]["tensor"] is not None:
            yield message

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
        wire.send(link, {"worker": f"{os.getpid()}-{id(model)}"})
        receiver = _receivers.setdefault(model, Receiver())
        weights, answer = SentWeights(link, receiver=receiver), {}
        if receiver.kept is None:
            watched = WatchedLoad()
            delivery = Delivery(weights, watched.watch)
            with watched:
                delivery.load_into(model, load)
            answer["kept"] = receiver.kept = watched.kept()
        else:
            delivery = Delivery(weights)
            delivery.load_into(model, load)
        wire.send(link, {"lost": delivery.lost, **answer})
