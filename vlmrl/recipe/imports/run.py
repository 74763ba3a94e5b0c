"""Import of another system's configuration as a recipe, with a report of the settings that are left out, and why."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from vlmrl.errors import Problem, ProblemsError, RecipeError, unknown
from vlmrl.recipe.imports import easyr1 as import_easyr1
from vlmrl.recipe.imports import rllava as import_rllava
from vlmrl.recipe.imports import trl as import_trl
from vlmrl.recipe.imports import verl as import_verl
from vlmrl.recipe.imports.draft import Draft
from vlmrl.recipe.imports.read import SYSTEMS, Foreign, read_foreign
from vlmrl.recipe.load import load_recipe
from vlmrl.redaction.redact import excerpt

IMPORTS: dict[str, tuple[str, dict[str, Any], Callable[[Draft], None]]] = {
    "easyr1": ("EasyR1", import_easyr1.DEFAULTS, import_easyr1.from_easyr1),
    "verl": ("verl", import_verl.DEFAULTS, import_verl.from_verl),
    "rllava": ("RLLaVA", import_rllava.DEFAULTS, import_rllava.from_rllava),
    "trl": ("TRL", import_trl.DEFAULTS, import_trl.from_trl),
}
"""System -> (its name, its defaults, the function that fills the draft)."""


def import_recipe(
    file: Path, *, system: str | None = None, rows: int | None = None, processes: int | None = None
) -> tuple[str, dict[str, Any]]:
    """Convert another system's configuration into a recipe. Nothing of the configuration is run.

    Args:
        file: YAML, JSON, a list of overrides, or a launch script.
        system: one of `SYSTEMS`; None = recognised by its settings.
        rows: number of training rows, to convert epochs to steps; None = unknown: epochs are kept.
        processes: number of processes for which the configuration was written (TRL's batch sizes are per device).
    Returns: (recipe as TOML, which is known to load; report). The report has the keys `system`, `mapped`, `changed`
        (mapped, with another meaning), `left_out`, `as_here`, `todo`, `notes`.
    Raises: RecipeError when the file cannot be read, belongs to no known system, or has an invalid value; ProblemsError
        when the recipe does not load.
    """
    if system is not None and system not in SYSTEMS:
        raise unknown("system", system, SYSTEMS)
    try:
        foreign = read_foreign(file, system)
        draft = _filled(foreign, rows, processes)
    except RecipeError as error:
        error.where = error.where or str(file)
        raise
    text = draft.toml(
        f"Imported from {file.name} ({draft.system}). The settings that did not map: `vlmrl recipe import {file.name}`"
    )
    _check_loads(text, file)
    return text, {"system": foreign.system, **draft.report(), "notes": foreign.notes}


def _filled(foreign: Foreign, rows: int | None, processes: int | None) -> Draft:
    name, defaults, fill = IMPORTS[foreign.system]
    draft = Draft(name, dict(foreign.values), defaults, foreign.file.parent, rows, processes)
    draft.drop_unfilled()
    try:
        fill(draft)
    except (TypeError, ValueError, ArithmeticError) as error:
        value = excerpt(str(draft.get(draft.last)), 60)
        message = f"`{draft.last}` has a value that it cannot have, {value!r}: {error}"
        raise RecipeError(message, where=str(foreign.file)) from None
    draft.finish()
    return draft


def _check_loads(text: str, file: Path) -> None:
    """Check that the imported text loads as a recipe. Raises: ProblemsError with the wrong values."""
    lines = text.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        recipe_file = Path(folder) / "recipe.toml"
        recipe_file.write_text(text, "utf-8")
        try:
            load_recipe(recipe_file)
        except ProblemsError as error:
            problems = [replace(p, where=f"{file}, imported as: {_line_of(p, lines)}") for p in error.problems]
            raise ProblemsError(problems) from None


def _line_of(problem: Problem, lines: list[str]) -> str:
    number = (problem.where or "").rpartition(":")[2]
    return " ".join(lines[int(number) - 1].split()) if number.isdigit() and int(number) <= len(lines) else "the recipe"
