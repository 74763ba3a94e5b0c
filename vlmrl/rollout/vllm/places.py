"""Places of engines in separate processes: their GPUs, and the trainers that they serve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlmrl.dist.world import ENGINES_VARIABLE, World
from vlmrl.errors import LaunchError


@dataclass(frozen=True)
class EnginePlace:
    """GPUs of an engine, and the trainers that it serves.

    Args:
        gpus: CUDA's name of the GPU of each of its parts; on a CPU any word.
        trainers: ranks that send requests to it.
        leader: rank that starts it and sends it the weights.
    """

    gpus: tuple[str, ...]
    trainers: tuple[int, ...]
    leader: int


def places_apart(gpus: Sequence[str], world: World, parts: int) -> list[EnginePlace]:
    """Return the places of engines on engine GPUs, with `parts` GPUs each; every engine serves all trainers.

    Raises: LaunchError when a GPU would be left over.
    """
    if len(gpus) % parts:
        raise LaunchError(
            f"{len(gpus)} GPU(s) generate, but rollout.tensor_parallel = {parts} takes {parts} per engine",
            hint="set rollout.engine_gpus to a multiple of rollout.tensor_parallel",
        )
    everybody = tuple(range(world.size))
    return [
        EnginePlace(tuple(gpus[i * parts : (i + 1) * parts]), everybody, i % world.size)
        for i in range(len(gpus) // parts)
    ]


def places_shared(world: World, parts: int, visible: Sequence[str]) -> list[EnginePlace]:
    """Return the places of engines in `parts` parts, each for as many trainers and on their own GPUs.

    Args:
        visible: GPUs that each process sees, in order of local rank; on a CPU as many words.
    Raises: LaunchError when processes would be left over.
    """
    if world.local_size % parts:
        raise LaunchError(
            f"{world.local_size} process(es) train on this machine, but rollout.tensor_parallel = {parts} needs groups"
            f" of {parts}",
            hint=f"give --gpus a multiple of {parts}, or change rollout.tensor_parallel",
        )
    groups = [tuple(range(first, first + parts)) for first in range(0, world.size, parts)]
    return [EnginePlace(tuple(visible[rank % world.local_size] for rank in ranks), ranks, ranks[0]) for ranks in groups]


def place_alone(parts: int, visible: Sequence[str]) -> EnginePlace:
    """Return the place of an engine in `parts` parts for a single process, on the first GPUs that it sees.

    Raises: LaunchError when it sees too few.
    """
    if len(visible) < parts:
        raise LaunchError(
            f"rollout.tensor_parallel = {parts}, but this process sees {len(visible)} GPU(s)",
            hint="--set rollout.tensor_parallel=1, or give it more GPUs (CUDA_VISIBLE_DEVICES)",
        )
    return EnginePlace(tuple(visible[:parts]), (0,), 0)


def visible_gpus(device: str, count: int) -> list[str]:
    """Return CUDA's names of the GPUs that this process sees; on a CPU `count` words."""
    if device == "cpu":
        return ["cpu"] * count
    listed = [c for c in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if c]
    return listed or [str(i) for i in range(torch.cuda.device_count())]


def reserved_gpus() -> list[str]:
    """Return the GPUs that the launcher reserved for engines; empty when it reserved none."""
    return [c for c in os.environ.get(ENGINES_VARIABLE, "").split(",") if c]
