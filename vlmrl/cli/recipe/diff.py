"""`vlmrl recipe diff`: show the keys in which two recipes differ."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.recipe_tables import draw_plain_table, value_text


def diff(
    left: Annotated[str, typer.Argument(help="First recipe: a TOML file, or the name of a shipped recipe.")],
    right: Annotated[str, typer.Argument(help="Second recipe.")],
    as_json: options.Json = False,
) -> None:
    """Show the keys in which two recipes differ, defaults included.

    Example: vlmrl recipe diff digits_baseline digits_im
    """
    from vlmrl.recipe.explain import diff_recipes
    from vlmrl.recipe.load import load_recipe

    rows = diff_recipes(load_recipe(left), load_recipe(right))
    emit({"left": left, "right": right, "differences": rows}, as_json)
    if not as_json:
        cells = [(r["key"], value_text(r["left"]), value_text(r["right"])) for r in rows]
        draw_plain_table(f"{len(rows)} differences", ("key", left, right), cells)
