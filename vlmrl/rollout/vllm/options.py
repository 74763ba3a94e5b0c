"""Options of vLLM that depend on the adapter and on the GPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from vlmrl.errors import EngineError
from vlmrl.rollout.vllm.settings import EngineSettings

CACHE = os.environ.get("VLLM_CACHE_ROOT") or os.path.expanduser("~/.cache/vllm")
"""Folder in which vLLM keeps compiled code."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates; an adapter gets the next larger one."""


def lora_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the options for an adapter; {} without one.

    Raises: EngineError when the adapter's rank is too large.
    """
    if not settings.lora_rank:
        return {}
    rank = next((r for r in LORA_RANKS if r >= settings.lora_rank), None)
    if rank is None:
        raise EngineError(f"an adapter of rank {settings.lora_rank} is too large for vLLM: {LORA_RANKS[-1]} at most")
    return {
        "enable_lora": True,
        "max_lora_rank": rank,
        "max_loras": 1,
        "enable_tower_connector_lora": settings.lora_vision,
    }


def gpu_options(settings: EngineSettings) -> dict[str, Any]:
    """Return the options for an engine on this process's own GPU; in parts, on all GPUs that the process sees.

    Other GPUs may be in use. By default an engine in the process takes the first visible GPU, and requires its share of
    the GPU's memory (92%) to be free before it starts; it allocates what its weights and `kv_cache_bytes` need. Each
    engine has its own cache of compiled code, because engines that are built at the same time would write the same
    files.
    """
    gpu = torch.cuda.current_device()
    torch.cuda.empty_cache()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[gpu] if gpu < len(visible) and visible[gpu] else str(gpu)
    os.environ["VLLM_CACHE_ROOT"] = os.path.join(CACHE, f"gpu-{name}")
    total = torch.cuda.get_device_properties(gpu).total_memory
    options: dict[str, Any] = {"gpu_memory_utilization": min(1.0, settings.kv_cache_bytes / total)}
    return options if settings.tensor_parallel > 1 else options | {"device_ids": [gpu]}
