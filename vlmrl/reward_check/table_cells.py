"""Access to the cells of a table's chunk by column, with one interface for all kinds of files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vlmrl.data.table_files import TextRow, parsed_row
from vlmrl.data.table_values import UNREADABLE, plain, python_rows, unreadable_cell


class Cells(Protocol):
    """Chunk of a table with N rows.

    Attributes:
        places: line number (text file) or row number (Parquet) of each row.
        bad: index of a row that cannot be read -> reason.
    """

    @property
    def places(self) -> Sequence[int]: ...

    @property
    def bad(self) -> Mapping[int, str]: ...

    def column(self, name: str) -> list[Any]:
        """Return the [N] cells of a column; None where a row lacks the column."""
        ...

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        """Return for each of the [N] rows the cells of all columns except `taken`, as JSON values."""
        ...

    def row(self, index: int) -> Mapping[str, Any]:
        """Return one row as column -> cell."""
        ...


class ArrowCells:
    """Rows of an Arrow batch."""

    def __init__(self, batch: Any, place: int) -> None:
        self._batch = batch
        self.places = range(place, place + batch.num_rows)
        self.bad: dict[int, str] = {}

    def column(self, name: str) -> list[Any]:
        """Return the cells. Raises: DataError that names column and row of a value that Python cannot represent."""
        column = self._batch.column(name)
        if str(column.type) not in ("string", "large_string"):
            try:
                return column.to_pylist()
            except UNREADABLE as error:
                raise unreadable_cell(self._batch.select([name]), self._place) from error
        # Rows with equal texts, such as the truth of a group, share one Python object.
        coded = column.dictionary_encode() if name not in _LONG else column
        if not hasattr(coded, "dictionary") or len(coded.dictionary) * 2 > len(column):
            return column.to_pylist()
        # None is appended as the last word, for empty cells.
        words = [*coded.dictionary.to_pylist(), None]
        return [words[i] for i in coded.indices.fill_null(len(words) - 1).to_pylist()]

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        names = [name for name in self._batch.schema.names if name not in taken]
        if not names:
            return [{}] * self._batch.num_rows
        columns = [self.column(name) for name in names]
        return [{n: clean(v) for n, v in zip(names, row, strict=True)} for row in zip(*columns, strict=True)]

    def row(self, index: int) -> Mapping[str, Any]:
        return python_rows(self._batch.slice(index, 1), lambda _: self._place(index))[0]

    def _place(self, index: int) -> str:
        return f"row {self.places[index]}"


class RowCells:
    """Rows of a text file with their line numbers; see `text_rows`."""

    def __init__(self, rows: Sequence[tuple[int, TextRow]]) -> None:
        self.places = [place for place, _ in rows]
        parsed = [parsed_row(row) for _, row in rows]
        self.bad = {i: row for i, row in enumerate(parsed) if isinstance(row, str)}
        self._rows: list[Mapping[str, Any]] = [{} if isinstance(row, str) else row for row in parsed]

    def column(self, name: str) -> list[Any]:
        return [row.get(name) for row in self._rows]

    def others(self, taken: set[str]) -> list[Mapping[str, Any]]:
        return [{n: clean(v) for n, v in row.items() if n not in taken} for row in self._rows]

    def row(self, index: int) -> Mapping[str, Any]:
        return self._rows[index]


_LONG = ("response", "completion", "output")
"""Columns whose texts hardly ever repeat: sharing equal texts would cost more time than it saves memory."""


def clean(value: Any) -> Any:
    """Return a cell as a JSON value."""
    return value if value is None or isinstance(value, (str, int, bool)) else plain(value)
