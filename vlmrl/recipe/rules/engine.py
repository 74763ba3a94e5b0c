"""Rules about the engine that generates, and about sharding.

They name settings that vLLM does not support, or that work only in one process without offloading, and numbers that
must divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from vlmrl.errors import Problem, install_line
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.toml_lines import AUTO_ORIGIN, Key

VLLM_INSTALL = install_line("vllm")
"""Command that installs vLLM for a GPU."""
VLLM_HINT = f'{VLLM_INSTALL}; without a GPU: scripts/vllm-cpu; or set rollout.engine = "torch"'
"""Hint if vLLM is missing: the command that installs it, and the use of the other engine."""
MAX_RANK = 512
"""Maximum rank of an adapter that vLLM serves."""
MIN_TEMPERATURE = 0.01
"""Minimum temperature of vLLM, which silently raises smaller temperatures to this value."""

TORCH_HINT = 'use rollout.engine = "torch"'
TWO_WAY_IMAGES = "its CPU build lets the tokens of an image attend only to earlier tokens"
LINEAR_ATTENTION = "its CPU build computes linear attention only in bfloat16"
CPU_REFUSALS: Mapping[tuple[str, str], str] = {
    ("qwen3_5", "float32"): LINEAR_ATTENTION,
    ("qwen3_5_moe", "float32"): LINEAR_ATTENTION,
}
"""(model type, dtype) -> reason why vLLM on a CPU cannot generate for it, found by `scripts/bench/vllm_families.py`."""


def vllm_refusal(model_type: str, device: str, dtype: str, two_way_images: bool) -> str | None:
    """Return the reason why vLLM cannot generate for such a model; None = it can, or this was never tried.

    Args:
        device: "cpu" or "cuda".
        two_way_images: whether the tokens of an image attend to each other in both directions.
    """
    reason = TWO_WAY_IMAGES if two_way_images else CPU_REFUSALS.get((model_type, dtype))
    reason = reason if device == "cpu" else None
    return reason and f"vLLM cannot generate for a model of type `{model_type}` here: {reason}"


@dataclass(frozen=True)
class Unfit:
    """Setting that vLLM does not support, or that does not fit the number of processes. `key`: key of the setting."""

    key: Key
    message: str
    hint: str


def unsupported_by_vllm(recipe: Recipe) -> list[Unfit]:
    """Return the settings of a recipe that vLLM does not support, on any machine."""
    lora, model, temperature = recipe.lora, recipe.model, recipe.rollout.temperature
    or_torch = 'or set rollout.engine = "torch"'
    unsupported: list[Unfit] = []
    if lora is not None and lora.dora:
        message = "`lora.dora` is on, but vLLM cannot serve such an adapter"
        unsupported.append(Unfit(("lora", "dora"), message, f"leave it out, {or_torch}"))
    if lora is not None and lora.rank > MAX_RANK:
        message = f"`lora.rank` is {lora.rank}, but vLLM serves adapters of rank {MAX_RANK} at most"
        unsupported.append(Unfit(("lora", "rank"), message, f"lower it to {MAX_RANK}"))
    if model.quantize is not None:
        message = f'`model.quantize` is "{model.quantize}", but such weights cannot be synced to vLLM'
        unsupported.append(Unfit(("model", "quantize"), message, f"leave it out, {or_torch}"))
    if temperature < MIN_TEMPERATURE:
        message = f"`rollout.temperature` is {temperature}, but vLLM samples at {MIN_TEMPERATURE} at least"
        unsupported.append(Unfit(("rollout", "temperature"), message, f"raise it, {or_torch}"))
    return unsupported


def _engine_gpus(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout, where = loaded.recipe.rollout, loaded.where(("rollout", "overlap"))
    if rollout.overlap and rollout.engine_gpus == 0:
        message = "`rollout.overlap` does nothing without GPUs that only generate"
        yield Problem(message, where, "set rollout.engine_gpus, or leave it out")
    if rollout.overlap and (rollout.top_p < 1 or rollout.top_k > 0):
        message = "`rollout.overlap` samples with older weights, and with top-p or top-k nothing corrects for that"
        yield Problem(message, where, "top_p = 1 and top_k = 0, or leave it out")

    gpus, parts = rollout.engine_gpus, rollout.tensor_parallel
    if gpus % parts:
        message = f"`rollout.engine_gpus` is {gpus}, which is not a multiple of `rollout.tensor_parallel` = {parts}"
        fitting = parts * -(-gpus // parts)  # rounded up
        yield Problem(message, loaded.where(("rollout", "engine_gpus")), f"rollout.engine_gpus = {fitting}")


def check_engine(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield the problems of `rollout.engine`.

    With "auto" a problem is a setting that no engine supports; with the built-in engine, a setting that has no effect
    there.
    """
    rollout = loaded.recipe.rollout
    if loaded.recipe.kind != "rl":
        return
    if rollout.engine == "vllm":
        yield from (Problem(u.message, loaded.where(u.key), u.hint) for u in unsupported_by_vllm(loaded.recipe))
    if rollout.engine in ("auto", "vllm"):
        yield from _engine_gpus(loaded)
    elif rollout.engine_gpus or rollout.overlap or rollout.tensor_parallel > 1:
        key = "engine_gpus" if rollout.engine_gpus else "overlap" if rollout.overlap else "tensor_parallel"
        message = f"`rollout.{key}` is for the engine vllm: the built-in one generates with the trainer's own weights"
        chosen = loaded.origins.get("rollout.engine", "")
        if chosen.startswith(AUTO_ORIGIN):
            message += f", and it was chosen because {chosen.removeprefix(AUTO_ORIGIN)}"
        yield Problem(message, loaded.where(("rollout", key)), 'rollout.engine = "vllm", or leave it out')


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
