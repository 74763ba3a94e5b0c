"""What the engine asks of vLLM on a GPU, which the CPU build cannot do: sleep, wake, the right GPU. vLLM is played."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vlmrl.errors import EngineError
from vlmrl.rollout.vllm import engine
from vlmrl.rollout.vllm.engine import VllmEngine
from vlmrl.rollout.vllm.settings import EngineSettings

SETTINGS = EngineSettings("folder", "bfloat16", "cuda", 100, 4 << 30)


class Played:
    """vLLM's side: notes what it was asked; asleep between `sleep` and a `wake_up` of everything."""

    def __init__(self, asked: list[str]) -> None:
        self.asked, self.asleep, self.free = asked, False, 7 << 30
        self.llm_engine = SimpleNamespace(is_sleeping=lambda: self.asleep)

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Two parts: sleep frees 6 GiB of the first, and of the second what is left of 6 GiB."""
        self.asked.append(" ".join([method, *map(str, args)]))
        return {"prepare_sleep": [(1 << 30, 6 << 30)] * 2, "free_bytes": [7 << 30, self.free]}.get(method, [None] * 2)

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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def engine_of(asked: list[str], *, adapter: bool) -> VllmEngine:
    engine = object.__new__(VllmEngine)
    engine.weights, engine._llm = SimpleNamespace(adapted=adapter), Played(asked)  # type: ignore[assignment]
    engine.settings = replace(SETTINGS, lora_rank=8 if adapter else 0)
    engine._loaded, engine._discarded, engine.version = True, False, 0
    engine._send_all = lambda version: asked.append("send all") or 9  # type: ignore[method-assign]
    engine._send_adapter = lambda version: asked.append("send adapter") or 9  # type: ignore[method-assign]
    return engine


def test_weights_wake_before_the_cache_and_are_sent_in_between(asked) -> None:
    engine = engine_of(asked, adapter=False)
    engine.sleep()
    engine.load_weights(3)
    assert asked == [
        f"prepare_sleep {4 << 30} True", "sleep 2", "free_bytes",
        "empty cache", "wake ['weights']", "finish_wake False", "send all",
        "empty cache", "wake None", "finish_wake True",
    ]  # fmt: skip
    assert engine.version == 3


def test_a_part_that_sleep_does_not_free_is_an_error(asked) -> None:
    engine = engine_of(asked, adapter=False)
    engine._llm.free = 4 << 30
    with pytest.raises(EngineError, match=r"sleep of the engine freed 3.00 GiB .* take 6.00 GiB"):
        engine.sleep()


def test_an_engine_that_sleeps_is_not_sent_to_sleep_again(asked) -> None:
    engine = engine_of(asked, adapter=True)
    engine.sleep()
    engine.sleep()
    assert asked == [f"prepare_sleep {4 << 30} False", "sleep 1", "free_bytes"]


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


@pytest.mark.parametrize("has_context", [True, False])
def test_a_sync_takes_no_cuda_context_in_the_parent_of_an_engine_in_parts(asked, monkeypatch, has_context) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: has_context)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: asked.append("synchronize"))
    engine_of(asked, adapter=False).load_weights(1)
    assert asked == ["send all", *["synchronize"] * has_context]


def test_a_sampler_that_would_not_be_used_is_not_compiled() -> None:
    assert engine.SETTINGS["VLLM_USE_FLASHINFER_SAMPLER"] == os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")


@pytest.mark.parametrize(("visible", "name"), [("", "5"), ("0,1,2,3,6,7", "7"), ("GPU-a", "5")])
def test_the_engine_is_on_the_ranks_own_gpu_with_files_of_its_own(asked, monkeypatch, visible, name) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", "elsewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(engine, "CACHE", "/cache")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=80 << 30))
    for _ in "ab":  # a second engine of the process is no deeper
        chosen = engine.gpu_options(SETTINGS)
        assert chosen == {"device_ids": [5], "gpu_memory_utilization": 0.05}
        assert os.environ["VLLM_CACHE_ROOT"] == f"/cache/gpu-{name}"
    # In parts it is in a process that sees the cards of all of them and no other.
    assert engine.gpu_options(replace(SETTINGS, tensor_parallel=2)) == {"gpu_memory_utilization": 0.05}
