"""`vlmrl recipe import`: convert a configuration of another system into a recipe."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say
from vlmrl.cli.show.recipe_tables import show_import
from vlmrl.errors import Problem


def import_(
    file: Annotated[Path, typer.Argument(help="YAML, JSON, a list of overrides, or a launch script.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write the recipe to; default: stdout.")
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="System of the configuration: easyr1, verl, rllava, trl; default: detected.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Number of rows of the training data, to convert epochs into steps.")
    ] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes it was for: TRL's batch sizes are per device.")
    ] = None,
    check_it: Annotated[
        bool, typer.Option("--check", help="Also check the recipe; exit code 2 if it has an error.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Turn another system's configuration into a recipe.

    The systems are EasyR1, verl, RLLaVA and TRL. Settings that were not mapped, or mean something else here, are named.

    Example: vlmrl recipe import run_fungi.sh --rows 10000 --out fungi.toml

    The file is read, never run. A comment behind each value names the setting that it came from.
    """
    from vlmrl.errors import RecipeError, format_error
    from vlmrl.recipe.imports.run import import_recipe

    if out is not None and out.exists():
        raise RecipeError(f"{out} exists already", hint="choose another --out, or remove it")
    text, report = import_recipe(file, system=system, rows=rows, processes=processes)
    if out is not None:
        try:
            out.write_text(text, "utf-8")
        except OSError as error:
            raise RecipeError(f"cannot write the recipe: {error.strerror}", where=str(out)) from None
    problems = _checked_text(text, out) if check_it else []
    checked = {"problems": [asdict(p) for p in problems]} if check_it else {}
    emit(report | {"recipe": text, "out": None if out is None else str(out)} | checked, as_json)
    if not as_json:
        if out is None:
            typer.echo(text, nl=False)
        show_import(report, out)
        for p in problems:
            say(format_error(p.message, p.where, p.hint, p.level))
    if any(p.level == "error" for p in problems):
        raise typer.Exit(2)


def _checked_text(text: str, out: Path | None) -> list[Problem]:
    """Return the problems of an imported recipe. `out`: file of the recipe; None = it was not written to a file."""
    import tempfile
    from dataclasses import replace

    from vlmrl.preflight.recipe_alone import check_alone

    if out is not None:
        return check_alone(str(out), [])[0]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.toml"
        file.write_text(text, "utf-8")
        problems = check_alone(str(file), [])[0]
    return [replace(p, where=(p.where or "").replace(str(file), "the recipe")) for p in problems]
