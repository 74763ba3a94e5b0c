"""`vlmrl data`: show, check or export a dataset."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlmrl.cli import options
from vlmrl.cli.output import console, emit, say, shorten, tell
from vlmrl.untrusted import number_of, visible

if TYPE_CHECKING:
    from vlmrl.data.dataset import Dataset


def _opened(dataset: str, columns: str | None) -> Dataset:
    """Return the dataset that a command names. Raises: DataError for a recipe, with the tables that it names."""
    from vlmrl.data.open_dataset import open_dataset
    from vlmrl.recipe.schema import Data

    if dataset.endswith(".toml") and Path(dataset).is_file():
        from vlmrl.errors import DataError
        from vlmrl.recipe.load import load_recipe

        tables = ", ".join(data.path for data in load_recipe(dataset).recipe.data)
        raise DataError("this is a recipe, not a table", where=dataset, hint=f"name a table of it: {tables}")
    return open_dataset(Data(path=dataset, columns=options.parse_columns(columns)))


def doctor(
    dataset: options.Dataset,
    task: str | None = typer.Option(
        None, help="Task whose prompts are measured; default: the dataset's own task, unless that is a file."
    ),
    columns: options.DataColumns = None,
    max_prompt_tokens: int | None = typer.Option(None, min=1, help="Count the rows with more tokens than this."),
    workers: int | None = typer.Option(None, min=1, help="Number of processes; default: one per core."),
    as_json: options.Json = False,
) -> None:
    """Check what a dataset is worth.

    It reports lengths, copies across splits, known individuals, labels, and what guessing earns.

    Example: vlmrl data doctor data/fungi --max-prompt-tokens 2048
    """
    from vlmrl.cli.progress import PartCounter
    from vlmrl.data.doctor import visit
    from vlmrl.tasks import kind_of, task_of
    from vlmrl.tasks.dataset_assembly import prompt_texts, prompt_tokens

    opened = _opened(dataset, columns)
    chosen_task = task_of(opened, task)
    tokens, texts, part_counter = prompt_tokens(chosen_task), prompt_texts(chosen_task), PartCounter()
    report = visit(
        opened,
        tokens,
        labels_of=lambda row: (chosen_task.kind or kind_of(row.truth)).labels(row),
        texts=texts,
        max_prompt_tokens=max_prompt_tokens,
        workers=workers,
        progress=part_counter,
    )
    if not emit({"path": opened.path, "fingerprint": opened.fingerprint, "doctor": report}, as_json):
        show_doctor(report)


def export(
    dataset: options.Dataset,
    out: Path = typer.Argument(..., help="Folder for the Parquet files."),
    split: list[str] = typer.Option([], help="Only this split. May be repeated."),
    task: options.PromptTask = None,
    columns: options.DataColumns = None,
    sound: bool = typer.Option(False, "--sound", help="Leave out rows that cannot be used, and list the first ones."),
    as_json: options.Json = False,
) -> None:
    """Write a dataset as Hugging Face Parquet with images.

    Other programs can read it. The images are in a column of their own.

    Example: vlmrl data export data/digits digits-parquet
    """
    from rich.text import Text

    from vlmrl.data.dataset import require_split
    from vlmrl.tasks import task_of
    from vlmrl.tasks.dataset_assembly import export_dataset, first_bad

    opened = _opened(dataset, columns)
    for name in split:
        require_split(opened, name)
    chosen_task = task_of(opened, task)
    with console().status(Text(f"writing {out}")):
        rows = export_dataset(opened, chosen_task, out, splits=split or None, bad=(bad := [] if sound else None))
    if bad:
        say(f"left out: {number_of(len(bad), 'row')}:{first_bad(bad)}")
    if not emit({"path": str(out), "rows": rows}, as_json):
        for name, count in rows.items():
            tell(f"{out / name}.parquet  {count} rows")


MOST_CHARS = 600
"""Maximum number of characters that are shown of a row's truth, and of its columns."""


def show_rows(opened: Any, facts: dict[str, Any], split: str, rows: list[dict[str, Any]]) -> None:
    """Print facts about a dataset, and the first rows of a split."""
    tell(f"{opened.path}: task {facts['task']}, fingerprint {opened.fingerprint[:16]}")
    tell("splits: " + ", ".join(f"{name} {count}" for name, count in opened.splits.items()))
    if opened.info.get("description"):
        tell(str(opened.info["description"]))
    for note in opened.notes:
        tell(note)
    dropped = opened.info.get("dropped") or ()
    if count := (opened.info.get("counts") or {}).get("dropped", len(dropped)):
        tell(f"rows left out when the dataset was made: {count:,} (dropped.jsonl)")
    if rows:
        tell(f"\nrows of the split `{split}`: the first {len(rows):,} of {opened.splits[split]:,}")
    for row in rows:
        sizes = ", ".join(f"{image['width']}x{image['height']} {image['sha256'][:8]}" for image in row["images"])
        tell(f"\n{row['prompt_id']}  images: {sizes or 'none'}\n  truth: {_short_json(row['truth'])}")
        tell(f"  prompt: {row['prompt']}")
        # Without the sentences that the prompt shows; a word such as `red` may stand there for another reason.
        shown = [k for k, v in row["columns"].items() if isinstance(v, str) and " " in v and v in row["prompt"]]
        if others := {k: v for k, v in row["columns"].items() if k not in row["truth"] and k not in shown}:
            tell(f"  columns: {_short_json(others)}")
        for problem in row["problems"]:
            tell(f"  problem: {problem}")


def _short_json(value: Any) -> str:
    """Return a value as JSON in one line, cut at MOST_CHARS."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_CHARS else f"{shorten(text, MOST_CHARS)} ... ({len(text):,} characters)"


def row_fields(opened: Any, row: Any, task: Any, save: Path | None) -> dict[str, Any]:
    """Return a dataset row for `--json`. `save`: folder for its images; None = they are not written."""
    from vlmrl.tasks.dataset_assembly import row_messages

    turns = row_messages(task, row)
    images = []
    for media in row.media:
        image = opened.image(media)
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
            image.save(save / f"{media.sha256[:16]}.png")
        images.append(media.fields())
    prompt = "\n".join(f"[{turn.role}] {turn.content}" for turn in turns)
    return {
        "prompt_id": row.prompt_id,
        "truth": dict(row.truth),
        "images": images,
        "prompt": prompt,
        "columns": dict(row.columns),
        "problems": task.validate(row.truth),
    }


def show(
    dataset: options.Dataset,
    split: str | None = typer.Option(None, help="Split of the rows; default: the first split."),
    n: int = typer.Option(5, "--n", "-n", min=0, help="Number of rows to show."),
    task: options.PromptTask = None,
    columns: options.DataColumns = None,
    save: Path | None = typer.Option(None, help="Folder to write the images of these rows to, as PNG."),
    as_json: options.Json = False,
) -> None:
    """Show the splits, facts and some rows of a dataset.

    The rows are shown with their prompts.

    Example: vlmrl data show data/digits --split test --n 3
    """
    from vlmrl.data.dataset import require_split
    from vlmrl.tasks import task_of

    opened = _opened(dataset, columns)
    split = split or next(iter(opened.splits))
    require_split(opened, split)
    count = min(n, opened.splits[split])
    chosen_task = task_of(opened, task) if count else None
    rows = [row_fields(opened, opened.rows(split)[index], chosen_task, save) for index in range(count)]
    facts = {"name": opened.name, "path": opened.path, "task": opened.info.get("task"), "splits": dict(opened.splits)}
    facts |= {"fingerprint": opened.fingerprint, "notes": list(opened.notes)}
    if not emit({**facts, "split": split, "rows": rows}, as_json):
        show_rows(opened, facts, split, rows)


group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Show, check or export a dataset.")


def register(app: typer.Typer) -> None:
    group.command("show")(show)
    group.command("doctor")(doctor)
    group.command("export")(export)
    app.add_typer(group, name="data")


def show_doctor(report: Mapping[str, Any]) -> None:
    """Print the data doctor's checks as a table: check, verdict, finding."""
    from rich.table import Column, Table
    from rich.text import Text

    whole = [Column(name, no_wrap=True) for name in ("check", "verdict")]
    table = Table(*whole, Column("finding", overflow="fold"), title="data doctor")
    for check in report["checks"]:
        table.add_row(*(Text(visible(check[column])) for column in ("check", "verdict", "finding")))
    console(stderr=False).print(table)
    if note := report.get("note"):
        tell(note)
