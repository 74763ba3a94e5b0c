"""Export of a dataset as Hugging Face Parquet: images as bytes, the prompt as messages, truth and columns."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vlmrl.data.dataset import Dataset
from vlmrl.data.measurements import estimate_text_tokens
from vlmrl.errors import DataError
from vlmrl.tasks.base import Task
from vlmrl.tasks.dataset_assembly import PromptLengths
from vlmrl.tasks.prompt_template import IMAGE, place_images, render_user
from vlmrl.types import Message, Row

BATCH_ROWS = 256
RESERVED = ("prompt_id", "prompt", "images", "truth")


def row_messages(task: Task, row: Row) -> tuple[Message, ...]:
    """Return the task's own prompt for a row, without a recipe's template."""
    if task.messages is not None:
        turns = task.messages(row)
    else:
        text = render_user(task.template, row, task.variables, where=task.template_file)
        turns = (Message("user", text),)
    return place_images(turns, row)[0]


def prompt_tokens(task: Task) -> Callable[[Row], int]:
    """Return a function: row -> estimated text tokens of its prompt. Rows with equal columns are rendered once."""
    lengths = PromptLengths(task)

    def of(row: Row) -> int:
        if task.messages is not None:
            return estimate_text_tokens(sum(len(turn.content.replace(IMAGE, "")) for turn in row_messages(task, row)))
        shown = {name: value for name, value in row.columns.items() if isinstance(value, str) and name in task.template}
        return lengths.of(shown, row.media)

    return of


def prompt_texts(task: Task) -> Callable[[Row], list[str]]:
    """Return a function: row -> the texts in it that a model reads as a prompt or learns in `vlmrl sft`."""

    def of(row: Row) -> list[str]:
        if task.messages is not None:
            texts = [turn.content for turn in row_messages(task, row)]
        else:
            texts = [value for name, value in row.columns.items() if isinstance(value, str) and name in task.template]
        response = row.columns.get("response")
        return [text.replace(IMAGE, " ") for text in (*texts, *([response] if isinstance(response, str) else []))]

    return of


def export_dataset(dataset: Dataset, task: Task, out: Path, *, splits: list[str] | None = None) -> dict[str, int]:
    """Write `<split>.parquet` for `datasets.load_dataset(out)`: prompt_id, prompt, images, truth (JSON text), columns.

    Args:
        out: folder to write to; an existing file of the same name is an error.
        splits: the splits to write; default: all.
    Returns: split -> number of rows.
    Raises: DataError when a file exists already or a row cannot be read.
    """
    chosen = list(dataset.splits) if splits is None else splits
    taken = [split for split in chosen if (out / f"{split}.parquet").exists()]
    if taken:
        raise DataError(f"{out / taken[0]}.parquet exists; nothing was written", hint="give another folder")
    out.mkdir(parents=True, exist_ok=True)
    return {split: _export_split(dataset, task, split, out / f"{split}.parquet") for split in chosen}


def _export_split(dataset: Dataset, task: Task, split: str, path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    part = path.with_name(f".{path.name}.{os.getpid()}")
    rows = dataset.rows(split)
    names = sorted(
        {name for index in range(min(len(rows), BATCH_ROWS)) for name in rows[index].columns} - set(RESERVED)
    )
    schema = _schema(names)
    try:
        with part.open("wb") as sink, pq.ParquetWriter(sink, schema, compression="zstd") as writer:
            for batch in _batches(dataset, task, split, names):
                writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            writer.close()
            sink.flush()
            os.fsync(sink.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return len(rows)


def _batches(dataset: Dataset, task: Task, split: str, names: list[str]) -> Iterator[list[dict[str, Any]]]:
    batch: list[dict[str, Any]] = []
    for row in dataset.rows(split):
        turns = [{"role": turn.role, "content": turn.content} for turn in row_messages(task, row)]
        images = [{"bytes": dataset.image_bytes(media), "path": None} for media in row.media]
        columns = {name: _text(row.columns.get(name)) for name in names}
        truth = json.dumps(dict(row.truth), ensure_ascii=False)
        batch.append({"prompt_id": row.prompt_id, "prompt": turns, "images": images, "truth": truth, **columns})
        if len(batch) == BATCH_ROWS:
            yield batch
            batch = []
    if batch:
        yield batch


def _text(value: Any) -> str | None:
    """Return a column's value as text. A value that is no text becomes JSON: the rows may hold values of many types."""
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _schema(names: list[str]) -> Any:
    import pyarrow as pa

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    text = {"dtype": "string", "_type": "Value"}
    features = {
        "prompt_id": text,
        "prompt": [{"role": text, "content": text}],
        "images": {"feature": {"_type": "Image"}, "_type": "List"},
        "truth": text,
        **dict.fromkeys(names, text),
    }
    fields = [
        ("prompt_id", pa.string()),
        ("prompt", pa.list_(turn)),
        ("images", pa.list_(image)),
        ("truth", pa.string()),
    ]
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    return pa.schema(fields + [(name, pa.string()) for name in names], metadata=metadata)
