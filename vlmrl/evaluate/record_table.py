"""Records of graded responses as Parquet, one row per response."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.json_text import parse_json
from vlmrl.store.evaluated_rows import SCHEMA
from vlmrl.store.secrets.redact import hide_known, redact_text, redact_value
from vlmrl.visible import encodable

Record = Mapping[str, Any]
COLUMNS: Mapping[str, str] = {
    "prompt_id": "string",
    "sample": "int32",
    "seed": "int64",
    "source": "string",
    "task": "string",
    "truth": "string",
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
"""Columns of the rows of an evaluation -> their Arrow types; "list" is a list of images."""
JSON_COLUMNS = ("truth", "parts")
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
    table = _table(records, names).replace_schema_metadata({**_metadata(), **(facts or {})})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def write_records(path: Path, chunks: Iterable[Sequence[Record]], names: Sequence[str]) -> None:
    """Write records to a new Parquet file, one row group per chunk; only one chunk is in memory at a time.

    Args:
        names: the outcomes of all records, in the order of their columns.
    Raises: StoreError when it cannot be written.
    """
    import pyarrow.parquet as pq

    try:
        with pq.ParquetWriter(path, _schema(names), compression="zstd") as writer:
            for chunk in chunks:
                writer.write_table(_table(chunk, names).cast(_schema(names)))
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror or error}", where=str(path)) from error


def read_records(path: Path) -> tuple[list[dict[str, Any]], Mapping[bytes, bytes]]:
    """Return the records of a file, and its metadata. Raises: StoreError when it is missing or damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
        return [_record(row) for row in table.to_pylist()], table.schema.metadata or {}
    except (OSError, pa.ArrowException, KeyError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(f"the evaluation's rows cannot be read: {reason}", where=str(path)) from error


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    outcome = {k.removeprefix(OUTCOME): v for k, v in row.items() if k.startswith(OUTCOME)}
    plain = {k: v for k, v in row.items() if not k.startswith(OUTCOME)}
    plain |= {k: parse_json(plain[k]) for k in JSON_COLUMNS}
    plain |= {"detail": parse_json(plain.get("detail") or "null"), "artifacts": plain.get("artifacts") or []}
    return plain | {"outcome": outcome} | outcome


def _metadata() -> dict[str, str]:
    return {"vlmrl.schema": str(SCHEMA)}


def _kinds() -> dict[str, Any]:
    import pyarrow as pa

    media = [("sha256", pa.string()), ("width", pa.int32()), ("height", pa.int32()), ("kind", pa.string())]
    lists = {"images": pa.list_(pa.struct(media)), "artifacts": pa.list_(pa.struct([("name", pa.string()), *media]))}
    return {name: lists[name] if kind == "list" else pa.type_for_alias(kind) for name, kind in COLUMNS.items()}


def _schema(names: Sequence[str]) -> Any:
    import pyarrow as pa

    return pa.schema([*_kinds().items(), *((OUTCOME + name, pa.float64()) for name in names)], metadata=_metadata())


def _table(records: Sequence[Record], names: Sequence[str]) -> Any:
    import pyarrow as pa

    columns = {name: pa.array([_cell(name, row.get(name)) for row in records], kind) for name, kind in _kinds().items()}
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
