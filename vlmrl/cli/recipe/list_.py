"""`vlmrl recipe list`: list recipes, or the names that a recipe may use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, show_table
from vlmrl.cli.show.recipe_tables import show_names


def list_(
    words: Annotated[
        list[str] | None, typer.Argument(help="Only recipes whose name contains one of these words.")
    ] = None,
    tasks: Annotated[bool, typer.Option("--tasks", help="List the tasks instead.")] = False,
    algos: Annotated[bool, typer.Option("--algos", help="List the algorithms instead.")] = False,
    rewards: Annotated[bool, typer.Option("--rewards", help="List the built-in rewards instead.")] = False,
    as_json: options.Json = False,
) -> None:
    """List recipes, or the names that a recipe may use.

    The recipes are the shipped ones and those in this folder.

    Example: vlmrl recipe list bird

    Example: vlmrl recipe list --algos
    """
    if tasks or algos or rewards:
        show_names(tasks, algos, rewards, as_json)
        return
    from vlmrl.recipe.explain import first_sentence, list_recipes

    recipes = [r for r in list_recipes(Path.cwd()) if not words or any(word in r.name for word in words)]
    rows = [{"name": r.name, "path": str(r.path), "kind": r.kind, "about": r.error or r.comment} for r in recipes]
    emit({"recipes": rows}, as_json)
    if not as_json:
        show_table("", ("name", "kind", "about"), [(r["name"], r["kind"], first_sentence(r["about"])) for r in rows])
        say("\n`vlmrl recipe show NAME` prints a recipe, `vlmrl recipe list WORD` lists those with WORD in their name")
