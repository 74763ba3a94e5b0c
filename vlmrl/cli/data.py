"""`vlmrl data`: look at a dataset, examine it, export it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer

from vlmrl.cli.output import JSON_HELP, console, emit, tell

LENGTHS_HELP = "Whose prompt the lengths are of; default: the dataset's own, unless that is a file."
TASK_HELP = "Whose prompt is shown, by name or as file.py:function; default: the dataset's own, unless that is a file."
data = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Look at a dataset, examine it, or export it.")
MOST_CHARS = 600
"""Of a truth or of the columns of a row that is shown."""
DATASET_HELP = "A prepared folder, a table file, a folder of tables, or hub:name."


def register(app: typer.Typer) -> None:
    app.add_typer(data, name="data")


@data.command("show")
def show(
    dataset: str = typer.Argument(..., help=DATASET_HELP),
    split: str | None = typer.Option(None, help="Default: the first split."),
    n: int = typer.Option(5, "--n", "-n", min=0, help="Rows to show."),
    task: str | None = typer.Option(None, help=TASK_HELP),
    save: Path | None = typer.Option(None, help="Folder to write the images of these rows to, as PNG."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """What is in a dataset: splits, facts, and some rows with their prompt.

    Example: vlmrl data show data/digits --split test --n 3
    """
    from vlmrl.data.dataset import open_dataset, require_split
    from vlmrl.recipe.schema import Data
    from vlmrl.tasks import task_of

    opened = open_dataset(Data(path=dataset))
    split = split or next(iter(opened.splits))
    require_split(opened, split)
    count = min(n, opened.splits[split])
    made = task_of(opened, task) if count else None
    rows = [_row_fields(opened, opened.rows(split)[index], made, save) for index in range(count)]
    facts = {"name": opened.name, "path": opened.path, "task": opened.info.get("task"), "splits": dict(opened.splits)}
    facts |= {"fingerprint": opened.fingerprint, "notes": list(opened.notes)}
    if not as_json:
        _show_rows(opened, facts, rows)
    emit({**facts, "split": split, "rows": rows}, as_json)


def _show_rows(opened: Any, facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Print what a dataset holds, and some of its rows."""
    tell(f"{opened.path}: task {facts['task']}, fingerprint {opened.fingerprint[:16]}")
    tell("splits: " + ", ".join(f"{name} {count}" for name, count in opened.splits.items()))
    if opened.info.get("description"):
        tell(str(opened.info["description"]))
    for note in opened.notes:
        tell(note)
    dropped = opened.info.get("dropped") or ()
    if count := (opened.info.get("counts") or {}).get("dropped", len(dropped)):
        tell(f"left out when it was made: {count:,} (dropped.jsonl)")
    for row in rows:
        sizes = ", ".join(f"{image['width']}x{image['height']} {image['sha256'][:8]}" for image in row["images"])
        tell(f"\n{row['prompt_id']}  images: {sizes or 'none'}\n  truth: {_short_json(row['truth'])}")
        tell(f"  prompt: {row['prompt']}")
        others = {k: v for k, v in row["columns"].items() if k not in row["truth"] and str(v) not in row["prompt"]}
        if others:
            tell(f"  columns: {_short_json(others)}")
        for problem in row["problems"]:
            tell(f"  not sound: {problem}")


def _short_json(value: Any) -> str:
    """Return a value as JSON in one line, cut at MOST_CHARS."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]} ... ({len(text):,} characters)"


def _row_fields(opened: Any, row: Any, task: Any, save: Path | None) -> dict[str, Any]:
    from vlmrl.tasks.export import row_messages

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


@data.command("doctor")
def doctor(
    dataset: str = typer.Argument(..., help=DATASET_HELP),
    task: str | None = typer.Option(None, help=LENGTHS_HELP),
    max_prompt_tokens: int | None = typer.Option(None, min=1, help="Count the rows over this many tokens."),
    workers: int | None = typer.Option(None, min=1, help="Processes; default: one a core."),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """What a dataset is worth: lengths, copies across splits, known individuals, labels and what guessing earns.

    Example: vlmrl data doctor data/fungi --max-prompt-tokens 2048
    """
    from vlmrl.cli.prep import show_doctor
    from vlmrl.cli.progress import PartCounter
    from vlmrl.data.dataset import open_dataset
    from vlmrl.data.dataset_visit import visit
    from vlmrl.recipe.schema import Data
    from vlmrl.tasks import kind_of, task_of
    from vlmrl.tasks.export import prompt_texts, prompt_tokens

    opened = open_dataset(Data(path=dataset))
    made = task_of(opened, task)
    tokens, texts, told = prompt_tokens(made), prompt_texts(made), PartCounter()
    report = visit(
        opened, tokens, labels_of=lambda row: (made.kind or kind_of(row.truth)).labels(row), texts=texts,
        max_prompt_tokens=max_prompt_tokens, workers=workers, progress=told,
    )  # fmt: skip
    if not as_json:
        show_doctor(report)
    emit({"path": opened.path, "fingerprint": opened.fingerprint, "doctor": report}, as_json)


@data.command("export")
def export(
    dataset: str = typer.Argument(..., help=DATASET_HELP),
    out: Path = typer.Argument(..., help="Folder for the Parquet files."),
    split: list[str] = typer.Option([], help="Only this split; may be repeated."),
    task: str | None = typer.Option(None, help=TASK_HELP),
    as_json: bool = typer.Option(False, "--json", help=JSON_HELP),
) -> None:
    """Write a dataset as Hugging Face Parquet with an images column, for other programs.

    Example: vlmrl data export data/digits digits-parquet
    """
    from rich.text import Text

    from vlmrl.data.dataset import open_dataset, require_split
    from vlmrl.recipe.schema import Data
    from vlmrl.tasks import task_of
    from vlmrl.tasks.export import export_dataset

    opened = open_dataset(Data(path=dataset))
    for name in split:
        require_split(opened, name)
    made = task_of(opened, task)
    with console().status(Text(f"writing {out}")):
        rows = export_dataset(opened, made, out, splits=split or None)
    for name, count in rows.items() if not as_json else ():
        tell(f"{out / name}.parquet  {count} rows")
    emit({"path": str(out), "rows": rows}, as_json)
