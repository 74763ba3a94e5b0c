"""`vlmrl runs rm`: remove whole runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, tell


def rm(
    names: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs: ids, unique prefixes of ids, or names.")],
    yes: Annotated[bool, typer.Option("--yes", help="Remove without a question.")] = False,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Remove whole runs, with their checkpoints, rollouts and evaluations.

    A run that is being written is not removed, and neither is one with a checkpoint that another run began with. Links
    in a run are removed, and what they lead to stays.

    Example: vlmrl runs rm first-try 20260718-101500-digits-3f2a --yes
    """
    from vlmrl.cli.show.runs_tables import size_text
    from vlmrl.store.layout import runs_root
    from vlmrl.store.removal import removable, remove_runs
    from vlmrl.store.summary import tree_bytes

    folders = removable(runs_root(runs), names)
    sizes = {folder.name: tree_bytes(folder) for folder in folders}
    lines = [f"{name} ({size_text(size)})" for name, size in sizes.items()]
    if not yes and sys.stdin.isatty() and not as_json:
        yes = typer.confirm(f"remove {', '.join(lines)}?", err=True)
    if yes:
        remove_runs(folders)
    emit({"removed" if yes else "would_remove": list(sizes), "bytes": sum(sizes.values())}, as_json)
    if not as_json:
        tell(f"{'removed' if yes else 'would remove'} {', '.join(lines)}: {size_text(sum(sizes.values()))} in all")
        if not yes:
            say("add --yes to remove them")
