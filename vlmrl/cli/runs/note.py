"""`vlmrl runs note`: show or change the note or the name of a run."""

from __future__ import annotations

from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell, warn_of_namesakes


def note(
    run: options.RunRef,
    text: Annotated[
        str | None, typer.Argument(help="New note; an empty text removes the note. Default: print the note.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="New name of the run; an empty name removes it.")] = None,
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Print or change a run's note, or rename the run. This also works while it trains.

    Example: vlmrl runs note last "lr 1e-4 diverges after step 80"
    """
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.manifest import edit, read_manifest

    run_dir = find(runs_root(runs), run)
    change = text is not None or name is not None
    manifest = edit(run_dir, note=text, name=name) if change else read_manifest(run_dir)
    emit({"run": manifest.id, "name": manifest.name, "note": manifest.note}, as_json)
    if not as_json:
        named = f" ({manifest.name})" if manifest.name else ""
        tell(f"{manifest.id}{named}: {manifest.note or 'no note'}")
    if name:
        warn_of_namesakes(run_dir, name)
