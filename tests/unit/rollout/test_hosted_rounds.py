"""Requests to engines in processes of their own, which threads play: who gets which group, and when it comes back."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vlmrl.data.encode import EncodedPrompt
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import EngineError
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.vllm import host, hosted_engine, wire
from vlmrl.rollout.vllm.hosted_engine import EnginePlace, HostedEngine
from vlmrl.rollout.vllm.settings import EngineSettings
from vlmrl.types import Row, Sample, SamplingParams

WAIT = 30.0
SETTINGS = EngineSettings("folder", "bfloat16", "cpu", 100, 1)


class Weights:
    model_type, adapted, two_way_images = "plain", False, False

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.ones(3)


class Played:
    """vLLM's side: completes one request per poll, unless it is held; the first one submitted comes first."""

    def __init__(self, weights: Any, tokenizer: Any, settings: Any, say: Any) -> None:
        dict(weights.tensors())
        self.weights, self.held, self.version, self.given = weights, Event(), 0, []
        self.waiting: list[tuple[int, SamplingRequest]] = []
        self.completed = 0

    def submit(self, request: SamplingRequest, params: SamplingParams) -> int:
        if request.seed < 0:
            raise EngineError("no such seed", where="row x")
        self.given.append(request.seed)
        self.waiting.append((len(self.given), request))
        return len(self.given)

    def poll(self, timeout: float | None = None) -> list[tuple[int, list[Sample]]]:
        time.sleep(0.001)
        if self.held.is_set() or not self.waiting:
            return []
        number, r = self.waiting.pop(0)
        self.completed += 1
        size = r.prompt.prompt_ids[0]
        return [
            (
                number,
                [
                    Sample((7,) * size, "x", (-0.5,) * size, "stop", self.version, r.seed + k)
                    for k in range(r.num_samples)
                ],
            )
        ]

    def load_weights(self, version: int, *, changed: bool) -> None:
        assert not self.waiting, "weights change only between requests"
        dict(self.weights.tensors()) if changed else None
        self.version = version

    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def request(seed: int, samples: int = 2, size: int = 3) -> SamplingRequest:
    return SamplingRequest(EncodedPrompt(Row(f"r{seed}", "s", "t", {}), "", (size,), (0,), {}, 0, 0, ()), samples, seed)


class Stage:
    """Engines as threads; `trainer(rank)` connects to all of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engines: int, ranks: int = 1) -> None:
        pairs = {(e, r): socket.socketpair() for e in range(engines) for r in range(ranks)}
        self.monkeypatch, self.ours = monkeypatch, {key: pair[0] for key, pair in pairs.items()}
        monkeypatch.setattr(host, "VllmEngine", Played)
        monkeypatch.setattr(host, "load_processor", lambda model: SimpleNamespace(tokenizer=None))
        monkeypatch.setattr(HostedEngine, "_start", lambda *_: SimpleNamespace(wait=lambda seconds: None))
        self.hosts = [host.EngineHost({r: pairs[e, r][1] for r in range(ranks)}, 0) for e in range(engines)]
        self.places = [EnginePlace((str(e),), tuple(range(ranks)), 0) for e in range(engines)]
        self.threads = [Thread(target=self._serve, args=(e, ranks), daemon=True) for e in range(engines)]
        for thread in self.threads:
            thread.start()

    def _serve(self, engine: int, ranks: int) -> None:
        for trainer in self.hosts[engine].trainers.values():
            assert "leads" in wire.receive(trainer)[0]
        self.hosts[engine].serve()

    def trainer(self, world: World = ALONE, shared: bool = False) -> HostedEngine:
        links = iter([link for (_, rank), link in self.ours.items() if rank == world.rank])
        self.monkeypatch.setattr(hosted_engine, "_connect", lambda *_: next(links))
        self.monkeypatch.setattr(World, "gather", lambda self, mine: [mine] * self.size)
        return HostedEngine(Weights(), SETTINGS, world, self.places, shared=shared)

    def engine(self, index: int) -> Any:
        return self.hosts[index].engine


def wait_for(what: Callable[[], Any]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.002)


@contextmanager
def closing(*engines: HostedEngine) -> Iterator[None]:
    yield
    for engine in engines:
        engine.close()


def test_each_group_comes_back_as_soon_as_it_is_complete_under_its_own_number(monkeypatch):
    stage = Stage(monkeypatch, 2)
    made = stage.trainer()
    with closing(made):
        made.load_weights(4)
        heard: list[int] = []
        answers = made.generate([request(10 * k, samples=k + 1) for k in range(5)], SamplingParams(), heard.append)
        assert [[s.seed for s in group] for group in answers] == [[10 * k + n for n in range(k + 1)] for k in range(5)]
        assert {s.version for group in answers for s in group} == {4} and sum(heard) == 15
        assert made.generate([], SamplingParams()) == [] and made.works_alone


def test_an_engine_that_is_done_early_takes_the_groups_that_would_have_waited(monkeypatch):
    monkeypatch.setattr(hosted_engine, "MAX_SEQUENCES", 4)
    stage = Stage(monkeypatch, 2)
    made = stage.trainer()
    with closing(made), made.round():
        stage.engine(0).held.set()
        numbers = {made.submit(request(k), SamplingParams()): k for k in range(8)}
        found: list[int] = []
        end = time.monotonic() + WAIT
        while len(found) < 6 and time.monotonic() < end:
            found += [numbers[n] for n, _ in made.poll(0.1)]
        # Each engine began with two groups of two responses: 0 and 2, 1 and 3. The held one keeps its own.
        assert found == [1, 3, 4, 5, 6, 7] and stage.engine(0).given == [0, 2]
        stage.engine(0).held.clear()
        while len(found) < 8 and time.monotonic() < end:
            found += [numbers[n] for n, _ in made.poll(0.1)]
        assert found[6:] == [0, 2] and made.poll() == []


def test_one_engine_gets_all_groups_at_once(monkeypatch):
    monkeypatch.setattr(hosted_engine, "MAX_SEQUENCES", 2)
    stage = Stage(monkeypatch, 1)
    made = stage.trainer()
    with closing(made), made.round():
        stage.engine(0).held.set()
        for k in range(4):
            made.submit(request(k), SamplingParams())
        assert made.poll(0.0) == []
        wait_for(lambda: stage.engine(0).given == [0, 1, 2, 3])
        stage.engine(0).held.clear()


def test_engines_go_on_while_the_trainer_does_not_read(monkeypatch):
    monkeypatch.setattr(hosted_engine, "MAX_SEQUENCES", 2)
    stage = Stage(monkeypatch, 2)
    made = stage.trainer()
    with closing(made):
        # Much more than a socket holds: 6 groups of 2 x 50,000 tokens.
        numbers = {made.submit(request(k, size=50_000), SamplingParams()): k for k in range(6)}
        assert made.poll(0.0) == []  # as before an update: all groups are given out, for nobody polls soon
        wait_for(lambda: stage.engine(0).completed + stage.engine(1).completed == 6)
        found: dict[int, list[Sample]] = {}
        while len(found) < 6:
            found |= {numbers[n]: samples for n, samples in made.poll()}
        assert sorted(found) == list(range(6)) and all(len(s.token_ids) == 50_000 for g in found.values() for s in g)


def test_new_weights_wait_for_what_another_trainer_has_sent(monkeypatch):
    stage = Stage(monkeypatch, 1, ranks=2)
    other_link = stage.ours[0, 1]
    wire.send(other_link, {"rank": 1, "leads": False})
    made = stage.trainer(World(rank=0, size=2))
    with closing(made):
        stage.engine(0).held.set()
        packed, _ = wire.pack_requests([request(5)], wire.Known())
        params = {"temperature": 1.0, "stop_ids": [1, 2]}
        wire.send(other_link, {"do": "generate", "params": params, "requests": packed, "forget": False, "numbers": [9]})
        loading = Thread(target=made.load_weights, args=(3,))
        loading.start()
        wait_for(lambda: stage.engine(0).given == [5])
        assert stage.engine(0).version == 0
        stage.engine(0).held.clear()
        loading.join(WAIT)
        answer, _ = wire.receive(other_link)
        ((first, second),) = wire.unpack_samples(answer["samples"])
        assert answer["numbers"] == [9] and (first.seed, second.seed, first.version) == (5, 6, 0)
        assert stage.engine(0).version == 3


def test_what_is_left_of_a_round_does_not_reach_the_next(monkeypatch):
    stage = Stage(monkeypatch, 1)
    made = stage.trainer()
    with closing(made):
        with pytest.raises(KeyboardInterrupt), made.round():
            made.submit(request(1), SamplingParams())
            made.poll(0.0)
            wait_for(lambda: stage.engine(0).completed == 1)
            raise KeyboardInterrupt
        assert [[s.seed for s in g] for g in made.generate([request(8)], SamplingParams())] == [[8, 9]]
        made.load_weights(1)


def test_the_error_of_a_request_reaches_all_trainers(monkeypatch):
    stage = Stage(monkeypatch, 1, ranks=2)
    wire.send(stage.ours[0, 1], {"rank": 1, "leads": False})
    made = stage.trainer(World(rank=0, size=2))
    with closing(made):
        with pytest.raises(EngineError, match="no such seed") as caught:
            made.generate([request(-1)], SamplingParams())
        assert caught.value.where == "row x"
        assert wire.receive(stage.ours[0, 1])[0]["error"][0] == "no such seed"


def test_no_rank_goes_on_before_the_engines_have_the_new_weights(monkeypatch):
    stage = Stage(monkeypatch, 1)
    made = stage.trainer()
    with closing(made):
        at_wait: list[int] = []
        monkeypatch.setattr(World, "wait", lambda self: at_wait.append(stage.engine(0).version))
        made.load_weights(6)
        assert at_wait == [6]
