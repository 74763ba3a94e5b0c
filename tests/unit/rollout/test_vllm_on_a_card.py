"""What the engine asks of vLLM on a GPU, which the CPU build cannot do: sleep, wake, the right GPU. vLLM is played."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vlmrl.rollout.vllm import engine as vllm_engine
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings

SETTINGS = EngineSettings("folder", "bfloat16", "cuda", 100, 4 << 30)


class Played:
    """vLLM's side: notes what it was asked; asleep between `sleep` and a `wake_up` of everything."""

    def __init__(self, asked: list[str]) -> None:
        self.asked, self.asleep = asked, False
        self.llm_engine = SimpleNamespace(is_sleeping=lambda: self.asleep)

    def sleep(self, level: int) -> None:
        self.asked.append(f"sleep {level}")
        self.asleep = True

    def wake_up(self, tags: list[str] | None) -> None:
        self.asked.append(f"wake {tags}")
        self.asleep = tags is not None


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    made: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty cache"))
    return made


def engine_of(asked: list[str], *, adapter: bool) -> VllmEngine:
    engine = object.__new__(VllmEngine)
    engine.weights, engine._llm = SimpleNamespace(adapted=adapter), Played(asked)  # type: ignore[assignment]
    engine.settings = replace(SETTINGS, lora_rank=8 if adapter else 0)
    engine._loaded, engine._discarded, engine.version = True, False, 0
    engine._send_all = lambda version: asked.append("send all")  # type: ignore[method-assign]
    engine._send_adapter = lambda version: asked.append("send adapter")  # type: ignore[method-assign]
    return engine


def test_weights_wake_before_the_cache_and_are_sent_in_between(asked) -> None:
    engine = engine_of(asked, adapter=False)
    engine.sleep()
    engine.load_weights(3)
    assert asked == ["sleep 2", "empty cache", "wake ['weights']", "send all", "empty cache", "wake None"]
    assert engine.version == 3


def test_weights_that_sleep_threw_away_are_sent_though_nothing_changed(asked) -> None:
    engine = engine_of(asked, adapter=False)
    engine.sleep()
    engine.load_weights(1, changed=False)
    engine.load_weights(2, changed=False)
    assert asked.count("send all") == 1 and engine.version == 2


def test_a_base_that_sleep_kept_needs_no_adapter_where_nothing_changed(asked) -> None:
    engine = engine_of(asked, adapter=True)
    engine.sleep()
    engine.load_weights(1, changed=False)
    assert "sleep 1" in asked and "send adapter" not in asked and engine.version == 1
    engine.load_weights(2)
    assert asked[-1] == "send adapter"


@pytest.mark.parametrize(("visible", "name"), [("", "5"), ("0,1,2,3,6,7", "7"), ("GPU-a", "5")])
def test_the_engine_is_on_the_ranks_own_gpu_with_files_of_its_own(asked, monkeypatch, visible, name) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(vllm_engine, "CACHE", "/cache")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 << 30))
    for _ in "ab":  # a second engine of the process is no deeper
        options = vllm_engine._gpu_options(SETTINGS)
        assert options == {"device_ids": [5], "gpu_memory_utilization": 0.05}
        assert os.environ["VLLM_CACHE_ROOT"] == f"/cache/gpu-{name}"
    # In parts it is in a process that sees the cards of all of them and no other.
    assert vllm_engine._gpu_options(replace(SETTINGS, tensor_parallel=2)) == {"gpu_memory_utilization": 0.05}
