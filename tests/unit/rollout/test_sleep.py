"""Losses of a sleep of vLLM's worker, and the memory that it frees. Memory is played; see also test_vllm_sleep.py."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vlmrl.errors import EngineError
from vlmrl.rollout.vllm import weight_loading
from vlmrl.rollout.vllm.weight_loading import Kind, LooseTensors, check_freed, loose_tensors, planned_bytes

GIB = 1 << 30


class Backend:
    """An object of the layer's own package that is no module, as an attention backend is."""

    def __init__(self) -> None:
        self.table = torch.tensor([2, 0, 1])
        self.owner: nn.Module | None = None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 3))
        self.register_buffer("angles", torch.ones(4), persistent=False)
        self.view = self.weight.data[0]
        self.inputs = [torch.zeros(5, 3), torch.zeros(5, 3)]
        self.backend = Backend()
        self.backend.owner = self
        self.cache = {"keys": (torch.ones(7),)}
        self.foreign = SimpleNamespace(tensor=torch.ones(9))
        self.empty = torch.zeros(0)
        with FakeTensorMode() as mode:
            self.traced = mode.from_tensor(torch.ones(3)), torch.ones(3, device="meta")


def model_of() -> Any:
    model = nn.Sequential(Layer(), Layer())
    model[1].inputs = model[0].inputs  # held by two modules
    return model


class Memory:
    """Memory of which some tensors are a cache, one is not discarded, and the rest is the model's."""

    def __init__(self, cache: list[Tensor], kept: Tensor) -> None:
        self.cache, self.kept = [t.data_ptr() for t in cache], kept.data_ptr()

    def free_bytes(self) -> int:
        return 0

    def kind(self, tensor: Tensor) -> Kind | None:
        return None if tensor.data_ptr() == self.kept else "cache" if tensor.data_ptr() in self.cache else "model"


def test_tensors_that_are_neither_parameters_nor_buffers_are_found_once_wherever_they_are() -> None:
    of_one = {"inputs.0", "inputs.1", "backend.table", "cache.keys.0"}
    found = loose_tensors(model_of())
    assert found.keys() == {f"0.{x}" for x in of_one} | {"1.backend.table", "1.cache.keys.0"}
    assert found["0.backend.table"].tolist() == [2, 0, 1]


def test_small_tensors_come_back_as_they_were_and_large_ones_as_zeros(monkeypatch) -> None:
    monkeypatch.setattr(weight_loading, "SAVED_BYTES", 5 * 3 * 4)
    model, loose = model_of(), LooseTensors()
    layer, cache = model[0], [model[i].cache["keys"][0] for i in range(2)]
    layer.inputs[0].fill_(3.0)
    layer.large = torch.full((4, 4), 5.0)  # 64 bytes
    layer.part = layer.large[1]  # 16 bytes of the same memory
    with torch.inference_mode():
        layer.inferred = torch.full((2,), 6.0)  # torch lets nobody change it outside of this mode
    memory = Memory(cache, model[1].backend.table)
    loose.save(model, memory, discards=True)
    destroyed = [t for t in loose_tensors(model).values() if memory.kind(t)]
    with torch.inference_mode():
        for tensor in destroyed:
            tensor.fill_(math.nan if tensor.is_floating_point() else -1)
    assert len(destroyed) == 2 + 1 + 3 + 2  # inputs, table, the three of above, caches
    model[1].backend.table[0] = 9  # is in no memory that sleeps: what is written there meanwhile stays
    loose.restore(cache=False)
    assert layer.inputs[0].tolist() == [[3.0] * 3] * 5 and layer.inputs[1].tolist() == [[0.0] * 3] * 5
    assert layer.large.tolist() == [[0.0] * 4, [5.0] * 4, [0.0] * 4, [0.0] * 4]
    assert layer.inferred.tolist() == [6.0, 6.0]
    assert [x.backend.table.tolist() for x in model] == [[2, 0, 1], [9, 0, 1]]
    assert cache[0].isnan().all()  # not mapped yet: writing to it would end the process
    layer.inputs[0].fill_(4.0)
    loose.restore(cache=True)
    assert layer.inputs[0].tolist() == [[4.0] * 3] * 5
    assert [c.tolist() for c in cache] == [[0.0] * 7] * 2


def test_a_sleep_that_keeps_the_model_loses_the_cache_alone() -> None:
    model, loose = model_of(), LooseTensors()
    cache = [model[i].cache["keys"][0] for i in range(2)]
    loose.save(model, Memory(cache, torch.ones(1)), discards=False)
    model[0].inputs[0].fill_(4.0)
    loose.restore(cache=True)
    assert model[0].inputs[0].tolist() == [[4.0] * 3] * 5 and cache[0].tolist() == [0.0] * 7


def test_the_plan_counts_the_memory_of_parameters_once() -> None:
    model = model_of()
    model[1].weight = model[0].weight
    assert planned_bytes(model, 1000) == 2 * 3 * 4 + 1000


def test_a_sleep_that_frees_less_than_planned_is_an_error_with_the_numbers() -> None:
    planned = 20 * GIB
    slack = 2 * planned // 100  # 0.4 GiB, more than 128 MiB
    check_freed(5 * GIB, 5 * GIB + planned - slack, planned)
    check_freed(5 * GIB, 30 * GIB, planned)  # the trainer's cached memory became free too
    with pytest.raises(EngineError, match=r"freed 12.00 GiB .* take 20.00 GiB; .* was 5.00 GiB before and 17.00") as e:
        check_freed(5 * GIB, 17 * GIB, planned)
    assert "nvidia-smi" in (e.value.hint or "")
    with pytest.raises(EngineError):
        check_freed(5 * GIB, 5 * GIB + planned - slack - 1, planned)
    small = 1 * GIB  # 2% are 20 MiB: the floor of 128 MiB counts
    check_freed(0, small - (128 << 20), small)
    with pytest.raises(EngineError):
        check_freed(0, small - (129 << 20), small)
