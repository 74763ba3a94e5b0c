"""Does it fit: parameters, memory, disk, and the arithmetic of a run. Estimates say that they are estimates.

Memory is counted, not measured: weights, float32 masters where the weights are bfloat16, gradients, AdamW's moments,
the activations of one packed row, and the key-value cache of the rollouts. Activations per token and layer, calibrated
by counting what autograd keeps for two small models with and without recomputation: 10 hidden + 2 (query + key + value)
+ 4 intermediate numbers; with gradient checkpointing one hidden vector a layer, and one layer in full.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.algo.family import algorithm_of
from vlmrl.errors import CheckpointError, Problem, gib
from vlmrl.recipe.check_engine import TORCH_HINT, VLLM_HINT, vllm_refusal
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.model.facts import ModelFacts

BYTES_PER_ROLLOUT_TOKEN = 12
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2, "adamw_bf16_kahan": 8}
"""What an optimizer keeps of a trained number besides its master (kahan: two bfloat16, one float32)."""
GIB = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Bytes on the training device, estimated. `engine`: vLLM's own weights and key-value cache."""

    weights: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    kv_cache: int
    reference: int
    engine: int

    @property
    def peak(self) -> int:
        """Weights and optimizer are always there; gradients and activations never meet the rollouts' cache."""
        always = self.weights + self.masters + self.optimizer + self.reference + self.engine
        return always + max(self.gradients + self.activations + self.logits, self.kv_cache)


def estimate_memory(loaded: LoadedRecipe, facts: ModelFacts, *, prompt_tokens: int, image_tokens: int) -> Memory:
    """Memory of the recipe's run. `prompt_tokens`, `image_tokens`: of the longest prompt known."""
    from vlmrl.model.facts import device_facts
    from vlmrl.model.head_chunks import head_chunks

    recipe = loaded.recipe
    device = device_facts(recipe.model.device)[0]
    size = 4 if recipe.model.dtype == "float32" else 2
    total, trained = facts.total, trained_parameters(loaded, facts)
    longest = prompt_tokens + recipe.rollout.max_new_tokens
    row_tokens = max(recipe.train.tokens_per_row, longest)
    responses = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
    vllm = recipe.kind == "rl" and recipe.rollout.engine == "vllm"
    built_in = recipe.kind == "rl" and not vllm
    cache_tokens = min(max(recipe.rollout.batch_tokens, longest), responses * longest) if built_in else 0
    merge = int(facts.vision.get("spatial_merge_size", 2)) ** 2
    prompts_in_row = max(1, row_tokens // longest)
    recompute = recipe.model.gradient_checkpointing
    text = _activations(facts.text, row_tokens, recompute is True)
    vision = _activations(facts.vision, prompts_in_row * image_tokens * merge, bool(recompute))
    vocabulary = int(facts.text.get("vocab_size", 0))
    return Memory(
        weights=weight_bytes(loaded, facts),
        masters=0 if size == 4 or recipe.optim.name == "adamw_bf16_kahan" else trained * 4,
        gradients=trained * 4,
        optimizer=trained * MOMENT_BYTES[recipe.optim.name],
        activations=(text + vision) * size,
        # Half of a device's memory stands for what is free when the sizes are settled.
        logits=head_chunks(device["kind"], device["memory_bytes"] // 2).peak_bytes(row_tokens, vocabulary),
        kv_cache=2 * _layers(facts.text) * _kv_width(facts.text) * size * cache_tokens,
        reference=total * size
        if recipe.kind == "rl" and recipe.lora is None and algorithm_of(recipe.algo).kl_coef > 0
        else 0,
        engine=weight_bytes(loaded, facts) // recipe.rollout.tensor_parallel + int(recipe.rollout.kv_cache_gib * GIB)
        if vllm
        else 0,
    )


def checkpoint_bytes(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """Size of one checkpoint: the weights (or the adapter), the moments, the masters where they are not the weights."""
    recipe = loaded.recipe
    size = 4 if recipe.model.dtype == "float32" else 2
    trained = trained_parameters(loaded, facts)
    masters = 0 if size == 4 or recipe.optim.name == "adamw_bf16_kahan" else 4
    return (facts.total if recipe.lora is None else trained) * size + trained * (
        MOMENT_BYTES[recipe.optim.name] + masters
    )


def trained_parameters(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """How many numbers are trained: the adapter's, or the weights that are not frozen."""
    lora, freeze = loaded.recipe.lora, loaded.recipe.model.freeze
    if lora is None:
        return facts.trained(freeze)
    from vlmrl.model.lora import target_names

    shapes = [facts.linear[name] for name in target_names(list(facts.linear), lora, freeze)]
    return sum(lora.rank * (rows + columns) + (rows if lora.dora else 0) for rows, columns in shapes)


def weight_bytes(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """The model itself, with its adapter; quantized, half a byte a number and a 32nd more for the scales."""
    size = 4 if loaded.recipe.model.dtype == "float32" else 2
    adapter = trained_parameters(loaded, facts) * size if loaded.recipe.lora else 0
    quantized = facts.language_linear if loaded.recipe.model.quantize else 0
    return (facts.total - quantized) * size + quantized // 2 + quantized // 32 + adapter


def check_trained(loaded: LoadedRecipe, facts: ModelFacts) -> list[Problem]:
    """What `[lora]` and `model.freeze` name must be in this model, and something must be left to train."""
    from vlmrl.model.load import check_freeze

    try:
        check_freeze(loaded.recipe.model, facts.parameters)
    except CheckpointError as error:
        return [Problem(error.message, loaded.where(("model", "freeze")), error.hint)]
    try:
        trained_parameters(loaded, facts)
    except CheckpointError as error:
        keys = [("lora", key) for key in ("targets", "exclude") if f"lora.{key}" in error.message]
        return [Problem(error.message, loaded.where(*keys, ("lora", "rank")), error.hint)]
    return []


def check_served(loaded: LoadedRecipe, facts: ModelFacts) -> list[Problem]:
    """Whether the engine that the recipe names can generate for this model on this machine."""
    from vlmrl.model.facts import device_facts
    from vlmrl.model.families import has_two_way_images

    recipe = loaded.recipe
    if recipe.rollout.engine != "vllm" or recipe.kind != "rl":
        return []
    device = device_facts(recipe.model.device)[0]["kind"]
    two_way = has_two_way_images(facts.model_type, facts.text.get("use_bidirectional_attention"))
    why = vllm_refusal(facts.model_type, device, recipe.model.dtype, two_way)
    return [] if why is None else [Problem(why, loaded.where(("rollout", "engine")), TORCH_HINT)]


def check_installed(loaded: LoadedRecipe) -> list[Problem]:
    """Packages beyond the usual ones that the recipe asks for, and the device that they need."""
    recipe = loaded.recipe
    if recipe.rollout.engine == "vllm" and recipe.kind == "rl" and importlib.util.find_spec("vllm") is None:
        message = 'rollout.engine = "vllm" needs vllm, which is not installed'
        return [Problem(message, loaded.where(("rollout", "engine")), VLLM_HINT)]
    wanted = [(("model", "quantize"), f'model.quantize = "{recipe.model.quantize}"', recipe.model.quantize is not None),
              (("optim", "name"), 'optim.name = "adamw_8bit"', recipe.optim.name == "adamw_8bit")]  # fmt: skip
    if importlib.util.find_spec("bitsandbytes") is not None:
        return _check_quantized_device(loaded)
    hint = "pip install 'vlmrl[bitsandbytes]', or leave the key out"
    return [
        Problem(f"{what} needs bitsandbytes, which is not installed", loaded.where(key), hint)
        for key, what, is_asked in wanted
        if is_asked
    ]


def _check_quantized_device(loaded: LoadedRecipe) -> list[Problem]:
    if loaded.recipe.model.quantize is None:
        return []
    from vlmrl.model.facts import device_facts

    if device_facts(loaded.recipe.model.device)[0]["kind"] == "cuda":
        return []
    message = (
        f'model.quantize = "{loaded.recipe.model.quantize}" needs a CUDA device: on a CPU it is for inference only'
    )
    where = loaded.where(("model", "quantize"))
    return [Problem(message, where, "run it on a machine with a GPU, or leave quantize out")]


def check_memory(loaded: LoadedRecipe, memory: Memory) -> tuple[list[Problem], dict[str, Any]]:
    """Compare the estimate with the device. Returns (problems, what the device is)."""
    from vlmrl.model.facts import device_facts

    device, problems = device_facts(loaded.recipe.model.device)
    where = loaded.where(("model", "device"), ("model", "path"))
    if problems:
        return [Problem(p, where, 'set model.device = "auto"') for p in problems], device
    need, have = memory.peak, int(device["memory_bytes"])
    if need > have:
        level = "error" if need > 1.5 * have else "warning"
        message = f"the run needs about {gib(need)} of memory; {device['name']} has {gib(have)}"
        biggest = "train.tokens_per_row" if memory.activations > memory.optimizer else "a smaller model or model.freeze"
        hint = f"try {biggest}, model.gradient_checkpointing = true, or rollout.batch_tokens"
        return [Problem(message, loaded.where(("train", "tokens_per_row"), ("model", "path")), hint, level)], device
    if device["kind"] == "cpu" and loaded.recipe.model.dtype == "bfloat16":
        message = "bfloat16 on a CPU is slower than float32 on most machines"
        problem = Problem(
            message, loaded.where(("model", "dtype"), ("model", "device")), 'dtype = "float32"', "warning"
        )
        return [problem], device
    return [], device


def check_disk(
    loaded: LoadedRecipe, folder: Path, checkpoint: int, merged: int = 0
) -> tuple[list[Problem], dict[str, Any]]:
    """Room for the checkpoints kept (one more while the next is written), the rollouts, and the merged model.

    Args: folder: of the runs.    checkpoint: bytes of one.    merged: bytes of the model as `vlmrl merge` writes it.
    """
    recipe = loaded.recipe
    kept = min(recipe.checkpoint.keep_last + recipe.checkpoint.keep_best, checkpoints_written(loaded)) + 1
    rollouts = _rollout_steps_kept(loaded) * _rollout_bytes(loaded)
    there = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    facts = {"folder": str(folder), "free_bytes": free, "checkpoint_bytes": checkpoint, "checkpoints_at_once": kept,
             "rollouts_bytes_at_most": rollouts, "merged_bytes": merged}  # fmt: skip
    need = kept * checkpoint + rollouts + merged
    if not os.access(there, os.W_OK):
        return [Problem(f"{there} cannot be written: no run can be kept there", str(folder), "--runs DIR")], facts
    if need > free:
        level = "error" if kept * checkpoint > free else "warning"
        parts = [f"{kept} checkpoints of {gib(checkpoint)}"]
        if rollouts:
            parts.append(f"rollouts of at most {gib(rollouts)}")
        if merged:
            parts.append(f"a merged model of {gib(merged)}")
        message = f"the run may write {gib(need)} to {there} ({', '.join(parts)}); {gib(free)} are free"
        key = ("log", "keep_rollouts") if rollouts > kept * checkpoint else ("checkpoint", "keep_last")
        change = "set log.keep_rollouts" if key[0] == "log" else "lower checkpoint.keep_last"
        hint = f"free some space (vlmrl runs du), {change}, or keep runs elsewhere with --runs DIR"
        return [Problem(message, loaded.where(key, ("model", "path")), hint, level)], facts
    return [], facts


def merged_bytes(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """Size of the model as `vlmrl merge` writes it: every weight in the recipe's type, an adapter folded in."""
    return facts.total * (4 if loaded.recipe.model.dtype == "float32" else 2)


def _rollout_bytes(loaded: LoadedRecipe) -> int:
    """Of one step's rollouts, at most: every response as long as it may be."""
    r = loaded.recipe.rollout
    tokens = r.prompts_per_step * r.samples_per_prompt * r.max_new_tokens
    return tokens * BYTES_PER_ROLLOUT_TOKEN if loaded.recipe.kind == "rl" else 0


def _rollout_steps_kept(loaded: LoadedRecipe) -> int:
    """Steps whose rollouts are on the disk at the end, under `log.keep_rollouts`."""
    steps, newest, every = (
        loaded.recipe.train.steps,
        loaded.recipe.log.keep_rollouts,
        loaded.recipe.log.keep_rollouts_every,
    )
    if newest is None or newest >= steps:
        return steps
    return newest + (-(-(steps - newest) // every) if every else 0)


def checkpoints_written(loaded: LoadedRecipe) -> int:
    """How many checkpoints a whole run writes: one every so many steps and the last."""
    steps, every = loaded.recipe.train.steps, loaded.recipe.checkpoint.every_steps
    return -(-steps // every) if every else 1


def arithmetic(loaded: LoadedRecipe, sources: Sequence[tuple[str, float, int]], validation_rows: int) -> dict[str, Any]:
    """The numbers of the whole run. `sources`: name, share and number of training rows of each."""
    recipe = loaded.recipe
    is_rl = recipe.kind == "rl"
    per_step = recipe.rollout.prompts_per_step if is_rl else recipe.train.rows_per_step
    total = recipe.train.steps * per_step
    shares = sum(share for _, share, _ in sources)
    every = recipe.eval.every_steps
    validations = (1 + -(-recipe.train.steps // every) if every else 2) if validation_rows else 0
    facts: dict[str, Any] = {
        "steps": recipe.train.steps,
        "rows_per_step" if not is_rl else "prompts_per_step": per_step,
    }
    if is_rl:
        facts |= {
            "samples_per_prompt": recipe.rollout.samples_per_prompt,
            "responses": total * recipe.rollout.samples_per_prompt,
            "updates": recipe.train.steps * recipe.train.updates_per_step,
            "response_tokens_at_most": total * recipe.rollout.samples_per_prompt * recipe.rollout.max_new_tokens,
        }
    facts["epochs"] = {name: total * share / shares / count for name, share, count in sources}
    facts |= {"validations": validations, "validation_answers": validations * validation_rows}
    return facts | {"checkpoints": checkpoints_written(loaded)}


def _activations(config: Mapping[str, Any], tokens: int, recomputed: bool) -> int:
    """Numbers kept for the backward pass of `tokens` positions in one tower."""
    hidden = int(config.get("hidden_size", 0) or 0)
    inner = int(config.get("intermediate_size", 4 * hidden) or 4 * hidden)
    layer = 10 * hidden + 2 * (_query_width(config) + 2 * _kv_width(config)) + 4 * inner
    return tokens * (_layers(config) * hidden + layer if recomputed else _layers(config) * layer)


def _layers(config: Mapping[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or config.get("depth") or 0)


def _heads(config: Mapping[str, Any]) -> int:
    return int(config.get("num_attention_heads") or config.get("num_heads") or 1)


def _query_width(config: Mapping[str, Any]) -> int:
    head = config.get("head_dim") or int(config.get("hidden_size", 0) or 0) // _heads(config)
    return int(head) * _heads(config)


def _kv_width(config: Mapping[str, Any]) -> int:
    return _query_width(config) // _heads(config) * int(config.get("num_key_value_heads") or _heads(config))
