"""`vlmrl data export`: write a dataset as Parquet with images."""

from __future__ import annotations

from pathlib import Path

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit, tell


def export(
    dataset: options.Dataset,
    out: Path = typer.Argument(..., help="Folder for the Parquet files."),
    split: list[str] = typer.Option([], help="Only this split. May be repeated."),
    task: options.PromptTask = None,
    as_json: options.Json = False,
) -> None:
    """Write a dataset as Hugging Face Parquet with images.

    Other programs can read it. The images are in a column of their own.

    Example: vlmrl data export data/digits digits-parquet
    """
    from rich.text import Text

    from vlmrl.data.dataset import require_split
    from vlmrl.data.open_dataset import open_dataset
    from vlmrl.recipe.schema import Data
    from vlmrl.tasks import task_of
    from vlmrl.tasks.dataset_assembly import export_dataset

    opened = open_dataset(Data(path=dataset))
    for name in split:
        require_split(opened, name)
    chosen_task = task_of(opened, task)
    with console().status(Text(f"writing {out}")):
        rows = export_dataset(opened, chosen_task, out, splits=split or None)
    for name, count in rows.items() if not as_json else ():
        tell(f"{out / name}.parquet  {count} rows")
    emit({"path": str(out), "rows": rows}, as_json)
