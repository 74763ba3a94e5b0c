"""Parquet files of a run, which may come from anybody. All readers check them here: types, missing values, JSON texts.

So code that reads a column may rely on its type, and a damaged file is one clear error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vlmrl.errors import StoreError
from vlmrl.redaction.redact import first_line
from vlmrl.untrusted import file_problem, parse_json

JSON_COLUMNS = ("truth", "columns", "parts", "detail", "turns")
"""Columns of rollouts and evaluations with a JSON object as text."""
MAY_BE_NULL = ("version", "seen_width", "seen_height")
"""Fields of a segment or an image that may be null."""
ADDED_FIELDS = {*MAY_BE_NULL, "author", "num_images"}
"""Fields that files of an earlier version lack."""


@contextmanager
def damage_told(path: Path, what: str) -> Iterator[None]:
    """Context manager: read a file; an error of Arrow or of a wrong value becomes a StoreError `what: reason`.

    Raises: StoreError.
    """
    import pyarrow as pa

    try:
        if problem := file_problem(path):
            raise OSError(f"it {problem}")
        yield
    except (OSError, pa.ArrowException, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise StoreError(f"{what}: {first_line(error)}", where=str(path)) from error


def check_values(table: Any, expected: Any) -> None:
    """Check a table or batch that was read from a file.

    Args:
        expected: Arrow schema. Columns that it lacks are not checked; a column need not be in the table.
    Raises: ValueError for another type, a null where none may be, or a text that is no JSON object.
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
        raise ValueError(f"a value of the column `{name}` is no JSON object")
    if name == "parts" and not all(part is None or isinstance(part, (int, float)) for part in value.values()):
        raise ValueError("a part of a score is no number")
