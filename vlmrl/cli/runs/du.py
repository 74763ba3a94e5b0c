"""`vlmrl runs du`: show the disk space of runs."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, show_table
from vlmrl.cli.show.runs_tables import size_text


def du(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", help="One run; default: all of them.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Show how much disk space runs take, largest first.

    Example: vlmrl runs du
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find, run_ids
    from vlmrl.store.summary import disk_usage

    root = runs_root(runs)
    folders = [find(root, run)] if run else [root / run_id for run_id in run_ids(root)]
    sizes = sorted(({"run": f.name, **disk_usage(f)} for f in folders), key=lambda r: -r["total"])
    total = sum(r["total"] for r in sizes)
    emit({"root": str(root), "total": total, "runs": sizes}, as_json)
    if not as_json:
        parts = ("checkpoints", "rollouts", "media", "eval", "logs", "merged", "other", "total")
        show_table("", ("run", *parts), [(r["run"], *(size_text(r[p]) for p in parts)) for r in sizes])
        say(f"\n{size_text(total)} in {len(sizes)} run(s)")
