"""`vlmrl runs list`: list the runs in a folder, newest first."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, show_table
from vlmrl.cli.show.runs_tables import about_cell, best_cell, or_empty, run_line
from vlmrl.errors import StoreError


def list_(
    kind: Annotated[str | None, typer.Option(help="Only this kind: rl, sft, eval ...")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    status: Annotated[
        str | None, typer.Option(help="Only this status: running, done, failed, interrupted, killed, damaged.")
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Maximum number of runs, newest first; 0 = all.")] = 30,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """List runs, newest first.

    Example: vlmrl runs list --kind rl --tag paper --limit 10
    """
    from vlmrl.errors import unknown
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import list_runs, run_ids
    from vlmrl.store.manifest import STATUSES

    root = runs_root(runs)
    known = (*STATUSES, "damaged")
    if status is not None and status not in known:
        raise unknown("status", status, known, error=StoreError)
    total = len(run_ids(root))
    lines = [run_line(run) for run in list_runs(root, kind=kind, tag=tag, status=status, limit=limit)]
    emit({"root": str(root), "total": total, "runs": lines}, as_json)
    if as_json:
        return
    if not lines:
        filters = any(x is not None for x in (kind, tag, status))
        say(f"no runs in {root}" if not total or not filters else f"none of {total} runs in {root} matches")
        return
    rows = [
        (
            r["id"],
            r["name"] or "",
            r["kind"],
            r["status"],
            or_empty(r["step"]),
            best_cell(r["best"]),
            r["age"],
            about_cell(r),
        )
        for r in lines
    ]
    show_table("", ("run", "name", "kind", "status", "step", "best", "age", "about"), rows)
    if limit and len(lines) == limit and total > limit:
        say(f"\nthe newest {limit} of {total} runs; --limit 0 lists all")
