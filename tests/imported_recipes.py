"""Configurations of other systems as recipes, for the tests of `recipe import`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vlmrl.recipe.imports.run import import_recipe
from vlmrl.recipe.load import LoadedRecipe, load_recipe


def imported(folder: Path, text: str, name: str = "c.yaml", **options: Any) -> tuple[LoadedRecipe, dict[str, Any]]:
    """(the recipe of a file with this text, the report)."""
    (folder / name).write_text(text)
    recipe, report = import_recipe(folder / name, **options)
    (folder / "made.toml").write_text(recipe)
    return load_recipe(folder / "made.toml"), report


def left(report: dict[str, Any]) -> dict[str, str]:
    """Setting that was left out -> why."""
    return {item["key"]: item["why"] for item in report["left_out"]}
