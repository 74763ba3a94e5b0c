"""Scores as a table for `--out`: one row per response, in the order of the input."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import redact_said, redact_text
from vlmrl.reward_check.response_columns import ResponseColumns
from vlmrl.reward_check.scores import Scores
from vlmrl.store.files import write_atomic
from vlmrl.untrusted import encodable

SUFFIXES = (".parquet", ".jsonl", ".csv")
TAKEN = ("row", "score", "note")
PIECE_ROWS = 1 << 16


def check_out(path: Path) -> None:
    """Check that scores can be written to `path`, before the scoring begins. Raises: StoreError if they cannot."""
    if path.suffix.lower() not in SUFFIXES:
        raise StoreError(f"--out {path} has an unknown ending", hint=f"endings: {', '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise StoreError(f"--out {path}: there is no folder {path.parent}", hint="create it first")


def write_scores(path: Path, facts: ResponseColumns, scores: Scores) -> None:
    """Write the scores as a table, atomically.

    The columns are `row` (index in the input, from 0), `score`, one column per part, and `note`. If the reward failed
    on a row, the row's score and parts are empty and its note is `failed: ...`. If a part has the name of another
    column, its column is called `part_NAME`. Secrets in notes, errors and names of parts are hidden.

    Raises: StoreError if the file cannot be written.
    """
    writers = {".parquet": _parquet, ".jsonl": _jsonl, ".csv": _csv}
    write_atomic(path, writers[path.suffix.lower()](_table(facts, scores)))


def _table(facts: ResponseColumns, scores: Scores) -> Any:
    import pyarrow as pa

    said = (*scores.notes.words, *(f"failed: {error}" for error in scores.errors.words))
    words = [encodable(redact_text(w)) for w in said]
    codes = np.where(scores.failed_N, scores.errors.codes_N + len(scores.notes.words), scores.notes.codes_N)
    notes = pa.DictionaryArray.from_arrays(pa.array(np.maximum(codes, 0)), pa.array(words or [""], pa.string()))
    columns: dict[str, Any] = {"row": pa.array(facts.rows_N), "score": pa.array(scores.values_N, from_pandas=True)}
    for name, column in scores.parts.items():
        columns[encodable(redact_said(f"part_{name}" if name in TAKEN else name))] = pa.array(column, from_pandas=True)
    return pa.table({**columns, "note": notes})


def _parquet(table: Any) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    plain = table.set_column(table.num_columns - 1, "note", table["note"].cast(pa.string()))
    pq.write_table(plain, sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def _jsonl(table: Any) -> bytes:
    lines: list[bytes] = []
    for row in _rows(table):
        lines.append(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace"))
    return b"\n".join([*lines, b""])


def _csv(table: Any) -> bytes:
    import csv

    sink = io.StringIO(newline="")
    writer = csv.writer(sink)
    writer.writerow(table.column_names)
    writer.writerows(row.values() for row in _rows(table))
    return sink.getvalue().encode("utf-8", "backslashreplace")


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    for batch in table.to_batches(PIECE_ROWS):
        yield from batch.to_pylist()


def finite(value: Any) -> Any:
    """Return a report as strict JSON values: NaN and infinities become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return value
