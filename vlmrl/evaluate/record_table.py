"""Records of graded responses as Parquet, one row per response."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.redaction.redact import hide_known, redact_text, redact_value
from vlmrl.store.evaluated_rows import SCHEMA
from vlmrl.visible import encodable

Record = Mapping[str, Any]
COLUMNS: Mapping[str, str] = {
    "prompt_id": "string",
    "sample": "int32",
    "seed": "int64",
    "source": "string",
    "task": "string",
    "truth": "string",
    "columns": "string",
    "prompt_text": "string",
    "text": "string",
    "finish": "string",
    "num_tokens": "int32",
    "score": "double",
    "parts": "string",
    "note": "string",
    "error": "string",
    "status": "string",
    "images": "list",
    "detail": "string",
    "artifacts": "list",
}
"""Columns of the rows of an evaluation -> their Arrow types; "list" is a list of images.

Evaluations of older versions lack `columns`, `prompt_text` and the sizes that the model saw.
"""
SHOWN_IMAGES = "shown_images"
"""Column with the images that the model saw, only of evaluations with changed images (`vlmrl eval --images`)."""
JSON_COLUMNS = ("truth", "parts", "columns")
REMARKS = ("note", "error")
"""Columns that no score is computed from."""
OUTCOME = "outcome/"
"""Prefix of the columns with the task's outcome, in the Parquet file."""


def outcome_names(records: Iterable[Record]) -> list[str]:
    """Return the names of the outcomes of records, in order of first appearance."""
    return list(dict.fromkeys(name for record in records for name in record["outcome"]))


def record_table(records: Sequence[Record], facts: Mapping[str, str] | None = None) -> bytes:
    """Return records as the content of a Parquet file. `facts`: for its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = outcome_names(records)
    table = _table(records, names, has_shown(records)).replace_schema_metadata({**_metadata(), **(facts or {})})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def has_shown(records: Iterable[Record]) -> bool:
    """Return whether the model saw other images than those of the rows."""
    return any(SHOWN_IMAGES in record for record in records)


def write_records(path: Path, chunks: Iterable[Sequence[Record]], names: Sequence[str], shown: bool) -> None:
    """Write records to a new Parquet file, one row group per chunk; only one chunk is in memory at a time.

    Args:
        names: the outcomes of all records, in the order of their columns.
        shown: whether any record has SHOWN_IMAGES.
    Raises: StoreError when it cannot be written.
    """
    import pyarrow.parquet as pq

    try:
        schema = _schema(names, shown)
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for chunk in chunks:
                writer.write_table(_table(chunk, names, shown).cast(schema))
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror or error}", where=str(path)) from error


def read_records(path: Path) -> tuple[list[dict[str, Any]], Mapping[bytes, bytes]]:
    """Return the records of a file, and its metadata. Raises: StoreError when it is missing or damaged."""
    import pyarrow.parquet as pq

    with _damage_told(path):
        table = pq.read_table(path)
        return [_record(row) for row in table.to_pylist()], table.schema.metadata or {}


def group_sizes(path: Path) -> list[int]:
    """Return the number of records in each row group of a file. Raises: StoreError when it is missing or damaged."""
    import pyarrow.parquet as pq

    with _damage_told(path):
        metadata = pq.read_metadata(path)
        return [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]


def read_group(path: Path, number: int) -> list[dict[str, Any]]:
    """Return the records of a row group. Raises: StoreError when the file is missing or damaged."""
    import pyarrow.parquet as pq

    with _damage_told(path), pq.ParquetFile(path) as file:
        return [_record(row) for row in file.read_row_group(number).to_pylist()]


@contextmanager
def _damage_told(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"the evaluation's rows cannot be read: {reason}", where=str(path)) from error


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    outcome = {k.removeprefix(OUTCOME): v for k, v in row.items() if k.startswith(OUTCOME)}
    plain = {k: v for k, v in row.items() if not k.startswith(OUTCOME)}
    plain |= {k: parse_json(plain.get(k) or "{}") for k in JSON_COLUMNS}
    plain |= {"detail": parse_json(plain.get("detail") or "null"), "artifacts": plain.get("artifacts") or []}
    return plain | {"outcome": outcome} | outcome


def _metadata() -> dict[str, str]:
    return {"vlmrl.schema": str(SCHEMA)}


def _kinds(shown: bool) -> dict[str, Any]:
    import pyarrow as pa

    media = [("sha256", pa.string()), ("width", pa.int32()), ("height", pa.int32()), ("kind", pa.string())]
    image = [*media, ("seen_width", pa.int32()), ("seen_height", pa.int32())]
    lists = {"images": pa.list_(pa.struct(image)), "artifacts": pa.list_(pa.struct([("name", pa.string()), *media]))}
    kinds = {name: lists[name] if kind == "list" else pa.type_for_alias(kind) for name, kind in COLUMNS.items()}
    return kinds | ({SHOWN_IMAGES: lists["images"]} if shown else {})


def _schema(names: Sequence[str], shown: bool) -> Any:
    import pyarrow as pa

    fields = [*_kinds(shown).items(), *((OUTCOME + name, pa.float64()) for name in names)]
    return pa.schema(fields, metadata=_metadata())


def _table(records: Sequence[Record], names: Sequence[str], shown: bool) -> Any:
    import pyarrow as pa

    columns = {}
    for name, kind in _kinds(shown).items():
        source = "images" if name == SHOWN_IMAGES else name  # the model saw these, unless the record says otherwise
        columns[name] = pa.array([_cell(name, row.get(name, row.get(source))) for row in records], kind)
    for name in names:
        columns[OUTCOME + name] = pa.array([row["outcome"].get(name) for row in records], pa.float64())
    return pa.table(columns)


def _cell(name: str, value: Any) -> Any:
    """Return a value as Parquet holds it: mappings as JSON text, half surrogate pairs as their escapes.

    Secrets are hidden as in rollouts.
    """
    if isinstance(value, Mapping):
        return hide_known(json.dumps(redact_value(dict(value)) if name == "detail" else dict(value)))
    if name == "artifacts" and value:
        return [{**artifact, "name": encodable(redact_text(artifact["name"]))} for artifact in value]
    if not isinstance(value, str):
        return value
    hide = redact_text if name in REMARKS else hide_known
    return encodable(hide(value))
