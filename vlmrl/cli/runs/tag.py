"""`vlmrl runs tag`: show, add or remove the tags of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell


def tag(
    run: options.RunRef,
    tags: Annotated[list[str] | None, typer.Argument(help="Tags to add.")] = None,
    remove: Annotated[list[str] | None, typer.Option("--remove", help="Tag to remove. May be repeated.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Add or remove a run's tags; without any, print them. This also works while it trains.

    Example: vlmrl runs tag last paper seed1 --remove draft
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.manifest import edit, read_manifest

    run_dir = find(runs_root(runs), run)
    change = bool(tags or remove)
    manifest = edit(run_dir, add=tags or (), drop=remove or ()) if change else read_manifest(run_dir)
    emit({"run": manifest.id, "tags": list(manifest.tags)}, as_json)
    if not as_json:
        tell(f"{manifest.id}: {', '.join(manifest.tags) or 'no tags'}")
