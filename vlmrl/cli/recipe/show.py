"""`vlmrl recipe show`: print a recipe with its parent and overrides applied."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit


def show(
    recipe: options.RecipeName,
    origin: Annotated[
        bool, typer.Option("--origin", help="Show where each value comes from, defaults included.")
    ] = False,
    overrides: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Print a recipe with its parent and overrides applied.

    Example: vlmrl recipe show recipes/digits_im.toml --origin --set optim.lr=1e-4
    """
    from vlmrl.recipe.explain import toml_lines
    from vlmrl.recipe.load import load_recipe

    loaded = load_recipe(recipe, overrides=overrides or [])
    if as_json:
        emit(loaded.resolved, True)
        return
    typer.echo("\n".join(toml_lines(loaded, origin=origin)))
