"""`vlmrl runs pack`: pack a run into one file, for another machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, say, tell
from vlmrl.cli.show.runs_tables import size_text
from vlmrl.errors import StoreError


def pack(
    run: options.RunRef,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="File to write; default: <run id>.tar.gz in this folder.")
    ] = None,
    checkpoints: Annotated[str, typer.Option(help="Checkpoints to include: none, last, all.")] = "none",
    runs: options.Runs = None,
    as_json: options.Json = False,
) -> None:
    """Pack a run into one self-contained file.

    The file has the run's record and every image that its rollouts name.

    Example: vlmrl runs pack last -o digits.tar.gz

    To read it on another machine: tar xf digits.tar.gz; vlmrl runs show ./<run id>
    """
    from vlmrl.data.run_images import run_images
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.pack import pack_run

    if checkpoints not in ("none", "last", "all"):
        raise StoreError(f"--checkpoints cannot be `{checkpoints}`", hint="one of: none, last, all")
    run_dir = find(runs_root(runs), run)
    images = run_images(run_dir)
    target = output or Path(f"{run_dir.resolve().name}.tar.gz")
    if target.is_dir():
        target = target / f"{run_dir.resolve().name}.tar.gz"
    packed = pack_run(run_dir, target, images, checkpoints=checkpoints)  # type: ignore[arg-type]
    result = {
        "archive": str(packed.path),
        "bytes": packed.bytes,
        "files": packed.num_files,
        "images": packed.num_images,
        "missing_images": list(packed.missing),
        "left_out": list(packed.left_out),
    }
    emit(result, as_json)
    if as_json:
        return
    tell(f"{packed.path}: {packed.num_files} files, {packed.num_images} images, {size_text(packed.bytes)}")
    if packed.left_out:
        say(f"left out: {', '.join(packed.left_out)} (--checkpoints last or all includes checkpoints)")
    if packed.missing:
        why = f": {'; '.join(images.notes)}" if images.notes else ""
        say(f"warning: {len(packed.missing)} image(s) that the rollouts name could not be found{why}")
