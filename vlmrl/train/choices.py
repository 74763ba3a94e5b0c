"""What a run settles before it begins: a value for every key that its recipe leaves open (recipe/settle.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vlmrl.check.gpus import Gpu, known_gpu
from vlmrl.check.memory import HERE, Target
from vlmrl.dist import worker
from vlmrl.errors import Problem
from vlmrl.recipe.load import AUTO_ORIGIN, LoadedRecipe
from vlmrl.recipe.schema import Model, Recipe
from vlmrl.recipe.settle import OPEN, Choice, Chooser, choose, open_keys, settle, with_values


def choosers(settings: Model, files: Callable[[], str], where: str, target: Target = HERE) -> Mapping[str, Chooser]:
    """Return, for each key of `OPEN`, the function that chooses its value.

    Args:
        settings, files: the recipe's table `model`, and where the model's configuration is, asked for only if needed.
        where: of what is chosen, for messages.      target: where the run is to run.
    """
    from vlmrl.check.engine_choice import EngineWorld, choose_engine
    from vlmrl.model.facts import ModelFacts, device_facts, model_facts
    from vlmrl.rollout.vllm_probe import probe_vllm

    def engine(recipe: Recipe) -> Choice:
        device, _ = device_facts(recipe.model.device) if recipe.model.device != "cpu" else ({"kind": "cpu"}, [])
        gpu = target.gpu
        if gpu is None and device["kind"] == "cuda":
            gpu = known_gpu(device["name"]) or Gpu(device["name"], int(device["memory_bytes"]))
        return choose_engine(recipe, EngineWorld(gpu, probe_vllm, model, where, target.is_elsewhere))

    def model() -> ModelFacts:
        return model_facts(settings, path=files())

    return {"rollout.engine": engine}


def settle_for_run(loaded: LoadedRecipe, root: Path, target: Target = HERE) -> tuple[LoadedRecipe, list[Problem]]:
    """Choose what the recipe leaves open. Processes that a launcher started take what it chose.

    Args: root: folder of the runs, one of which `model.path` may name.      target: where the run is to run.
    Returns: the recipe with nothing left open, and warnings about what was chosen.
    """
    still = open_keys(loaded.recipe)
    if not still:
        return loaded, []
    told = {c["key"]: Choice(**c) for c in worker.choices()}
    if all(key in told for key in still):
        return settle(loaded, [told[key] for key in still]), []

    def files() -> str:
        from vlmrl.train.origin import find_model

        return find_model(model.path, root).files

    model, where = loaded.recipe.model, loaded.where(("rollout", "engine"), ("model", "path"))
    choices = choose(loaded.recipe, choosers(model, files, where, target))
    return settle(loaded, choices), [c.problem for c in choices if c.problem is not None]


def settle_for_answers(recipe: Recipe, files: str) -> tuple[Recipe, list[Problem]]:
    """Choose what is open in a recipe that is only to answer prompts, on this machine (`vlmrl eval`).

    Args: files: where the model's configuration is.
    """
    choices = choose(recipe, choosers(recipe.model, lambda: files, "rollout.engine"))
    return with_values(recipe, choices), [c.problem for c in choices if c.problem is not None]


def choices_of(loaded: LoadedRecipe) -> list[dict[str, Any]]:
    """Return what was chosen for this recipe, as JSON values: a launcher tells it to its processes."""
    found: list[dict[str, Any]] = []
    for key in OPEN:
        origin = loaded.origins.get(key, "")
        if origin.startswith(AUTO_ORIGIN):
            table, _, name = key.partition(".")
            value = loaded.resolved["recipe"][table][name]
            found.append({"key": key, "value": value, "reason": origin.removeprefix(AUTO_ORIGIN)})
    return found
