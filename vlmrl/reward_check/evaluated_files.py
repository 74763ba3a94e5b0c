"""Responses of an evaluation (`<run>/eval/<name>/rows.parquet`), read as rollouts.

A row of an evaluation has no tokens, no advantage and no step: its token ids are null, its advantage is NaN, and its
step is 0. Evaluations of older versions have no prompts and no columns of the dataset; these are empty then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import StoreError
from vlmrl.store.evaluated_rows import SCHEMA, UNREADABLE, rows_schema
from vlmrl.store.layout import EVAL, EVAL_ROWS, eval_dirs
from vlmrl.store.parquet import check_values, damage_told
from vlmrl.store.rollouts import arrow_schema, count_rows, read_batches

if TYPE_CHECKING:
    import pyarrow as pa

NEEDED = (
    *("source", "task", "prompt_id", "sample", "truth", "text", "finish", "num_tokens", "parts", "score"),
    *("note", "error", "status", "images"),
)
"""Columns that the rows of every evaluation have."""
DEFAULTS = {"columns": "{}", "prompt_text": ""}
"""Columns that older versions lack, with their values for such files."""


def is_evaluated(path: Path) -> bool:
    """Return whether a Parquet file has the columns of an evaluation's rows, and not those of rollouts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        names = pq.read_schema(path).names
    except (OSError, pa.ArrowException):
        return False  # the reader of rollouts says what is wrong
    return "segments" not in names and {"num_tokens", *NEEDED} <= {*names}


def evaluation_of(path: Path) -> str:
    """Return the name of the evaluation that a file of rows belongs to; "" for a file outside a run."""
    return path.parent.name if path.name == EVAL_ROWS and path.parent.parent.name == EVAL else ""


def run_dir_of(path: Path) -> Path:
    """Return the folder of the run that a file of responses would belong to: of an evaluation's rows, or rollouts."""
    return path.parent.parent.parent if evaluation_of(path) else path.parent.parent


def evaluated_files(run_dir: Path) -> list[Path]:
    """Return the rows of all evaluations of a run, by name."""
    return [folder / EVAL_ROWS for folder in eval_dirs(run_dir)]


def count_saved(path: Path) -> int:
    """Return the number of responses in a file of rollouts or of an evaluation. Raises: StoreError."""
    if not is_evaluated(path):
        return count_rows(path)
    import pyarrow.parquet as pq

    return pq.read_metadata(path).num_rows


def read_saved(path: Path, columns: Sequence[str], *, rows: int, repeated: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield a file of rollouts or of an evaluation in batches with columns of rollouts; see `read_batches`."""
    if is_evaluated(path):
        return _evaluated_batches(path, columns, rows, repeated)
    return read_batches(path, columns, rows=rows, repeated=repeated)


def _evaluated_batches(
    path: Path, columns: Sequence[str], rows: int, repeated: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    expected = rows_schema((), shown=True)
    numbers: dict[str, int] = {}
    with damage_told(path, UNREADABLE), pq.ParquetFile(path, pre_buffer=False) as file:
        number = (file.schema_arrow.metadata or {}).get(b"vlmrl.schema", b"").decode("ascii", "replace")
        if number != str(SCHEMA):
            message = f"this evaluation has schema {number!r}; this vlmrl reads {SCHEMA}"
            raise StoreError(message, where=str(path), hint="upgrade vlmrl")
        stored = [name for name in (*NEEDED, *DEFAULTS) if name in file.schema_arrow.names]
        for batch in file.iter_batches(batch_size=rows, columns=stored, use_threads=False):
            check_values(batch, expected)
            given = _as_rollouts(batch, numbers)
            arrays = [given[name].dictionary_encode() if name in repeated else given[name] for name in columns]
            yield pa.record_batch(arrays, names=list(columns))


def _as_rollouts(batch: pa.RecordBatch, numbers: dict[str, int]) -> dict[str, Any]:
    """Return column of rollouts -> its values for rows of an evaluation.

    Args:
        numbers: prompt id -> number of its group in the file; new ids are added.
    """
    import pyarrow as pa

    schema, size = arrow_schema(), batch.num_rows
    columns: dict[str, Any] = {name: batch.column(name) for name in batch.schema.names}

    def add(name: str, values: Any) -> None:
        columns[name] = pa.array(values, schema.field(name).type)

    for name, default in DEFAULTS.items():
        if name in columns:
            columns[name] = columns[name].fill_null(default)
        else:
            add(name, [default] * size)
    ids = batch.column("prompt_id").to_pylist()
    add("group", [numbers.setdefault(one, len(numbers)) for one in ids])
    add("step", [0] * size)
    add("advantage", [float("nan")] * size)
    add("token_ids", [None] * size)
    add("turns", [None] * size)
    add("num_row_images", batch.column("images").value_lengths().fill_null(0))
    lengths = batch.column("num_tokens").fill_null(0).to_pylist()
    whole = {"role": "assistant", "start": 0, "trained": False, "sampled": True, "author": "policy", "num_images": 0}
    add("segments", [[{**whole, "version": None, "end": length}] for length in lengths])
    columns["score"] = batch.column("score").fill_null(float("nan"))
    return columns
