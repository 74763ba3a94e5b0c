"""Rules about sharding: settings that work only in one process without offloading, and numbers that must divide."""

from __future__ import annotations

from dataclasses import dataclass

from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.toml_lines import Key


@dataclass(frozen=True)
class Unfit:
    """Setting of a recipe that does not fit the number of processes. `key`: key of the setting."""

    key: Key
    message: str
    hint: str


def is_sharded(recipe: Recipe, trainers: int) -> bool:
    """Return whether FSDP2 holds the policy: several processes share it, or it is in main memory between its uses.

    Args:
        trainers: number of training processes. With one and `parallel.offload`, its shard is the whole policy.
    """
    return trainers > 1 or recipe.parallel.offload


def why_whole(recipe: Recipe) -> str | None:
    """Return why each process of a sharded run loads the whole model; None = it reads only the rows that it holds.

    Also, models with code of their own, models that are stored quantized, and an adapter that is folded into the first
    weights are loaded whole. The recipe does not show this.
    """
    return "DoRA computes the norms of whole weights" if recipe.lora is not None and recipe.lora.dora else None


def check_trainers(recipe: Recipe, trainers: int) -> list[Unfit]:
    """Return the settings of a recipe that do not fit this number of training processes."""
    if not is_sharded(recipe, trainers):
        return []
    several, unfit = trainers > 1, []
    if recipe.model.quantize:
        setting = f'model.quantize = "{recipe.model.quantize}"'
        if several:
            message = f"{setting} is for one process: packed weights are not sharded"
            hint = "train in one process, or without quantize: the base is sharded then"
        else:
            message = f"{setting} cannot be combined with parallel.offload: packed weights stay on their device"
            hint = "leave out one of the two"
        unfit.append(Unfit(("model", "quantize"), message, hint))
    if recipe.optim.name != "adamw":
        setting = f'optim.name = "{recipe.optim.name}"'
        if several:
            message = f"{setting} is for one process: several processes shard the moments"
            hint = 'optim.name = "adamw"; parallel.offload keeps the moments in main memory'
        else:
            message = f"{setting} cannot be combined with parallel.offload, which keeps AdamW's moments in main memory"
            hint = 'optim.name = "adamw", or parallel.offload = false'
        unfit.append(Unfit(("optim", "name"), message, hint))
    shard_size = recipe.parallel.shard_size
    if shard_size is not None and trainers % shard_size:
        message = f"parallel.shard_size = {shard_size} does not divide {trainers} process{'es' if several else ''}"
        hint = "leave it out to shard over all processes, or give a divisor of their number"
        unfit.append(Unfit(("parallel", "shard_size"), message, hint))
    return unfit


def check_world(recipe: Recipe, processes: int) -> list[Unfit]:
    """Return the settings of a recipe that do not fit `--gpus`. `processes`: its number, engine GPUs included."""
    vllm = recipe.kind == "rl" and recipe.rollout.engine == "vllm"
    engines, parts = (recipe.rollout.engine_gpus, recipe.rollout.tensor_parallel) if vllm else (0, 1)
    trainers = processes - engines
    if trainers < 1:
        message = f"rollout.engine_gpus = {engines} leaves none of {processes} GPUs for training"
        return [
            Unfit(("rollout", "engine_gpus"), message, f"--gpus {engines + 1} at least, or lower rollout.engine_gpus")
        ]
    unfit = check_trainers(recipe, trainers)
    if not engines and trainers % parts:
        message = f"rollout.tensor_parallel = {parts} needs whole groups of {parts} processes, but {trainers} train"
        hint = f"--gpus {parts * -(-trainers // parts)}, or change rollout.tensor_parallel"
        unfit.append(Unfit(("rollout", "tensor_parallel"), message, hint))
    return unfit
