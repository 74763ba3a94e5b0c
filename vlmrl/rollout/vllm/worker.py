"""Extensions that vLLM's workers import, in this process or in others; they load weights from the trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader  # pyright: ignore[reportMissingImports]

from vlmrl.rollout.vllm.weight_loading import Kind, LooseTensors, SleepingMemory, planned_bytes, take_weights

LOAD_FORMAT = "vlmrl"
"""Name of the loader for vLLM."""


@register_model_loader(LOAD_FORMAT)
class FromTrainer(BaseModelLoader):
    """Model loader that takes the weights from the trainer.

    It reads no files: a run's checkpoint has none that vLLM could read.
    """

    def download_model(self, model_config: Any) -> None:
        pass

    def load_weights(self, model: Any, model_config: Any) -> None:
        take_weights(model, model.load_weights)


class CudaMemory:
    """Memory of the worker's GPU, which vLLM's sleeping allocator manages: see `SleepingMemory`."""

    def free_bytes(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.mem_get_info()[0]

    def kind(self, tensor: Tensor) -> Kind | None:
        from vllm.device_allocator.cumem import CuMemAllocator  # pyright: ignore[reportMissingImports]

        address = tensor.data_ptr()
        allocations = CuMemAllocator.get_instance().pointer_to_data.items()
        tags = [a.tag for start, a in allocations if start <= address < start + a.handle[1]]
        return KINDS.get(tags[0]) if tags else None


KINDS: dict[str, Kind] = {"weights": "model", "workspace": "model", "default": "model", "kv_cache": "cache"}
"""vLLM's tags of the memory that sleep discards. vLLM itself brings the rest back ("runtime", "cudagraph")."""


class Reloading:
    """Mixin that vLLM adds to its class of workers."""

    model_runner: Any
    reload_weights: Any
    sleeping_memory: SleepingMemory = CudaMemory()
    _loose: LooseTensors | None = None

    def prepare_sleep(self, cache_bytes: int, discards: bool) -> tuple[int, int]:
        """Keep what vLLM would lose, and return (free bytes of the GPU, bytes that sleep has to free).

        Args:
            discards: whether the weights are discarded, and not copied to main memory.
        """
        model = self.model_runner.get_model()
        self._loose = LooseTensors()
        self._loose.save(model, self.sleeping_memory, discards=discards)
        return self.sleeping_memory.free_bytes(), planned_bytes(model, cache_bytes)

    def free_bytes(self) -> int:
        return self.sleeping_memory.free_bytes()

    def finish_wake(self, cache: bool) -> None:
        """Restore what vLLM lost in a sleep, after the memory of the weights, or of the `cache` too, is there again."""
        if self._loose is not None:
            self._loose.restore(cache=cache)

    def take_new_weights(self) -> None:
        """Run vLLM's own reload, which calls the model's `load_weights`. Tensors can get lost there."""
        model = self.model_runner.get_model()
        load = model.load_weights
        model.load_weights = lambda weights: take_weights(model, load)
        try:
            self.reload_weights(weights_iterator=iter(()))
        finally:
            del model.load_weights
