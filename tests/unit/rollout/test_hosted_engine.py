"""Where engines in processes of their own run, and what they are told. The processes are played by threads."""

from __future__ import annotations

import socket
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.dist.world import ALONE, World
from vlmrl.errors import EngineError, LaunchError
from vlmrl.rollout.vllm import host, hosted_engine, weight_loading, wire
from vlmrl.rollout.vllm.hosted_engine import (
    EnginePlace,
    HostedEngine,
    place_alone,
    places_apart,
    places_shared,
    visible_gpus,
)
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.rollout.vllm.weight_loading import ToWorkers, take_weights

SIX = World(rank=2, size=6, local_rank=2, local_size=6)
NODES = World(rank=5, size=8, local_rank=1, local_size=4)


def test_gpus_that_only_generate_make_whole_engines_for_all() -> None:
    everybody = (0, 1, 2, 3, 4, 5)
    assert places_apart(["4", "5", "6", "7"], SIX, 2) == [
        EnginePlace(("4", "5"), everybody, 0),
        EnginePlace(("6", "7"), everybody, 1),
    ]
    with pytest.raises(LaunchError, match=r"3 GPUs .* takes 2 each"):
        places_apart(["5", "6", "7"], SIX, 2)


def test_trainers_share_an_engine_on_their_own_gpus_and_machine() -> None:
    gpus = ["3", "2", "7", "6"]
    assert places_shared(NODES, 2, gpus) == [
        EnginePlace(("3", "2"), (0, 1), 0), EnginePlace(("7", "6"), (2, 3), 2),
        EnginePlace(("3", "2"), (4, 5), 4), EnginePlace(("7", "6"), (6, 7), 6),
    ]  # fmt: skip
    with pytest.raises(LaunchError, match=r"4 process.*groups of 3"):
        places_shared(NODES, 3, gpus)
    with pytest.raises(LaunchError, match="1 process"):
        places_shared(ALONE, 2, ["0", "1"])


def test_a_process_alone_takes_the_first_gpus_that_it_sees(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,2,4")
    assert place_alone(2, visible_gpus("cuda", 2)) == EnginePlace(("6", "2"), (0,), 0)
    with pytest.raises(LaunchError, match="sees 3 GPU"):
        place_alone(4, visible_gpus("cuda", 4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert visible_gpus("cuda", 2) == ["0", "1"] and visible_gpus("cpu", 3) == ["cpu"] * 3


class Plain:
    """Weights of a trainer."""

    model_type, adapted, two_way_images = "plain", False, False

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.named, self.times = tensors, 0

    def tensors(self):
        self.times += 1
        yield from self.named.items()


class Played:
    """vLLM's side: notes what it was asked, and what it has after each."""

    def __init__(self, weights: Any, tokenizer: Any, settings: EngineSettings, say: Any) -> None:
        self.weights, self.done = weights, [("start", dict(weights.tensors()))]

    def sleep(self) -> None:
        self.done.append(("sleep", None))

    def wake(self) -> None:
        self.done.append(("wake", None))

    def load_weights(self, version: int, *, changed: bool) -> None:
        self.done.append((f"load {version}", dict(self.weights.tensors()) if changed else None))

    def close(self) -> None:
        self.done.append(("close", None))


@pytest.fixture
def engine(monkeypatch):
    """One engine of two parts, shared with a trainer that is alone."""
    ours, theirs = socket.socketpair()
    ended = SimpleNamespace(wait=lambda seconds: None)
    monkeypatch.setattr(HostedEngine, "_start", lambda *_: ended)
    monkeypatch.setattr(hosted_engine, "_connect", lambda *_: ours)
    monkeypatch.setattr(host, "VllmEngine", Played)
    monkeypatch.setattr(host, "load_processor", lambda model: SimpleNamespace(tokenizer=None))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    place = host.EngineHost({0: theirs}, 0)

    def serve() -> None:
        assert wire.receive(theirs)[0] == {"rank": 0, "leads": True}
        place.serve()

    thread = Thread(target=serve)
    thread.start()
    settings = EngineSettings("folder", "bfloat16", "cuda", 100, 1, tensor_parallel=2, weight_transport="socket")
    made = HostedEngine(Plain({"a": torch.ones(3)}), settings, ALONE, [EnginePlace(("0", "1"), (0,), 0)], shared=True)
    yield made, place
    made.close()
    thread.join(10.0)
    assert place.engine.done[-1][0] == "close"


def test_weights_that_sleep_threw_away_are_sent_though_nothing_changed(engine) -> None:
    made, place = engine
    made.load_weights(0)
    made.sleep()
    made.load_weights(1, changed=False)
    made.load_weights(2, changed=False)
    names = [(what, given is not None) for what, given in place.engine.done]
    assert names == [("start", True), ("load 0", True), ("sleep", False), ("load 1", True), ("load 2", False)]
    assert made.version == 2 and made.weights.times == 3
    made.sleep()
    made.wake()
    assert [what for what, _ in place.engine.done[-2:]] == ["sleep", "wake"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (None, "engine 1 has died"),
        (["no room for the cache", None, None], "no room for the cache"),
    ],
)
def test_an_engine_that_goes_while_it_is_spoken_to_is_named_in_its_own_words(monkeypatch, words, told) -> None:
    ends = [socket.socketpair() for _ in range(2)]
    ours = iter([end[0] for end in ends])
    monkeypatch.setattr(HostedEngine, "_start", lambda *_: None)
    monkeypatch.setattr(hosted_engine, "_connect", lambda *_: next(ours))
    if words:
        wire.send(ends[1][1], {"error": words})
    ends[1][1].close()
    places = [EnginePlace(("0",), (0,), 0), EnginePlace(("1",), (0,), 0)]
    # Engine 0 lives and has nothing to say: waiting for it would be for ever.
    with pytest.raises(EngineError, match=told):
        HostedEngine(Plain({"a": torch.ones(3)}), EngineSettings("folder", "float32", "cpu", 100, 1), ALONE, places)
    for end in ends:
        end[0].close(), end[1].close()


class Layer(torch.nn.Linear):
    def load_weights(self, weights) -> set[str]:
        given = dict(weights)
        with torch.no_grad():
            for name in given.keys() & dict(self.named_parameters()).keys():
                getattr(self, name).copy_(given[name])
        return given.keys() & dict(self.named_parameters()).keys()


@pytest.fixture
def to_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_loading, "die_with_parent", lambda pid: None)
    for name in (weight_loading.SOCKET_VARIABLE, weight_loading.PARENT_VARIABLE):
        monkeypatch.setenv(name, "")
    return lambda named: ToWorkers(Plain(named), tmp_path / "weights", 2)


def loading(layers: list[Layer]):
    """What an engine does: its workers take their weights, all at once."""

    def load() -> str:
        threads = [Thread(target=take_weights, args=(layer, layer.load_weights)) for layer in layers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "loaded"

    return load


def test_every_worker_process_is_given_all_weights_each_time(to_workers) -> None:
    named = {"weight": torch.randn(2, 3), "bias": torch.randn(2)}
    layers, over = [Layer(3, 2), Layer(3, 2)], to_workers(named)
    for _ in range(2):
        assert over.during("sync", loading(layers)) == "loaded"
        for layer in layers:
            assert torch.equal(layer.weight, named["weight"]) and torch.equal(layer.bias, named["bias"])
        named["weight"] += 1
    assert over.weights.times == 2  # once a handing over, not once a worker


def test_what_gets_lost_on_the_way_to_a_worker_process_is_named(to_workers) -> None:
    with pytest.raises(EngineError, match=r"sync 4: 1 tensor did not arrive in the engine: bias"):
        to_workers({"weight": torch.zeros(2, 3)}).during("sync 4", loading([Layer(3, 2), Layer(3, 2)]))


def test_workers_that_never_come_for_their_weights_end_the_handing_over(to_workers, monkeypatch) -> None:
    monkeypatch.setattr(weight_loading, "LOOK_SECONDS", 0.01)
    over = to_workers({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    with pytest.raises(EngineError, match="never asked"):
        over.during("sync", loading([Layer(3, 2)][:0]))

    def dies() -> None:
        raise ValueError("a worker died")

    with pytest.raises(ValueError, match="a worker died"):
        over.during("sync", dies)


def test_a_trainer_that_goes_away_midway_ends_all_workers_loading(to_workers) -> None:
    class Gone(Plain):
        def tensors(self):
            yield "weight", torch.zeros(2, 3)
            raise EngineError("the trainer is gone")

    over, said = to_workers({}), []
    over.weights = Gone({})

    def load() -> None:
        layers = [Layer(3, 2), Layer(3, 2)]

        def work(layer: Layer) -> None:
            try:
                take_weights(layer, layer.load_weights)
            except EngineError as error:
                said.append(error.message)

        threads = [Thread(target=work, args=(layer,)) for layer in layers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10.0)

    with pytest.raises(EngineError, match="the trainer is gone"):
        over.during("sync", load)
    assert len(said) == 2 and all("was closed" in x for x in said)
