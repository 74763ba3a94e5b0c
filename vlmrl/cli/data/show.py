"""`vlmrl data show`: show the splits of a dataset and some of its rows."""

from __future__ import annotations

from pathlib import Path

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit
from vlmrl.cli.show.dataset_rows import row_fields, show_rows


def show(
    dataset: options.Dataset,
    split: str | None = typer.Option(None, help="Split of the rows; default: the first split."),
    n: int = typer.Option(5, "--n", "-n", min=0, help="Number of rows to show."),
    task: options.PromptTask = None,
    save: Path | None = typer.Option(None, help="Folder to write the images of these rows to, as PNG."),
    as_json: options.Json = False,
) -> None:
    """Show the splits, facts and some rows of a dataset.

    The rows are shown with their prompts.

    Example: vlmrl data show data/digits --split test --n 3
    """
    from vlmrl.data.dataset import require_split
    from vlmrl.data.open_dataset import open_dataset
    from vlmrl.recipe.schema import Data
    from vlmrl.tasks import task_of

    opened = open_dataset(Data(path=dataset))
    split = split or next(iter(opened.splits))
    require_split(opened, split)
    count = min(n, opened.splits[split])
    chosen_task = task_of(opened, task) if count else None
    rows = [row_fields(opened, opened.rows(split)[index], chosen_task, save) for index in range(count)]
    facts = {"name": opened.name, "path": opened.path, "task": opened.info.get("task"), "splits": dict(opened.splits)}
    facts |= {"fingerprint": opened.fingerprint, "notes": list(opened.notes)}
    if not as_json:
        show_rows(opened, facts, rows)
    emit({**facts, "split": split, "rows": rows}, as_json)
