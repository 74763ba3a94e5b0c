"""`vlmrl recipe check`: check of a recipe alone, without its data and its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, ProblemsError, VlmrlError
from vlmrl.preflight.catalogs import catalogs, resolve_tasks
from vlmrl.recipe.checks import check_unprepared
from vlmrl.recipe.load import load_recipe


def check_alone(recipe: str | Path, overrides: Sequence[str]) -> tuple[list[Problem], list[dict[str, Any]]]:
    """Return (problems of a recipe, task and reward of each `[[data]]` entry); the second is [] if there are errors.

    Args:
        recipe: a TOML file, or the name of a shipped recipe.
    """
    try:
        loaded = load_recipe(recipe, overrides=overrides)
        problems = check_unprepared(loaded, catalogs())
        is_sound = not any(p.level == "error" for p in problems)
        return problems, resolve_tasks(loaded.recipe) if is_sound else []
    except ProblemsError as error:
        return list(error.problems), []
    except VlmrlError as error:
        return [Problem(error.message, error.where, error.hint)], []
