"""`vlmrl recipe check`: check recipes without their data and models."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell
from vlmrl.cli.show.recipe_tables import describe_task


def check(
    recipes: Annotated[list[str], typer.Argument(help="TOML files, or names of shipped recipes.")],
    overrides: options.Set = None,
    as_json: options.Json = False,
) -> None:
    """Check recipes without opening their data and models.

    It checks keys, values, names, prompt and reward files. The exit code is 2 if a recipe has an error.

    Example: vlmrl recipe check fungi_im bird_im_concrete recipes/digits_im.toml

    Data and models that do not exist yet are reported, but they are not errors here. `vlmrl check RECIPE` also opens
    the data, reads rows and prompts, and plans memory and time.
    """
    from vlmrl.errors import format_error
    from vlmrl.preflight.recipe_alone import check_alone

    results, data = [], {}
    for recipe in recipes:
        problems, data[recipe] = check_alone(recipe, overrides or [])
        results.append((recipe, problems))
    wrong = [recipe for recipe, problems in results if any(p.level == "error" for p in problems)]
    fields = [
        {"recipe": r, "ok": r not in wrong, "data": data[r], "problems": [asdict(p) for p in problems]}
        for r, problems in results
    ]
    emit({"ok": not wrong, "recipes": fields}, as_json)
    if not as_json:
        for recipe, problems in results:
            tell(f"{recipe}: {'has errors' if recipe in wrong else 'no errors'}")
            for entry in data[recipe]:
                tell(f"  {entry['path']}: {describe_task(entry)}")
            for p in problems:
                tell(format_error(p.message, p.where, p.hint, p.level))
    if wrong:
        raise typer.Exit(2)
