"""Records of graded responses as Parquet, one row per response; coordinates of their boxes.

The declared coordinates stand beside others that might fit the truth better.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.redaction.redact import hide_known, redact_text, redact_value
from vlmrl.store.evaluated_rows import OUTCOME, SCHEMA, SHOWN_IMAGES, UNREADABLE, read_rows, rows_schema
from vlmrl.store.rollouts import seen_of
from vlmrl.store.table_reader import damage_told
from vlmrl.tasks.positions import MOST_FITTED
from vlmrl.tasks.source import Source
from vlmrl.types import Media, RewardInput
from vlmrl.untrusted import encodable, parse_json

Record = Mapping[str, Any]
JSON_COLUMNS = ("truth", "parts", "columns")
REMARKS = ("note", "error")
"""Columns that no score is computed from."""


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
        schema = rows_schema(names, shown=shown).with_metadata(_metadata())
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for chunk in chunks:
                writer.write_table(_table(chunk, names, shown).cast(schema))
    except OSError as error:
        raise StoreError(f"cannot write: {error.strerror or error}", where=str(path)) from error


def read_records(path: Path, group: int | None = None) -> tuple[list[dict[str, Any]], Mapping[bytes, bytes]]:
    """Return the records of a file, or of one row group, and its metadata.

    Raises: StoreError when it is missing or damaged.
    """
    table = read_rows(path, group=group)
    with damage_told(path, UNREADABLE):
        return [_record(row) for row in table.to_pylist()], table.schema.metadata or {}


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    outcome = {k.removeprefix(OUTCOME): v for k, v in row.items() if k.startswith(OUTCOME)}
    plain = {k: v for k, v in row.items() if not k.startswith(OUTCOME)}
    plain |= {k: parse_json(plain.get(k) or "{}") for k in JSON_COLUMNS}
    plain |= {k: parse_json(plain.get(k) or "null") for k in ("detail", "measured")}
    plain |= {"artifacts": plain.get("artifacts") or [], "turns": plain.get("turns"), "ending": plain.get("ending")}
    return plain | {"outcome": outcome} | outcome


def _metadata() -> dict[str, str]:
    return {"vlmrl.schema": str(SCHEMA)}


def _table(records: Sequence[Record], names: Sequence[str], shown: bool) -> Any:
    import pyarrow as pa

    columns = {}
    schema = rows_schema((), shown=shown)
    for name, kind in zip(schema.names, schema.types, strict=True):
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


def coordinates_of(source: Source, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how well responses fit the truth in each of the coordinates (`Fit.fields`), of the first `MOST_FITTED`.

    Args:
        rows: as `evaluate.run.make_records` makes them.
    Returns: {} for a task whose answers are no positions; {"problem": ...} if its reading of them failed.
    """
    if source.task.positions is None:
        return {}
    try:
        inputs = [input_of(row) for row in islice(rows, MOST_FITTED)]
        return source.task.positions(source.reward).fit(inputs).fields()
    except VlmrlError as error:  # the metrics of the evaluation do not depend on this
        return {"problem": str(error)}


def input_of(row: Mapping[str, Any]) -> RewardInput:
    """Return the reward's input for a row of an evaluation, without tokens, turns and pixels."""
    shown = row.get(SHOWN_IMAGES) or row["images"]
    return RewardInput(
        row["text"],
        row["truth"],
        row["columns"],
        finish=row["finish"],
        num_tokens=row["num_tokens"] or 0,
        prompt=row["prompt_text"],
        prompt_id=row["prompt_id"],
        sample=row["sample"],
        media=tuple(map(Media.of, row["images"])),
        seen_sizes=seen_of(shown),
    )


def coordinate_problems(summary: Mapping[str, Any]) -> list[str]:
    """Return in words that the boxes fit other coordinates clearly better, or that this is not known; else []."""
    positions = summary.get("positions") or {}
    if problem := positions.get("problem"):
        return [f"it is not known whether the boxes fit other coordinates: {problem}"]
    return [f"{positions['words']}; {positions['advice']}"] if positions.get("better") else []
