"""The engine's side of a weight sync: directly in this process, or over sockets to worker processes; sleep of a worker.

An engine in parts (tensor parallel) has a process for each part. The first time, each process gets every tensor whole
and reports which numbers of it its model keeps (wire.py); later it gets only those. Tensors that the trainer lends or
broadcasts (transports.py) are read by the process of the part itself; this process passes the message on.

vLLM's sleep of level 2 discards the memory in which it built the model. On wake, vLLM restores registered buffers, and
the trainer sends the parameters. A tensor that is neither is undefined then: Qwen3-VL keeps the inputs of its first
layers (deep-stack) in a plain list, and other models keep tables, such as the experts of a rank. Every sleep also
discards the key-value cache. vLLM builds it from zeros, and some attention kernels multiply numbers that no request has
written with a weight of 0, which is NaN if they are not finite.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vlmrl.dist.engine_isolation import BroadcastGroup
from vlmrl.errors import EngineError
from vlmrl.process import die_with_parent
from vlmrl.rollout.vllm import wire
from vlmrl.rollout.vllm.wire import Region, WatchedLoad, cut, paste
from vlmrl.rollout.weight_sync import Delivery, WeightSource, check_arrival

open_tensor = wire.open_tensor
"""Function that opens a tensor that the trainer lends."""


class Receiver:
    """Receiving end of the transports for one model; it lives as long as the model.

    Attributes:
        kept: name -> the only numbers of that tensor that the model keeps; None = not known yet.
    """

    def __init__(self) -> None:
        self.kept: Mapping[str, Sequence[Region]] | None = None
        self._group: BroadcastGroup | None = None

    def tensors(
        self, messages: Iterator[tuple[dict[str, Any], list[bytearray]]], reply: Callable[[dict[str, Any]], Any]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) of each tensor that is sent, lent or broadcast.

        Args:
            messages: of one transfer.
        Raises: EngineError when a message is none of these.
        """
        for header, blobs in messages:
            if "tensor" in header:
                yield wire.unpack_tensor(header, blobs)
            elif "lent" in header:
                copies = [(e["tensor"], self._copy_of(e)) for e in header["lent"]]
                if torch.cuda.is_initialized():
                    torch.cuda.synchronize()  # after the answer the trainer may overwrite its tensors
                reply({"taken": True})
                yield from copies
            elif "broadcast" in header and self._group is not None:
                reply({"taken": True})
                for e in header["broadcast"]:
                    tensor = torch.empty(e["shape"], dtype=wire.DTYPES[e["dtype"]], device=self._group.device)
                    self._group.broadcast(tensor)
                    yield e["tensor"], tensor
            elif "join" in header:
                join = header["join"]
                self._group = BroadcastGroup(Path(join["store"]), join["rank"], join["size"], join["device"])
                reply({"taken": True})
            else:
                raise EngineError(f"a message with weights has the unexpected fields {', '.join(sorted(header))}")

    def _copy_of(self, entry: Mapping[str, Any]) -> Tensor:
        """Return a copy of a lent tensor on this process's own device; NaN where the model keeps nothing."""
        [handle] = entry["handles"]
        lent = open_tensor(handle, entry["shape"], wire.DTYPES[entry["dtype"]])
        own = torch.device("cuda", torch.cuda.current_device()) if lent.is_cuda else lent.device
        regions = (self.kept or {}).get(entry["tensor"])
        if regions is None:
            return lent.to(own, copy=True)
        return paste((piece.to(own) for piece in cut(lent, regions)), regions, entry["shape"], lent.dtype)


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


SAVED_BYTES = 64 << 20
"""Maximum size of a tensor that is copied to main memory while the engine sleeps; a larger one is zeroed on wake.

A table that the model needs is far smaller. Larger tensors are work buffers: no request is open during sleep, so their
numbers are not needed, but they must be finite, and vLLM's models take 0 for "no input". A copy of each would take main
memory on every rank and seconds per step.
"""
SLACK_SHARE, SLACK_BYTES = 0.02, 128 << 20
"""Allowed lack of freed memory after sleep: a share of the plan, and at least so many bytes.

The key-value cache is rounded down to whole blocks of all layers (a few MB), and the first copies of a sleep let the
CUDA driver and cuBLAS allocate workspaces of their own, 8 to 100 MB.
"""
GIB = 1 << 30


Kind = Literal["model", "cache"]
"""Memory that sleep discards: "model" at level 2, and waking the weights maps it again; "cache" at both levels, and
waking the rest maps it again."""


class SleepingMemory(Protocol):
    """Memory of a worker's device, and what of it sleep discards."""

    def free_bytes(self) -> int:
        """Return the free memory of the device, after all its work is done."""
        ...

    def kind(self, tensor: Tensor) -> Kind | None:
        """Return what kind of memory the tensor is in. None = sleep does not touch it, or vLLM brings it back."""
        ...


class LooseTensors:
    """Tensors of a model that are neither parameters nor buffers, kept over a sleep that discards them."""

    def __init__(self) -> None:
        self._saved: list[tuple[Tensor, Tensor | None]] = []
        self._caches: list[Tensor] = []

    def save(self, model: nn.Module, memory: SleepingMemory, *, discards: bool) -> None:
        """Note the tensors that will be discarded, and copy those of at most `SAVED_BYTES` to main memory.

        Args:
            discards: whether the model's memory is discarded, and not only the cache.
        """
        kinds = [(memory.kind(tensor), tensor) for tensor in loose_tensors(model).values()]
        self._caches = [tensor for kind, tensor in kinds if kind == "cache"]
        lost = [tensor for kind, tensor in kinds if kind == "model" and discards]
        self._saved = [(t, t.detach().to("cpu", copy=True) if t.nbytes <= SAVED_BYTES else None) for t in lost]

    @torch.inference_mode()  # some tensors were made in this mode, and torch lets nobody change them outside of it
    def restore(self, *, cache: bool) -> None:
        """Give each tensor its saved numbers, or zeros. What was restored before is left alone.

        Args:
            cache: whether the memory of the cache is mapped again, too.
        """
        # Zeros first: a small tensor can be a view of a large one.
        for tensor, _ in self._saved:
            tensor.zero_()
        for tensor, saved in self._saved:
            if saved is not None:
                tensor.copy_(saved)
        self._saved = []
        if cache:
            for tensor in self._caches:
                tensor.zero_()
            self._caches = []


def loose_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return path -> tensor of all tensors that the model's modules hold and that are neither parameters nor buffers.

    Attributes of modules are searched, also inside lists, tuples, dicts, and objects of the module's own package (an
    attention backend, for example). A tensor in the memory of a parameter or buffer is left out: it is a view of it.
    """
    registered = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    seen: set[int] = set()
    loose: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        package = type(module).__module__.partition(".")[0]
        own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for path, tensor in _tensors_in(own, name, package, seen):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in registered:
                loose[path] = tensor
    return loose


def _tensors_in(root: dict[str, Any], name: str, package: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of all tensors below `root`, each once. No recursion: such objects can be nested deeply."""
    waiting: list[tuple[str, Any]] = [(name, root)]
    while waiting:
        path, value = waiting.pop()
        if value is not root:
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, Tensor):
            # Others have no memory of their own: torch.compile leaves its stand-ins (FakeTensor) in vLLM's objects.
            if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.device.type != "meta":
                yield path, value
        elif isinstance(value, dict):
            waiting += [(f"{path}.{key}", x) for key, x in value.items() if not _is_plain(x)]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += [(f"{path}.{i}", x) for i, x in enumerate(value) if not _is_plain(x)]
        elif not isinstance(value, (nn.Module, type)) and type(value).__module__.partition(".")[0] == package:
            waiting += [(f"{path}.{key}", x) for key, x in getattr(value, "__dict__", {}).items() if not _is_plain(x)]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float))


def planned_bytes(model: nn.Module, cache_bytes: int) -> int:
    """Return the bytes that sleep has to free: the model's parameters, each memory once, and the key-value cache."""
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    return sum(storages.values()) + cache_bytes


def check_freed(before: int, after: int, planned: int) -> None:
    """Raise an EngineError when sleep freed less than planned.

    Args:
        before, after: free memory of the GPU before and after the engine went to sleep, in bytes.
        planned: bytes of the engine's weights and key-value cache on this GPU.
    """
    freed, slack = after - before, max(SLACK_BYTES, int(SLACK_SHARE * planned))
    if freed < planned - slack:
        raise EngineError(
            f"sleep of the engine freed {freed / GIB:.2f} GiB of its GPU, and its weights and key-value cache take"
            f" {planned / GIB:.2f} GiB; the free memory was {before / GIB:.2f} GiB before and {after / GIB:.2f} GiB"
            " after",
            hint="another program may have allocated memory on the GPU at the same time (see nvidia-smi);"
            ' rollout.engine = "torch" needs no sleep',
        )
