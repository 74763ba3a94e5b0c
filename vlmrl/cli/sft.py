"""`vlmrl sft`: supervised start."""

from __future__ import annotations

import typer

from vlmrl.cli.training import training_command

HELP = """Train on given responses (supervised start): the rows' own responses, or the task's templated traces.

    Example: vlmrl sft recipes/digits_sft.toml --name digits-sft
    """


def register(app: typer.Typer) -> None:
    short_help = "Train on given responses (supervised start)."
    app.command("sft", help=HELP, short_help=short_help)(training_command("sft"))
