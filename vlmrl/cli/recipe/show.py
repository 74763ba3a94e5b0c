"""`vlmrl recipe show`: print a recipe with its parents and overrides applied."""

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
    """Print a recipe with its parents and overrides applied; of a base recipe, which lacks a table, its own text.

    Example: vlmrl recipe show recipes/digits_im.toml --origin --set optim.lr=1e-4
    """
    from vlmrl.recipe.explain import toml_lines
    from vlmrl.recipe.files import text_of_base
    from vlmrl.recipe.load import load_recipe
    from vlmrl.untrusted import visible

    text = None if origin or overrides or as_json else text_of_base(recipe)
    if text is not None:
        typer.echo("\n".join(map(visible, text.splitlines())))
        return
    loaded = load_recipe(recipe, overrides=overrides or [])
    if as_json:
        emit(loaded.resolved, True)
        return
    typer.echo("\n".join(toml_lines(loaded, origin=origin)))
