"""Checks of a recipe against this machine: packages, trained parameters, disk space, and numbers of the whole run."""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import CheckpointError, Problem, gib, install_line
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import TORCH_HINT, VLLM_HINT, vllm_refusal
from vlmrl.recipe.schema import Recipe

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

BYTES_PER_ROLLOUT_TOKEN = 12
MOMENT_BYTES = {"adamw": 8, "adamw_8bit": 2, "adamw_bf16_kahan": 8}
"""Optimizer -> bytes of its moments per trained number, besides the master (kahan: two bfloat16 and one float32)."""


def checkpoint_bytes(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """Return the size of a checkpoint in bytes: weights (or adapter), moments, and masters that are no weights."""
    recipe = loaded.recipe
    size = 4 if recipe.model.dtype == "float32" else 2
    trained = trained_parameters(loaded, facts)
    masters = 0 if size == 4 or recipe.optim.name == "adamw_bf16_kahan" else 4
    return (facts.total if recipe.lora is None else trained) * size + trained * (
        MOMENT_BYTES[recipe.optim.name] + masters
    )


def trained_parameters(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """Return the number of trained parameters: those of the adapter, or all weights that are not frozen."""
    lora, freeze = loaded.recipe.lora, loaded.recipe.model.freeze
    if lora is None:
        return facts.trained(freeze)
    from vlmrl.model.lora import target_names

    shapes = [facts.linear[name] for name in target_names(list(facts.linear), lora, freeze)]
    return sum(lora.rank * (rows + columns) + (rows if lora.dora else 0) for rows, columns in shapes)


def weight_bytes(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """Return the size of the model with its adapter, in bytes.

    A quantized number takes half a byte, and 1/32 byte for the scales.
    """
    size = 4 if loaded.recipe.model.dtype == "float32" else 2
    adapter = trained_parameters(loaded, facts) * size if loaded.recipe.lora else 0
    quantized = facts.language_linear if loaded.recipe.model.quantize else 0
    return (facts.total - quantized) * size + quantized // 2 + quantized // 32 + adapter


def check_trained(loaded: LoadedRecipe, facts: ModelFacts) -> list[Problem]:
    """Return a problem if `[lora]` or `model.freeze` names something this model lacks, or leaves nothing to train."""
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


def check_served(loaded: LoadedRecipe, facts: ModelFacts, device: str | None = None) -> list[Problem]:
    """Return a problem if the engine that the recipe names cannot generate for this model.

    Args:
        device: "cuda" or "cpu"; None = this machine's.
    """
    from vlmrl.model.model_facts import device_facts

    recipe = loaded.recipe
    if recipe.rollout.engine != "vllm" or recipe.kind != "rl":
        return []
    kind = device or str(device_facts(recipe.model.device)[0]["kind"])
    why = vllm_refusal(facts.model_type, kind, recipe.model.dtype, facts.two_way_images)
    return [] if why is None else [Problem(why, loaded.where(("rollout", "engine")), TORCH_HINT)]


def check_installed(loaded: LoadedRecipe) -> list[Problem]:
    """Return problems: optional packages that the recipe needs and that are missing, or their device is missing."""
    recipe = loaded.recipe
    if recipe.rollout.engine == "vllm" and recipe.kind == "rl" and importlib.util.find_spec("vllm") is None:
        message = 'rollout.engine = "vllm" needs vllm, which is not installed'
        return [Problem(message, loaded.where(("rollout", "engine")), VLLM_HINT)]
    uses = [
        (("model", "quantize"), f'model.quantize = "{recipe.model.quantize}"', recipe.model.quantize is not None),
        (("optim", "name"), 'optim.name = "adamw_8bit"', recipe.optim.name == "adamw_8bit"),
    ]
    if importlib.util.find_spec("bitsandbytes") is not None:
        return _check_quantized_device(loaded)
    hint = f"{install_line('bitsandbytes')}, or leave the key out"
    return [
        Problem(f"{what} needs bitsandbytes, which is not installed", loaded.where(key), hint)
        for key, what, is_used in uses
        if is_used
    ]


def _check_quantized_device(loaded: LoadedRecipe) -> list[Problem]:
    if loaded.recipe.model.quantize is None:
        return []
    from vlmrl.model.model_facts import device_facts

    if device_facts(loaded.recipe.model.device)[0]["kind"] == "cuda":
        return []
    message = (
        f'model.quantize = "{loaded.recipe.model.quantize}" needs a CUDA device: on a CPU it is for inference only'
    )
    where = loaded.where(("model", "quantize"))
    return [Problem(message, where, "run it on a machine with a GPU, or leave quantize out")]


def check_disk(loaded: LoadedRecipe, folder: Path, model: ModelFacts) -> tuple[list[Problem], dict[str, Any]]:
    """Check the disk space for checkpoints, rollouts and the merged model.

    While a checkpoint is written, there is one more than the number that is kept.

    Args:
        folder: folder of the runs.
    """
    recipe, checkpoint, merged = loaded.recipe, checkpoint_bytes(loaded, model), merged_bytes(loaded, model)
    kept = min(recipe.checkpoint.keep_last + recipe.checkpoint.keep_best, checkpoints_written(loaded)) + 1
    rollouts = _rollout_bytes(loaded)
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    facts = {
        "folder": str(folder),
        "free_bytes": free,
        "checkpoint_bytes": checkpoint,
        "checkpoints_at_once": kept,
        "rollouts_bytes_at_most": rollouts,
        "merged_bytes": merged,
    }
    need = kept * checkpoint + rollouts + merged
    if not os.access(existing, os.W_OK):
        return [Problem(f"{existing} cannot be written: no run can be stored there", str(folder), "--runs DIR")], facts
    if need > free:
        level = "error" if kept * checkpoint > free else "warning"
        parts = [f"{kept} checkpoints of {gib(checkpoint)}"]
        if rollouts:
            parts.append(f"rollouts of at most {gib(rollouts)}")
        if merged:
            parts.append(f"a merged model of {gib(merged)}")
        message = f"the run may write {gib(need)} to {existing} ({', '.join(parts)}); {gib(free)} are free"
        key = ("log", "keep_rollouts") if rollouts > kept * checkpoint else ("checkpoint", "keep_last")
        change = "set log.keep_rollouts" if key[0] == "log" else "lower checkpoint.keep_last"
        hint = f"free some space (vlmrl runs du), {change}, or keep runs elsewhere with --runs DIR"
        return [Problem(message, loaded.where(key, ("model", "path")), hint, level)], facts
    return [], facts


def merged_bytes(loaded: LoadedRecipe, facts: ModelFacts) -> int:
    """Return the size of the model that `vlmrl merge` writes, in bytes: in the recipe's dtype, the adapter merged."""
    return facts.total * (4 if loaded.recipe.model.dtype == "float32" else 2)


def _rollout_bytes(loaded: LoadedRecipe) -> int:
    """Return the maximum size in bytes of the rollouts at the end of a run: of all steps that `log` keeps.

    Every response is counted as long as allowed.
    """
    r, steps, log = loaded.recipe.rollout, loaded.recipe.train.steps, loaded.recipe.log
    newest, every = log.keep_rollouts, log.keep_rollouts_every
    if newest is not None and newest < steps:
        steps = newest + (-(-(steps - newest) // every) if every else 0)
    tokens = steps * r.prompts_per_step * r.samples_per_prompt * loaded.recipe.longest_response
    return tokens * BYTES_PER_ROLLOUT_TOKEN if loaded.recipe.kind == "rl" else 0


def checkpoints_written(loaded: LoadedRecipe) -> int:
    """Return the number of checkpoints that a whole run writes: one per `checkpoint.every_steps` steps and the last."""
    steps, every = loaded.recipe.train.steps, loaded.recipe.checkpoint.every_steps
    return -(-steps // every) if every else 1


def num_validations(recipe: Recipe, rows: int) -> int:
    """Return the number of validations of a whole run, the start and the end included. `rows`: of all sources."""
    every, steps = recipe.eval.every_steps, recipe.train.steps
    if recipe.eval.every_epochs is None or not rows:
        return 1 + -(-steps // every) if every else 2
    per_step = recipe.rollout.prompts_per_step if recipe.kind == "rl" else recipe.train.rows_per_step
    drawn = Fraction(steps * per_step, rows) / Fraction(str(recipe.eval.every_epochs))
    return 1 + min(steps, math.ceil(drawn))


def arithmetic(loaded: LoadedRecipe, sources: Sequence[tuple[str, float, int]], validation_rows: int) -> dict[str, Any]:
    """Return the numbers of the whole run, such as responses and epochs.

    Args:
        sources: (name, share, number of training rows) of each source.
        validation_rows: number of responses of a validation.
    """
    recipe = loaded.recipe
    is_rl = recipe.kind == "rl"
    per_step = recipe.rollout.prompts_per_step if is_rl else recipe.train.rows_per_step
    total = recipe.train.steps * per_step
    shares = sum(share for _, share, _ in sources)
    rows = sum(count for _, _, count in sources)
    validations = num_validations(recipe, rows) if validation_rows else 0
    facts: dict[str, Any] = {
        "steps": recipe.train.steps,
        "rows_per_step" if not is_rl else "prompts_per_step": per_step,
    }
    if is_rl:
        facts |= {
            "samples_per_prompt": recipe.rollout.samples_per_prompt,
            "responses": total * recipe.rollout.samples_per_prompt,
            "updates": recipe.train.steps * recipe.train.updates_per_step,
            "response_tokens_at_most": total * recipe.rollout.samples_per_prompt * recipe.longest_response,
        }
    facts["epochs"] = {name: total * share / shares / count for name, share, count in sources}
    facts |= {"validations": validations, "validation_answers": validations * validation_rows}
    return facts | {"checkpoints": checkpoints_written(loaded)}
