"""Sleep of level 2 for vLLM's CPU build, which has none: it destroys what vLLM's GPU worker discards."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Pools:
    """Memory that a worker allocated for its model and for its key-value cache, and what sleep does to it.

    It follows vllm/v1/worker/gpu_worker.py: buffers are saved and brought back, everything else becomes NaN (bytes of
    255). What belongs to a pool is found by looking at all tensors before and after, not by the code under test.
    """

    def __init__(self) -> None:
        self.pools: dict[str, dict[int, Tensor]] = {}
        self.buffers: dict[str, Tensor] = {}
        self.asleep, self.cycles, self.frees = False, 0, 1.0

    def noting(self, tag: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(worker: Any, *args: Any, **kwargs: Any) -> Any:
            before = _storages()
            try:
                return method(worker, *args, **kwargs)
            finally:
                self.pools[tag] = {k: t for k, t in _storages().items() if k not in before}

        return noted

    def bytes(self) -> int:
        return sum(t.untyped_storage().nbytes() for pool in self.pools.values() for t in pool.values())

    def sleep(self, worker: Any, level: int = 1) -> None:
        assert level == 2 and not self.asleep
        model = worker.model_runner.get_model()
        self.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        for pool in self.pools.values():
            for tensor in pool.values():
                torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(255)
        self.asleep, self.cycles = True, self.cycles + 1

    def wake_up(self, worker: Any, tags: list[str] | None = None) -> None:
        with torch.inference_mode():
            for name, buffer in worker.model_runner.get_model().named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])
        self.buffers, self.asleep = {}, False

    # What `SleepingMemory` asks.
    def free_bytes(self) -> int:
        return int(self.frees * self.bytes()) if self.asleep else 0

    def kind(self, tensor: Tensor) -> str | None:
        address = tensor.untyped_storage().data_ptr()
        return {"weights": "model", "kv_cache": "cache"}.get(
            next((k for k, p in self.pools.items() if address in p), "")
        )


def _storages() -> dict[int, Tensor]:
    """Every storage that a Python object holds, by address, with one of its tensors."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if _has_memory(type(x)) and x.device.type == "cpu"]
    return {t.untyped_storage().data_ptr(): t for t in tensors if t.layout == torch.strided and t.numel()}


def _has_memory(kind: type) -> bool:
    """Return whether it is a class of tensors with memory: not one of torch.compile's, which earlier tests leave."""
    return kind in (Tensor, torch.nn.Parameter) or (issubclass(kind, Tensor) and kind.__module__.startswith("vllm."))


def install(monkeypatch: Any) -> Pools:
    """Let vLLM's CPU workers of this process sleep."""
    from vllm.v1.worker.cpu_worker import CPUWorker  # pyright: ignore[reportMissingImports]

    from vlmrl.rollout.vllm.worker import Reloading

    pools = Pools()
    monkeypatch.setattr(CPUWorker, "load_model", pools.noting("weights", CPUWorker.load_model))
    monkeypatch.setattr(CPUWorker, "initialize_from_config", pools.noting("kv_cache", CPUWorker.initialize_from_config))
    monkeypatch.setattr(CPUWorker, "sleep", lambda worker, level=1: pools.sleep(worker, level))
    monkeypatch.setattr(CPUWorker, "wake_up", lambda worker, tags=None: pools.wake_up(worker, tags))
    monkeypatch.setattr(Reloading, "sleeping_memory", pools)
    return pools
