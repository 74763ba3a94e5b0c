"""`vlmrl recipe`: commands for recipes and their keys, one file per command."""

from __future__ import annotations

import typer

from vlmrl.cli.recipe import check, diff, explain, import_, list_, schema, show

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, explain, check, list and import recipes.")


def register(app: typer.Typer) -> None:
    group.command("show")(show.show)
    group.command("explain")(explain.explain)
    group.command("check")(check.check)
    group.command("list")(list_.list_)
    group.command("schema")(schema.schema)
    group.command("diff")(diff.diff)
    group.command("import")(import_.import_)
    app.add_typer(group, name="recipe")
