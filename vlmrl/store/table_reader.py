"""THE reader of Parquet files, which may come from anybody: it alone opens them, and it reports their damage in words.

It checks types, missing values and JSON texts, so that code that reads a column may rely on its type. Each user names
the beginning of its message and the class of its error. Text tables are read by data/table_files: Arrow cannot hold
integers of any size and cells of mixed types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError, VlmrlError
from vlmrl.redaction.redact import first_line
from vlmrl.untrusted import file_problem, parse_json

JSON_COLUMNS = ("truth", "columns", "parts", "detail", "turns", "measured")
"""Columns of rollouts and evaluations with a JSON object as text."""
MAY_BE_NULL = ("version", "seen_width", "seen_height")
"""Fields of a segment or an image that may be null."""
ADDED_FIELDS = {*MAY_BE_NULL, "author", "num_images"}
"""Fields that files of an earlier version lack."""
BUFFER_BYTES = 1 << 20
"""Bytes of a column that are read at a time. Without this limit, a whole column of a row group is read."""
_MEDIA = "sha256:string width:int32 height:int32 kind:string"
_STRUCTS = {
    "images": f"{_MEDIA} seen_width:int32 seen_height:int32",
    "artifacts": f"name:string {_MEDIA}",
    "segments": "role:string start:int32 end:int32 trained:bool sampled:bool author:string version:int64 "
    "num_images:int32",
}
"""Kind of a list of structs -> its fields."""


def arrow_fields(words: str) -> list[tuple[str, Any]]:
    """Return (name, Arrow type) of words `name:type`; `[type]` is a list, and `images` a list of images."""
    import pyarrow as pa

    def kind(name: str) -> Any:
        if name in _STRUCTS:
            return pa.list_(pa.struct(arrow_fields(_STRUCTS[name])))
        return pa.list_(pa.type_for_alias(name[1:-1])) if name.startswith("[") else pa.type_for_alias(name)

    return [(name, kind(of)) for name, _, of in (word.partition(":") for word in words.split())]


@contextmanager
def damage_told(
    path: Path | str, what: str, error_class: type[VlmrlError] = StoreError, hint: str | None = None
) -> Iterator[None]:
    """Context manager: read a file; an error of Arrow or of a wrong value becomes an error `what: reason`.

    Raises: an error of the class.
    """
    import pyarrow as pa

    try:
        if problem := file_problem(Path(path)):
            raise OSError(f"it {problem}")
        yield
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise error_class(f"{what}: {first_line(error)}", where=str(path), hint=hint) from error


@contextmanager
def open_parquet(
    path: Path | str,
    what: str,
    error_class: type[VlmrlError] = StoreError,
    *,
    hint: str | None = None,
    repeated: Sequence[str] = (),
) -> Iterator[Any]:
    """Context manager: open a file of pyarrow.parquet; damage found while it is open becomes an error (`damage_told`).

    Args:
        repeated: columns to read dictionary-encoded, those that the file lacks left out.
    """
    import pyarrow.parquet as pq

    with damage_told(path, what, error_class, hint):
        encoded = sorted({*repeated} & {*pq.read_schema(path).names}) if repeated else []
        with pq.ParquetFile(path, read_dictionary=encoded, pre_buffer=False, buffer_size=BUFFER_BYTES) as file:
            yield file


def file_batches(file: Any, rows: int, columns: Sequence[str], group: int | None = None) -> Iterator[Any]:
    """Yield the batches of an open file, of at most `rows` rows.

    Args:
        columns: columns to read; those that the file lacks are left out.
        group: number of the only row group to read; None = all.
    """
    names = [name for name in columns if name in file.schema_arrow.names]
    return file.iter_batches(rows, row_groups=None if group is None else [group], columns=names, use_threads=False)


def group_rows(file: Any) -> list[int]:
    """Return the number of rows in each row group of an open file."""
    return [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]


def schema_number(file: Any) -> str:
    """Return the text of vlmrl's schema number in the metadata of an open file; "" if there is none."""
    return (file.schema_arrow.metadata or {}).get(b"vlmrl.schema", b"").decode("ascii", "replace")


def known_columns(path: Path | str) -> tuple[Sequence[str], Mapping[bytes, bytes]]:
    """Return the columns and the metadata of a file; nothing if it cannot be read: its reader says what is wrong."""
    try:
        with open_parquet(path, "unreadable") as file:
            return file.schema_arrow.names, file.schema_arrow.metadata or {}
    except StoreError:
        return (), {}


def check_values(table: Any, expected: Any) -> None:
    """Check a table or batch that was read from a file.

    Args:
        expected: Arrow schema. Columns that it lacks are not checked; a column need not be in the table.
    Raises: ValueError for another type, a null where none may be, or a text that is not a JSON object.
    """
    for field in (expected.field(name) for name in expected.names if name in table.schema.names):
        column = table.column(field.name)
        if not _fits(column.type, field.type):
            raise ValueError(f"the column `{field.name}` has values of the type {column.type}, not {field.type}")
        chunks = getattr(column, "chunks", [column])
        if hole := next(filter(None, (_hole(chunk, field.name, field.nullable) for chunk in chunks)), None):
            raise ValueError(f"a value of the column `{hole}` is missing")
        if field.name in JSON_COLUMNS:
            for text in column.unique().to_pylist():
                _check_object(field.name, text)


def _fits(kind: Any, expected: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_list(expected):
        return types.is_list(kind) and _fits(kind.value_type, expected.value_type)
    if not types.is_struct(expected):
        alike = (types.is_integer, types.is_floating)
        return kind == expected or any(is_kind(kind) and is_kind(expected) for is_kind in alike)
    fields = {field.name: field.type for field in kind} if types.is_struct(kind) else {}
    return all(_fits(fields[f.name], f.type) if f.name in fields else f.name in ADDED_FIELDS for f in expected)


def _hole(array: Any, name: str, nullable: bool) -> str | None:
    """Return the name of a column or field in which a value is null that must not be."""
    import pyarrow.types as types

    if array.null_count and not nullable:
        return name
    if types.is_list(array.type):
        return _hole(array.flatten(), name, False)
    fields = list(array.type) if types.is_struct(array.type) else []
    inner = (_hole(array.field(f.name), f"{name}.{f.name}", f.name in MAY_BE_NULL) for f in fields)
    return next(filter(None, inner), None)


def _check_object(name: str, text: str | None) -> None:
    value = {} if text is None else parse_json(text)
    if not isinstance(value, dict):
        raise ValueError(f"a value of the column `{name}` is not a JSON object")
    if name == "parts" and not all(part is None or isinstance(part, (int, float)) for part in value.values()):
        raise ValueError("a part of a score is not a number")
