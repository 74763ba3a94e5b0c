"""`vlmrl report`: write one HTML page about one or several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, tell

MOST_NAME = 150
"""Maximum number of characters of the runs' names in the default name of a file."""


def register(app: typer.Typer) -> None:
    app.command("report", short_help="Write one self-contained HTML page about runs.")(report)


def report(
    run: Annotated[list[str], typer.Argument(help="Runs (id, prefix, name, `last` or path); several are overlaid.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write; default: report.html in the run's folder; of several runs, report-RUN-RUN.html here.",
        ),
    ] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Write one HTML page about runs: curves, rollouts with their images, evaluations, recipe.

    The page is self-contained: it loads nothing.

    Example: vlmrl report last

    Example: vlmrl report digits-sft digits-im -o compare.html
    """
    from vlmrl.errors import StoreError
    from vlmrl.store.layout import REPORT, runs_root
    from vlmrl.store.runs import open_run
    from vlmrl.store.verify import shortened

    root = runs_root(runs)
    chosen_runs = list({r.id: r for r in (open_run(root, ref, trained=True) for ref in run)}.values())
    names = "-".join(r.manifest.name or r.id for r in chosen_runs)
    target = out or (Path(f"report-{names[:MOST_NAME]}.html") if len(chosen_runs) > 1 else chosen_runs[0].dir / REPORT)
    if target.is_dir():
        raise StoreError(f"{target} is a folder", where=str(target), hint="give a file: -o report.html")
    from vlmrl.report.page import write_report  # large: a wrong name is reported before

    damage = write_report(chosen_runs, target)
    size = target.stat().st_size
    emit({"report": str(target), "bytes": size, "runs": [r.id for r in chosen_runs], "damage": damage}, as_json)
    for run_id, lines in damage.items():
        say(f"warning: files of run {run_id} are missing or damaged; what they held is not on the page:")
        for line in shortened(lines, run_id):
            say(f"  {line}")
    (say if as_json else tell)(f"{target}  ({size / 2**20:.1f} MiB; open it in a browser)")
