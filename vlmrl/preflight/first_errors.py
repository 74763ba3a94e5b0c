"""Errors that are known in a second: those of the recipe's own text, and of opening its tables and rewards.

No large library is imported.
"""

from __future__ import annotations

from vlmrl.errors import Problem
from vlmrl.preflight.catalogs import catalogs
from vlmrl.preflight.rows import open_sources
from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.load import LoadedRecipe


def first_errors(loaded: LoadedRecipe) -> list[Problem]:
    """Return the errors of a recipe, and of opening its data and rewards; `preflight` reports them, too."""
    problems = [p for p in check_recipe(loaded, catalogs()) if p.level == "error"]
    known = {p.where for p in problems} | {p.message for p in problems}
    opened = open_sources(loaded, problems).problems
    return problems + [p for p in opened if p.level == "error" and not known & {p.where, p.message}]
