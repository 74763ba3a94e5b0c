"""Weights from a trainer to an engine's parts. Shared memory plays CUDA handles, gloo plays NCCL, threads the parts."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.shared_memory import SharedMemory
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.errors import EngineError
from vlmrl.rollout.vllm import transports, weight_loading, wire
from vlmrl.rollout.vllm.transports import ByBroadcast, ByHandle, BySocket, Sender, choose_transport
from vlmrl.rollout.vllm.weight_loading import InProcess, SentWeights, ToWorkers, take_weights


@pytest.mark.parametrize(
    ("device", "own", "engine", "own_process", "setting", "expected"),
    [
        ("cuda", "3", ("3",), True, "auto", "memory"),  # each rank's engine in its own process
        ("cuda", "3", ("3",), True, "socket", "memory"),
        ("cpu", None, ("cpu",), True, "auto", "memory"),
        ("cpu", "cpu", ("cpu", "cpu"), False, "auto", "socket"),
        ("cpu", None, ("cpu",), False, "auto", "socket"),
        ("cuda", "2", ("2", "3"), False, "auto", "ipc"),  # an engine in parts on the trainers' GPUs
        ("cuda", "3", ("2", "3"), False, "auto", "ipc"),
        ("cuda", "0", ("6",), False, "auto", "nccl"),  # engine GPUs
        ("cuda", "0", ("6", "7"), False, "auto", "nccl"),
        ("cuda", "2", ("2", "3"), False, "socket", "socket"),
        ("cuda", "0", ("6",), False, "socket", "socket"),
    ],
)
def test_the_transport_follows_from_where_trainer_and_engine_are(
    device, own, engine, own_process, setting, expected
) -> None:
    assert choose_transport(device, own, engine, own_process=own_process, setting=setting) == expected
    assert transports.WORDS[expected]


class Half(torch.nn.Module):
    """One of two parts: half of the rows of `rows`, half of the columns of `columns`, all of `bias`."""

    def __init__(self, part: int, fails: bool = False) -> None:
        super().__init__()
        self.part, self.fails = part, fails
        self.rows = torch.nn.Parameter(torch.zeros(2, 6), requires_grad=False)
        self.columns = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.bias = torch.nn.Parameter(torch.zeros(5), requires_grad=False)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            if self.fails:
                raise ValueError("no room")
            cut = {"rows": (0, 2), "columns": (1, 3)}.get(name)
            own = tensor if cut is None else tensor.narrow(cut[0], self.part * cut[1], cut[1])
            getattr(self, name).copy_(own)
            loaded.add(name)
        return loaded


@dataclass
class Lender:
    """Shared memory in place of CUDA's. Once an engine has answered, its numbers are overwritten."""

    lent: dict[str, SharedMemory] = field(default_factory=dict)
    opened: list[str] = field(default_factory=list)

    def export(self, tensor: Tensor) -> dict[str, Any]:
        memory = SharedMemory(create=True, size=tensor.nbytes)
        self._as_tensor(memory, tensor.dtype, list(tensor.shape)).copy_(tensor)
        self.lent[memory.name] = memory
        return {"name": memory.name}

    def open(self, handle: Mapping[str, Any], shape: list[int], dtype: torch.dtype) -> Tensor:
        assert handle.keys() == {"name"} and handle["name"] not in self.opened  # one handle per process
        self.opened.append(handle["name"])
        return self._as_tensor(self.lent[handle["name"]], dtype, shape)

    def overwrite(self) -> None:
        for memory in self.lent.values():
            assert memory.buf is not None
            memory.buf[:] = b"\xff" * len(memory.buf)  # NaN

    def _as_tensor(self, memory: SharedMemory, dtype: torch.dtype, shape: list[int]) -> Tensor:
        assert memory.buf is not None
        return torch.frombuffer(memory.buf, dtype=dtype)[: math.prod(shape)].view(shape)


@dataclass
class Link:
    """The trainer's end of the connection to an engine's process."""

    socket: socket.socket
    parts: int
    lender: Lender
    sent: list[dict[str, Any]] = field(default_factory=list)

    def send(self, header: Mapping[str, Any], blobs=()) -> None:
        self.sent.append(dict(header))
        wire.send(self.socket, header, blobs)

    def receive(self) -> Mapping[str, Any]:
        answer = wire.receive(self.socket)[0]
        self.lender.overwrite()
        return answer


@pytest.fixture
def lender(monkeypatch):
    made = Lender()
    monkeypatch.setattr(weight_loading, "open_tensor", made.open)
    monkeypatch.setattr(transports, "BATCH_BYTES", 100)  # rows and columns; bias
    yield made
    for memory in made.lent.values():
        memory.unlink()


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """The engine's process with two parts, and the trainer's link to it."""
    monkeypatch.setattr(weight_loading, "die_with_parent", lambda pid: None)
    for name in (weight_loading.SOCKET_VARIABLE, weight_loading.PARENT_VARIABLE):
        monkeypatch.setenv(name, "")
    ours, theirs = socket.socketpair()
    yield ours, ToWorkers(SentWeights(theirs), tmp_path / "weights", 2)
    for end in (ours, theirs):
        end.close()


def sync(sender: Sender, link: Link, named: Mapping[str, Tensor], engine: ToWorkers, halves: list[Half]) -> int:
    """One sync. Returns what the sender counts."""
    count: list[int] = []
    trainer = Thread(target=lambda: count.append(sender.send(iter(named.items()), [link])))

    def load() -> None:
        threads = [Thread(target=take_weights, args=(half, half.load_weights)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    trainer.start()
    try:
        engine.during("sync 1", load)
    finally:
        trainer.join(10.0)
    return count[0]


def tensors(seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = {"rows": (4, 6), "columns": (4, 6), "bias": (5,)}
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def assert_halves(halves: list[Half], named: Mapping[str, Tensor]) -> None:
    for part, half in enumerate(halves):
        assert torch.equal(half.rows, named["rows"][2 * part : 2 * part + 2])
        assert torch.equal(half.columns, named["columns"][:, 3 * part : 3 * part + 3])
        assert torch.equal(half.bias, named["bias"])


@pytest.mark.parametrize("way", ["socket", "handle", "broadcast"])
def test_every_part_has_its_numbers_bit_for_bit_after_every_sync(way, parts, lender, tmp_path) -> None:
    ours, engine = parts
    link, halves = Link(ours, 2, lender), [Half(0), Half(1)]
    senders = {
        "socket": BySocket(),
        "handle": ByHandle(lender.export, "cpu"),
        "broadcast": ByBroadcast(tmp_path / "store", "cpu"),
    }
    whole = 4 * (24 + 24 + 5)  # bytes
    wire_bytes = []
    for seed in range(3):
        named = tensors(seed)
        assert sync(senders[way], link, named, engine, halves) == whole
        assert_halves(halves, named)
        wire_bytes.append(engine.wire_bytes)
    # Whole to both parts the first time; then half of rows and columns, and all of the bias.
    assert wire_bytes == ([2 * whole] + [2 * 4 * (12 + 12 + 5)] * 2 if way == "socket" else [0] * 3)
    kinds = [next(iter(header.keys() & {"lent", "broadcast", "join", "tensor"})) for header in link.sent]
    assert (
        kinds
        == {
            "socket": ["tensor"] * 12,
            "handle": ["lent", "lent", "tensor"] * 3,
            "broadcast": ["join", *["broadcast", "broadcast", "tensor"] * 3],
        }[way]
    )


def test_a_process_with_the_whole_engine_takes_lent_tensors_itself(lender) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        named, model = tensors(0), torch.nn.ParameterDict({n: torch.zeros_like(t) for n, t in tensors(0).items()})
        trainer = Thread(
            target=ByHandle(lender.export, "cpu").send, args=(iter(named.items()), [Link(ours, 1, lender)])
        )
        trainer.start()

        def load(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
            with torch.no_grad():
                return {name for name, t in weights if model[name].copy_(t) is not None}

        engine = InProcess(SentWeights(theirs))
        engine.during("sync", lambda: take_weights(model, load))
        trainer.join(10.0)
        assert all(torch.equal(model[n], t) for n, t in named.items()) and engine.sent_bytes == 4 * 53


def test_ranks_without_engines_only_gather(lender, tmp_path) -> None:
    for sender in (BySocket(), ByHandle(lender.export, "cpu"), ByBroadcast(tmp_path / "store", "cpu")):
        assert sender.send(iter(tensors(0).items()), []) == 4 * 53
    assert not lender.lent and not (tmp_path / "store").exists()


def test_messages_of_an_unexpected_form_are_refused() -> None:
    receiver = weight_loading.Receiver()
    for header in ({"pickle": "x"}, {"broadcast": []}):
        with pytest.raises(EngineError, match="unexpected fields"):
            list(receiver.tensors(iter([(header, [])]), lambda message: None))


HANDLE = {
    "gpu": "GPU-1", "handle": "QUJD", "size_bytes": 64, "offset_bytes": 0, "counter": "QQ==", "counter_offset": 0,
    "event": "", "event_sync": True, "offset": 0, "stride": [6, 1],
}  # fmt: skip


def test_a_handle_of_gpu_memory_has_declared_fields_and_nothing_else(monkeypatch) -> None:
    fields = wire.checked(HANDLE, 2)
    assert fields["handle"] == b"ABC" and fields["counter"] == b"A" and fields["stride"] == [6, 1]
    large = HANDLE | {"handle": "QUJD" * 20_000}  # of a tensor of 20 GB in expandable segments
    assert len(wire.checked(large, 2)["handle"]) == 60_000
    wrong: list[dict[str, Any]] = [
        {"size_bytes": -1}, {"size_bytes": 1.5}, {"offset": True}, {"handle": "?"}, {"handle": 3}, {"stride": [1]},
        {"stride": None}, {"gpu": 0}, {"event_sync": 1}, {"handle": "QUJD" * 30_000}, {"more": 1},
    ]  # fmt: skip
    for change in wrong:
        with pytest.raises(EngineError, match="not a handle of GPU memory"):
            wire.checked(HANDLE | change, 2)
    with pytest.raises(EngineError, match="not a handle of GPU memory"):
        wire.checked({k: v for k, v in HANDLE.items() if k != "event"}, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(EngineError, match="does not see the trainer's GPU GPU-1"):
        wire.open_tensor(HANDLE, [1, 6], torch.float32)


def test_a_handle_carries_what_torch_needs_to_open_it_in_the_order_of_its_own_function(monkeypatch) -> None:
    """torch's two functions are replaced: there is no GPU. The order is that of torch/multiprocessing/reductions.py."""
    names = [
        "tensor_cls", "tensor_size", "tensor_stride", "tensor_offset", "storage_cls", "dtype", "storage_device",
        "storage_handle", "storage_size_bytes", "storage_offset_bytes", "requires_grad", "ref_counter_handle",
        "ref_counter_offset", "event_handle", "event_sync_required",
    ]  # fmt: skip
    code = wire.rebuild_cuda_tensor.__code__
    assert list(code.co_varnames[: code.co_argcount]) == names
    tensor = torch.randn(4, 6)[1:]
    given = (
        Tensor, tensor.size(), tensor.stride(), 6, torch.storage.TypedStorage, torch.float32, 5, b"handle", 96, 512,
        False, b"counter", 7, b"event", True,
    )  # fmt: skip
    opened: list[Any] = []
    monkeypatch.setattr(wire, "reduce_tensor", lambda t: (None, given))
    monkeypatch.setattr(wire, "rebuild_cuda_tensor", lambda *args: opened.extend(args))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("Gpu", (), {"uuid": f"GPU-{i % 4}"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    wire.open_tensor(wire.export(tensor), [3, 6], torch.float32)
    assert opened == [*given[:6], 1, *given[7:]]  # GPU 5 there is GPU 1 here: both have the same id


def test_a_part_that_fails_ends_the_sync_for_trainer_and_engine(parts, lender, monkeypatch) -> None:
    ours, engine = parts
    link, failed = Link(ours, 2, lender), []

    def trainer() -> None:
        try:
            ByHandle(lender.export, "cpu").send(iter(tensors(0).items()), [link])
        except EngineError as error:
            failed.append(error.message)

    thread = Thread(target=trainer)
    thread.start()

    def load() -> None:
        def work(half: Half) -> None:
            try:
                take_weights(half, half.load_weights)
            except (ValueError, EngineError) as error:
                failed.append(str(error))

        threads = [Thread(target=work, args=(half,)) for half in (Half(0), Half(1, fails=True))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(10.0)

    with pytest.raises(EngineError):
        engine.during("sync", load)
    assert isinstance(engine.weights, SentWeights)
    engine.weights.sender.close()  # the engine's process ends
    thread.join(10.0)
    assert not thread.is_alive() and "no room" in failed and sum("was closed" in x for x in failed) >= 1
