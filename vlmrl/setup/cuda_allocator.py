"""Settings of torch's CUDA allocator for a process that trains.

Packed rows differ in length from step to step. Blocks of fixed size then leave gaps that no later tensor fits
(fragmentation). Expandable segments grow instead, so a run fits nearer to the memory plan.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from vlmrl.recipe.schema import Recipe

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with torch's allocator settings: its present name and the two old ones."""
EXPANDABLE = "expandable_segments:True"


def allocator_settings(recipe: Recipe, device: str, environment: Mapping[str, str]) -> str | None:
    """Return the allocator settings for a process that trains; None = torch's own.

    A vLLM engine that sleeps in the same process has an allocator of its own, whose memory pool does not work with
    expandable segments (pytorch issue 147851). An engine on other GPUs or in parts has processes of its own.

    Args:
        device: type of the device that trains.
        environment: environment variables. Settings of the user are kept.
    """
    r = recipe.rollout
    has_engine = recipe.kind == "rl" and r.engine == "vllm" and not r.engine_gpus and r.tensor_parallel == 1
    is_set = any(environment.get(name) for name in VARIABLES)
    return None if device != "cuda" or has_engine or is_set else EXPANDABLE


def set_allocator(recipe: Recipe, device: torch.device) -> str | None:
    """Apply `allocator_settings` to this process, before its first tensor is on a GPU, and return them.

    They are set by a call, not by the environment, because processes of engines would inherit a variable.
    """
    settings = allocator_settings(recipe, device.type, os.environ)
    if settings is not None:
        torch._C._accelerator_setAllocatorSettings(settings)  # torch.cuda.memory has the same under a deprecated name
    return settings
