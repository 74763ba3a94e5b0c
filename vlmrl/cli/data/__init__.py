"""`vlmrl data`: commands that show, check or export a dataset, one file per command."""

from __future__ import annotations

import typer

from vlmrl.cli.data import doctor, export, show

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, check or export a dataset.")


def register(app: typer.Typer) -> None:
    group.command("show")(show.show)
    group.command("doctor")(doctor.doctor)
    group.command("export")(export.export)
    app.add_typer(group, name="data")
