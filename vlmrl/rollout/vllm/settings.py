"""Settings of an engine of vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSettings:
    """Settings that the engine is built with.

    Args:
        folder: Hugging Face folder or hub name with configuration and processor; its weights are not read.
        dtype: "float32" or "bfloat16", as the trainer's.
        device: "cpu" or "cuda".
        max_tokens: of the longest prompt and response together.
        kv_cache_bytes: size of the key-value cache.
        image_arguments: arguments of the trainer's image processor (its pixel bounds).
        lora_rank: 0 = no adapter.
        lora_vision: whether the vision tower and the connector have an adapter too.
        tensor_parallel: number of parts that every weight is cut into; above 1 each part has its own process and GPU.
        weight_transport: "auto", or "socket": weights never go from GPU to GPU.
        revision, trust_remote_code: as in the recipe's table `model`.
    """

    folder: str
    dtype: str
    device: str
    max_tokens: int
    kv_cache_bytes: int
    image_arguments: Mapping[str, Any] = field(default_factory=dict)
    lora_rank: int = 0
    lora_vision: bool = False
    tensor_parallel: int = 1
    weight_transport: str = "auto"
    revision: str | None = None
    trust_remote_code: bool = False

    @property
    def sleeps(self) -> bool:
        """Return whether the engine can free memory; vLLM cannot on a CPU."""
        return self.device == "cuda"

    @property
    def discards(self) -> bool:
        """Return whether weights are gone after it slept. With an adapter they are kept, as the base is sent once."""
        return self.sleeps and not self.lora_rank
