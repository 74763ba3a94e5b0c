"""Splitting of a table into pieces, which several processes read in parallel, a few rows at a time.

A piece is a row group of a Parquet file, a range of rows of an Arrow file, or some rows of a text file. No table is
held in memory as a whole, except JSON text while it is split into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmrl.data.dataset import INFO_FILE
from vlmrl.data.parallel_parts import write_lines
from vlmrl.data.table_files import (
    LINED,
    arrow_batches,
    find_tables,
    in_portions,
    kind_of_files,
    parquet_batches,
    parquet_columns,
    parquet_table,
    place_of,
    require_file,
    sound_rows,
)
from vlmrl.data.table_values import plain_at, python_rows
from vlmrl.errors import DataError
from vlmrl.store.table_reader import group_rows

PIECE_ROWS = 128
BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Consecutive rows of a split.

    Args:
        first: number of the piece's first row in the split, from 0.
        group: Parquet: number of the row group.
        skip: Arrow: number of rows of the file before the piece.
        numbers: text files: line of each row in the user's file; empty for JSON, because its rows have no line numbers.
    """

    split: str
    first: int
    rows: int
    kind: Literal["parquet", "arrow", "text"]
    path: str
    group: int = 0
    skip: int = 0
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowFiles:
    """Table of one or several splits, in pieces.

    Args:
        columns: column names of the first split.
        pieces: all rows of all splits, in order.
    """

    label: str
    columns: tuple[str, ...]
    pieces: tuple[TablePiece, ...]
    root: Path | None

    @property
    def splits(self) -> dict[str, int]:
        """Number of rows of each split."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            counts[piece.split] = counts.get(piece.split, 0) + piece.rows
        return counts

    def where(self, piece: TablePiece, index: int) -> str:
        """Return the place of row `index` of a piece, for messages: line in a text file, else split and row from 0."""
        if piece.numbers:
            return f"{Path(self.label).name}:{piece.numbers[index]}"
        return f"{piece.split} row {piece.first + index}"


@dataclass(frozen=True)
class OpenTable:
    """Table with the column of each role. Roles that it has no column for are not in `columns`."""

    files: RowFiles
    columns: Mapping[str, str]

    def rows(self, piece: TablePiece) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield number and cells by their roles of each row of a piece. Raises: DataError as `read_piece`."""
        for number, row in enumerate(read_piece(piece, list(self.columns.values()))):
            yield number, {role: row.get(column) for role, column in self.columns.items()}


def read_piece(piece: TablePiece, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a piece, in order. Raises: DataError when the file cannot be read."""
    if piece.kind == "text":
        yield from _spooled_rows(piece.path, columns)
        return
    first = piece.first
    if piece.kind == "parquet":
        batches = parquet_batches(piece.path, columns, BATCH_ROWS, piece.group)
    else:
        batches = _arrow_piece(piece, columns)
    for batch in batches:
        yield from python_rows(batch, lambda index, first=first: f"{piece.split} row {first + index}")
        first += batch.num_rows


def _spooled_rows(path: str, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    try:
        with open(path, encoding="ascii") as lines:
            for line in lines:
                row = json.loads(line)
                yield {name: row[name] for name in columns if name in row}
    except OSError as error:
        raise DataError(f"the table cannot be read: {error}", where=path) from error


def _arrow_piece(piece: TablePiece, columns: Sequence[str]) -> Iterator[Any]:
    """Yield the batches of a piece of an Arrow file."""
    skip, rows_left = piece.skip, piece.rows
    for batch in arrow_batches(piece.path):
        selected = batch.slice(skip, rows_left)
        skip = max(0, skip - batch.num_rows)
        rows_left -= selected.num_rows
        for start in range(0, selected.num_rows, BATCH_ROWS):
            small_batch = selected.slice(start, BATCH_ROWS)
            yield small_batch.select([name for name in columns if name in small_batch.schema.names])
        if rows_left == 0:
            return


@dataclass(frozen=True)
class Located:
    """Location of a table's rows, before they are split into pieces.

    Args:
        label: the table's path as the user wrote it, without the split.
        split: the only split to read; None = all.
        root: folder that image paths start from; None = image paths are refused.
        tables: split -> its files, or a dataset of the `datasets` library.
        state: JSON value with the state of the files; it is different after any change of the files.
    """

    label: str
    split: str | None
    root: Path | None
    tables: Mapping[str, Any]
    state: Any

    def columns(self) -> list[str]:
        """Return the columns of the first split, from its first file alone."""
        table = next(iter(self.tables.values()))
        if not isinstance(table, list):
            return list(table.column_names)
        if table[0].suffix.lower() == ".parquet":
            require_file(table[0])
            return parquet_columns(table[0])
        kind_of_files(table[:1])
        return list(dict.fromkeys(name for _, row in sound_rows(table[0]) for name in row))


def locate_rows(source: str, images_root: Path | None = None) -> Located:
    """Find the rows of a table.

    Args:
        source: a file, a folder of files, a folder of `save_to_disk`, or `hub:name[#config]`; `@split` at the end
            selects that split alone.
        images_root: folder that image paths start from; default: the folder of the table.
    Raises: DataError when nothing is at `source`, it has no such split, it is a dataset that `vlmrl prep` made, or
        `images_root` is not a folder.
    """
    label, split = split_spelling(source)
    root = images_root
    if not label.startswith("hub:"):
        place = Path(label)
        if (place / INFO_FILE).is_file():
            raise DataError(
                f"{label} is a dataset that `vlmrl prep` has made", hint="name its source, or train on it as it is"
            )
        root = images_root or (place if place.is_dir() else place.parent)
    tables = find_tables(label)
    if split is not None and split not in tables:
        raise DataError(f"no split `{split}` in {label}", hint=f"splits there: {', '.join(tables)}")
    if images_root is not None and not images_root.is_dir():
        raise DataError(f"{images_root} is not a folder", hint="name the folder that image paths start from")
    tables = {name: table for name, table in tables.items() if split in (None, name)}
    return Located(label, split, root, tables, {name: _state(table) for name, table in tables.items()})


def _state(table: Any) -> Any:
    if isinstance(table, list):
        return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in table]
    return table._fingerprint


def open_row_files(located: Located, work: Path) -> RowFiles:
    """Return the pieces of a table.

    Args:
        work: folder for the files into which text tables, and datasets without files of their own, are split.
    Raises: DataError when the table cannot be read or has no rows.
    """
    pieces: list[TablePiece] = []
    columns: list[str] = []
    for split, table in located.tables.items():
        if not isinstance(table, list):
            of_split, names = _dataset_pieces(split, table, work)
        elif kind_of_files(table) == ".parquet":
            of_split, names = _parquet_pieces(split, table)
        else:
            of_split, names = _text_pieces(split, table[0], work)
        pieces += of_split
        columns = columns or names
    if not pieces:
        raise DataError("the table has no rows", where=located.label)
    return RowFiles(located.label, tuple(columns), tuple(pieces), located.root)


def split_spelling(source: str) -> tuple[str, str | None]:
    """Return `path@split` as (path, split). The split is None if `source` as a whole is an existing path."""
    path, at, split = source.rpartition("@")
    if not at or not path or "/" in split or Path(source).exists():
        return source, None
    return path, split


def _parquet_pieces(split: str, files: Sequence[Path]) -> tuple[list[TablePiece], list[str]]:
    pieces: list[TablePiece] = []
    first = 0
    for path in files:
        with parquet_table(path) as file:
            groups = group_rows(file)
        for group, rows in enumerate(groups):
            if rows:
                pieces.append(TablePiece(split, first, rows, "parquet", str(path), group=group))
            first += rows
    return pieces, parquet_columns(files[0])


def _text_pieces(split: str, path: Path, work: Path) -> tuple[list[TablePiece], list[str]]:
    """Write a CSV, JSON or JSONL file as files of at most `PIECE_ROWS` rows, and check every row.

    Returns: (pieces, column names).
    """
    pieces: list[TablePiece] = []
    columns: dict[str, None] = {}
    has_lines = path.suffix.lower() in LINED
    for number, rows in enumerate(in_portions(sound_rows(path), PIECE_ROWS)):
        part = work / f"{split}-{number:05d}.text"
        write_lines(part, [plain_at(row, place_of(path, place)) for place, row in rows])
        for _, row in rows:
            columns |= dict.fromkeys(row)
        lines = tuple(place for place, _ in rows) if has_lines else ()
        pieces.append(TablePiece(split, number * PIECE_ROWS, len(rows), "text", str(part), numbers=lines))
    return pieces, list(columns)


def _dataset_pieces(split: str, part: Any, work: Path) -> tuple[list[TablePiece], list[str]]:
    files = [str(file["filename"]) for file in part.cache_files]
    counts = [sum(batch.num_rows for batch in arrow_batches(file)) for file in files]
    if not files or sum(counts) != part.num_rows:  # the dataset is in memory, or has only some rows of its files
        files, counts = [_spool(part, work / f"{split}.arrow")], [part.num_rows]
    pieces, first = [], 0
    for file, count in zip(files, counts, strict=True):
        for skip in range(0, count, PIECE_ROWS):
            rows = min(PIECE_ROWS, count - skip)
            pieces.append(TablePiece(split, first + skip, rows, "arrow", file, skip=skip))
        first += count
    return pieces, list(part.column_names)


def _spool(part: Any, path: Path) -> str:
    import pyarrow as pa

    with path.open("wb") as sink, pa.ipc.new_file(sink, part.data.table.schema) as writer:
        for batch in part.data.table.to_batches(max_chunksize=PIECE_ROWS):
            writer.write_batch(batch)
    return str(path)
