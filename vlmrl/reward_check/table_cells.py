"""The cells of a piece of a table, column by column, whatever the file was."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vlmrl.data.columns import plain
from vlmrl.data.unreadable import unreadable_cell
from vlmrl.json_text import parse_json


class Cells(Protocol):
    """A piece of a table. N rows.

    Attributes:
        places: line or row of each in its file.    bad: rows that are none -> why.
    """

    @property
    def places(self) -> Sequence[int]: ...

    @property
    def bad(self) -> Mapping[int, str]: ...

    def column(self, name: str) -> list[Any]:
        """[N] the cells of a column; None where a row has none."""
        ...

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        """[N] the cells of all columns but the taken ones, as JSON values."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """One row by column."""
        ...


class ArrowCells:
    """The rows of an Arrow batch."""

    def __init__(self, batch: Any, place: int) -> None:
        self._batch = batch
        self.places = range(place, place + batch.num_rows)
        self.bad: dict[int, str] = {}

    def column(self, name: str) -> list[Any]:
        """Return the cells. Raises: DataError with column and row for a value that Python cannot hold."""
        column = self._batch.column(name)
        if str(column.type) not in ("string", "large_string"):
            try:
                return column.to_pylist()
            except (ValueError, OverflowError, KeyError) as error:
                raise unreadable_cell(self._batch.select([name]), [f"row {n}" for n in self.places]) from error
        # A text that repeats, such as the truth of a group, is made a Python object once.
        coded = column.dictionary_encode() if name not in _LONG else column
        if not hasattr(coded, "dictionary") or len(coded.dictionary) * 2 > len(column):
            return column.to_pylist()
        words = [*coded.dictionary.to_pylist(), None]
        return [words[i] for i in coded.indices.fill_null(len(words) - 1).to_pylist()]

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        names = [name for name in self._batch.schema.names if name not in taken]
        if not names:
            return [{}] * self._batch.num_rows
        columns = [self.column(name) for name in names]
        return [{n: clean(v) for n, v in zip(names, row, strict=True)} for row in zip(*columns, strict=True)]

    def row(self, index: int) -> Mapping[str, Any]:
        return self._batch.slice(index, 1).to_pylist()[0]


class RowCells:
    """Rows of a text file: each a mapping, the bytes of a JSON line, or a text that says why it is no row."""

    def __init__(self, rows: Sequence[tuple[int, Any]]) -> None:
        self.places = [place for place, _ in rows]
        read = [json_row(row) if isinstance(row, bytes) else row for _, row in rows]
        self.bad = {i: row for i, row in enumerate(read) if isinstance(row, str)}
        self._rows: list[Mapping[str, Any]] = [{} if isinstance(row, str) else row for row in read]

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        return [{n: clean(v) for n, v in row.items() if n not in taken} for row in self._rows]

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]


_LONG = ("response", "completion", "output")
"""Columns of texts that hardly repeat: looking for repeats would cost more than it saves."""


def json_row(line: bytes) -> dict[str, Any] | str:
    """A line of JSONL as a row, or why it is none."""
    try:
        row = parse_json(line.removeprefix(b"\xef\xbb\xbf"), unique_keys=True)
    except ValueError as error:
        return f"not JSON: {error}"
    return row if isinstance(row, dict) else f"a row is {show(row)}, not an object"


def text_of(value: Any) -> str | None:
    """A cell as text: itself, or the last turn of a chat; None for all else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        content = value[-1].get("content")
        return content if isinstance(content, str) else None
    return None


def number_of(value: Any) -> float:
    """A cell as a number; NaN for what is none."""
    try:
        number = float(value) if isinstance(value, (int, float, str)) else math.nan
    except (ValueError, OverflowError):
        return math.nan
    return number if math.isfinite(number) else math.nan


def clean(value: Any) -> Any:
    """A cell as a JSON value."""
    return value if value is None or isinstance(value, (str, int, bool)) else plain(value)


def show(value: Any) -> str:
    """A value in a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
