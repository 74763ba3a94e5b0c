"""Loading of a recipe with the quick part of `vlmrl check`. Every command that runs a recipe begins with it.

All open values of the recipe are chosen, too. Nothing is printed here: warnings are returned to the command. The
imports are inside the functions, so that a wrong model path is reported before a large library is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.dist.world import launched
from vlmrl.errors import Problem, ProblemsError, VlmrlError

if TYPE_CHECKING:
    from vlmrl.recipe.load import LoadedRecipe
    from vlmrl.setup.memory_fit import Target


def load_checked(
    recipe: str | Path,
    overrides: Sequence[str],
    kind: str | None,
    root: Path,
    *,
    trains: bool = True,
    asks: bool = True,
    gpus: str | None = None,
) -> tuple[LoadedRecipe, list[Problem]]:
    """Load a recipe and check it as `check_loaded` does.

    Args:
        kind: "rl" or "sft": the kind that the recipe must be of; None = any.
        root: folder of the runs.
        trains, asks, gpus: as for `check_loaded`.
    """
    from vlmrl.recipe.load import load_recipe

    return check_loaded(load_recipe(recipe, overrides=overrides, kind=kind), root, trains=trains, asks=asks, gpus=gpus)


def check_loaded(
    loaded: LoadedRecipe,
    root: Path,
    *,
    trains: bool,
    asks: bool,
    files: str | None = None,
    gpus: str | None = None,
) -> tuple[LoadedRecipe, list[Problem]]:
    """Run the quick part of `vlmrl check`. A rank skips the check, because its launcher has run it already.

    Args:
        root: folder of the runs.
        trains: whether a training run follows; disk and memory must then have enough room for it.
        asks: whether the services of the rewards get one request each. A run that goes on waits for them itself.
        files: folder with the model's files; None = the folder that `model.path` names.
        gpus: value of `--gpus`; None = one process.
    Returns: (recipe without open values (recipe/auto_values.py), warnings).
    Raises: ProblemsError with all errors; LaunchError for a `gpus` that cannot be read.
    """
    from vlmrl.setup.auto_choice import fill_for_run
    from vlmrl.setup.check import check_model, quick_look

    if launched():
        return fill_for_run(loaded, root)[0], []
    (problems, prompts), missing = quick_look(loaded, root if asks and loaded.recipe.kind == "rl" else None), []
    if not any(p.level == "error" for p in problems):
        if files is None:
            files, missing = find_model_files(loaded.recipe.model.path, root, loaded.where(("model", "path")))
        if not missing:
            target = parse_target(gpus)
            loaded, warnings = fill_for_run(loaded, root, target, prompts)
            problems += [
                *warnings,
                *check_model(loaded, files, root if trains else None, target=target, prompts=prompts),
            ]
        problems += missing
    errors = [p for p in problems if p.level == "error"]
    if errors:
        raise ProblemsError(errors)
    return loaded, problems


def parse_target(gpus: str | None, gpu_memory: str | None = None) -> Target:
    """Return the GPUs for a run, as `--gpus` and `--gpu-memory` name them. Raises: LaunchError, RecipeError."""
    from vlmrl.model.gpus import parse_gpus
    from vlmrl.setup.memory_fit import Target
    from vlmrl.setup.memory_sizes import parse_gpu

    count, chosen = parse_gpus(gpus) if gpus is not None else (1, ())
    return Target(len(chosen) or count, None if gpu_memory is None else parse_gpu(gpu_memory))


def find_model_files(path: str, root: Path, where: str) -> tuple[str | None, list[Problem]]:
    """Return (folder with the configuration and processor of the recipe's model, problems).

    Args:
        path: the recipe's `model.path`.
        root: folder of the runs.
        where: place of that key, for the problem.
    """
    from vlmrl.setup.model_origin import find_model, require_there

    try:
        origin = find_model(path, root)
        if origin.checkpoint is None:
            require_there(path, root)
        return origin.files, []
    except VlmrlError as error:
        return None, [Problem(error.message, where, error.hint)]
