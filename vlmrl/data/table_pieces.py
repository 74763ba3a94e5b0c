"""A table as pieces that several processes read at once, a few rows at a time: a row group of a Parquet file, a
stretch of an Arrow file, some lines of text. No table is ever in memory whole, except CSV and JSON text while it is
taken apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vlmrl.data.columns import plain
from vlmrl.data.dataset import INFO_FILE
from vlmrl.data.parallel_parts import write_lines
from vlmrl.data.tables import (
    RawTable,
    in_order,
    is_saved,
    load_hub,
    load_saved,
    open_files,
    require_file,
    splits_of,
    table_files,
)
from vlmrl.data.unreadable import unreadable_cell
from vlmrl.errors import DataError

PIECE_ROWS = 128
BATCH_ROWS = 16


@dataclass(frozen=True, slots=True)
class TablePiece:
    """Some rows of a split.

    Args:
        split: its split.     first: number of its first row in the split, from 0.     rows: how many.
        kind, path: the file that holds them.
        group: Parquet: the row group.
        skip: Arrow: rows of the file before them.
        numbers: text: the line of each row in the user's file, where it has lines.
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
    """A table of one or several splits.

    Args:
        label: what the user called it.
        columns: of the first split.
        pieces: all rows of all splits, in order.
        root: where paths of images lead from; None = such paths are refused.
    """

    label: str
    columns: tuple[str, ...]
    pieces: tuple[TablePiece, ...]
    root: Path | None

    @property
    def splits(self) -> dict[str, int]:
        """Split -> rows."""
        counts: dict[str, int] = {}
        for piece in self.pieces:
            counts[piece.split] = counts.get(piece.split, 0) + piece.rows
        return counts

    def where(self, piece: TablePiece, index: int) -> str:
        """How a person finds row `index` of a piece: its line in a text file, else its split and number from 0."""
        if piece.numbers:
            return f"{Path(self.label).name}:{piece.numbers[index]}"
        return f"{piece.split} row {piece.first + index}"


def read_piece(piece: TablePiece, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a piece, in order. Raises: DataError when the file cannot be read."""
    import pyarrow as pa

    try:
        if piece.kind == "text":
            with open(piece.path, encoding="ascii") as lines:
                for line in lines:
                    row = json.loads(line)
                    yield {name: row[name] for name in columns if name in row}
        else:
            batches = _parquet_batches if piece.kind == "parquet" else _arrow_batches
            first = piece.first
            for batch in batches(piece, columns):
                try:
                    rows = batch.to_pylist()
                except (ValueError, OverflowError, KeyError) as error:  # ArrowInvalid is a ValueError
                    places = [f"{piece.split} row {first + i}" for i in range(batch.num_rows)]
                    raise unreadable_cell(batch, places) from error
                yield from rows
                first += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"the table cannot be read: {error}", where=piece.path) from error


def _parquet_batches(piece: TablePiece, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    with pq.ParquetFile(piece.path, buffer_size=1 << 20) as file:
        names = [name for name in columns if name in file.schema_arrow.names]
        yield from file.iter_batches(BATCH_ROWS, row_groups=[piece.group], columns=names, use_threads=False)


def _arrow_batches(piece: TablePiece, columns: Sequence[str]) -> Iterator[Any]:
    skip, left = piece.skip, piece.rows
    for batch in _file_batches(piece.path):
        taken = batch.slice(skip, left)
        skip = max(0, skip - batch.num_rows)
        left -= taken.num_rows
        for start in range(0, taken.num_rows, BATCH_ROWS):
            few = taken.slice(start, BATCH_ROWS)
            yield few.select([name for name in columns if name in few.schema.names])
        if left == 0:
            return


def _file_batches(path: str) -> Iterator[Any]:
    """The batches of an Arrow file, memory-mapped, whichever of the two forms it has."""
    import pyarrow as pa

    source = pa.memory_map(path)
    try:
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
    except pa.ArrowInvalid:
        source.seek(0)
        yield from pa.ipc.open_stream(source)


@dataclass(frozen=True)
class Located:
    """Where the rows are, before they are taken apart.

    Args:
        label: what the user called it, without the split.
        split: the split that is asked for; None = all.
        tables: split -> files, or -> a dataset of the `datasets` library.
        state: what is there, a JSON value: another one means that it changed.
    """

    label: str
    split: str | None
    root: Path | None
    tables: Mapping[str, Any]
    state: Any

    def columns(self) -> list[str]:
        """The columns of the first split, from its first file alone."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        table = next(iter(self.tables.values()))
        if not isinstance(table, list):
            return list(table.column_names)
        require_file(table[0])
        if table[0].suffix.lower() != ".parquet":
            return list(open_files(table[:1]).columns)
        try:
            return list(pq.read_schema(table[0]).names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"not a readable Parquet file: {error}", where=str(table[0])) from error


def locate_rows(source: str, images_root: Path | None = None) -> Located:
    """Find a table.

    Args:
        source: a file, a folder of files, a folder of `save_to_disk`, or `hub:name[#config]`; `@split` at the end takes
            that split alone.
        images_root: where image paths lead from; default: the folder of the table.
    Raises: DataError when there is nothing, or not that split.
    """
    label, split = split_spelling(source)
    root = images_root
    if label.startswith("hub:"):
        tables: Mapping[str, Any] = splits_of(load_hub(label.removeprefix("hub:")), label)
    else:
        place = Path(label)
        if not place.exists():
            raise DataError(f"nothing at {label}", hint="name a file, a folder, or hub:name")
        if (place / INFO_FILE).is_file():
            raise DataError(
                f"{label} is a dataset that `vlmrl prep` has made", hint="name its source, or train on it as it is"
            )
        root = images_root or (place if place.is_dir() else place.parent)
        if place.is_dir() and is_saved(place):
            tables = splits_of(load_saved(place), label)
        else:
            tables = table_files(place) if place.is_dir() else {"train": [place]}
    tables = in_order(tables)
    if split is not None and split not in tables:
        raise DataError(f"no split `{split}` in {label}", hint=f"splits there: {', '.join(tables)}")
    if images_root is not None and not images_root.is_dir():
        raise DataError(f"{images_root} is not a folder", hint="check --images-root")
    tables = {name: table for name, table in tables.items() if split in (None, name)}
    return Located(label, split, root, tables, {name: _state(table) for name, table in tables.items()})


def _state(table: Any) -> Any:
    if isinstance(table, list):
        return [[str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns] for file in table]
    return table._fingerprint


def open_row_files(located: Located, work: Path) -> RowFiles:
    """The pieces of a table. Args: work: text tables, and what is in no file, are taken apart into files there.

    Raises: DataError when it cannot be read.
    """
    pieces: list[TablePiece] = []
    columns: list[str] = []
    for split, table in located.tables.items():
        if not isinstance(table, list):
            made, names = _of_dataset(split, table, work)
        elif any(file.suffix.lower() != ".parquet" for file in table):
            made, names = _text_pieces(split, table, work)
        else:
            made, names = _parquet_pieces(split, table)
        pieces += made
        columns = columns or names
    if not pieces:
        raise DataError("the table has no rows", where=located.label)
    return RowFiles(located.label, tuple(columns), tuple(pieces), located.root)


def split_spelling(source: str) -> tuple[str, str | None]:
    """`path@split` as (path, split); a path that exists as it is written has no split."""
    path, at, split = source.rpartition("@")
    if not at or not path or "/" in split or Path(source).exists():
        return source, None
    return path, split


def _parquet_pieces(split: str, files: Sequence[Path]) -> tuple[list[TablePiece], list[str]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pieces: list[TablePiece] = []
    columns: list[str] = []
    first = 0
    for file in files:
        require_file(file)
        try:
            with pq.ParquetFile(file) as opened:
                groups = [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]
                columns = columns or list(opened.schema_arrow.names)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"not a readable Parquet file: {error}", where=str(file)) from error
        for group, rows in enumerate(groups):
            if rows:
                pieces.append(TablePiece(split, first, rows, "parquet", str(file), group=group))
            first += rows
    return pieces, columns


def _text_pieces(split: str, files: Sequence[Path], work: Path) -> tuple[list[TablePiece], list[str]]:
    """CSV, JSON and JSONL, checked once as a whole, as files of a few rows each."""
    table = open_files(files)
    pieces = []
    for first in range(0, len(table), PIECE_ROWS):
        indices = range(first, min(first + PIECE_ROWS, len(table)))
        path = work / f"{split}-{first // PIECE_ROWS:05d}.text"
        write_lines(path, [_plain_row(table, index) for index in indices])
        numbers = [table.where(index).rpartition(":")[2] for index in indices]
        lines = tuple(int(number) for number in numbers) if all(n.isdigit() for n in numbers) else ()
        pieces.append(TablePiece(split, first, len(indices), "text", str(path), numbers=lines))
    return pieces, list(table.columns)


def _plain_row(table: RawTable, index: int) -> dict[str, Any]:
    try:
        return plain(table.row(index))
    except DataError as error:
        raise DataError(error.message, where=table.where(index)) from error


def _of_dataset(split: str, part: Any, work: Path) -> tuple[list[TablePiece], list[str]]:
    files = [str(file["filename"]) for file in part.cache_files]
    counts = [sum(batch.num_rows for batch in _file_batches(file)) for file in files]
    if not files or sum(counts) != part.num_rows:  # held in memory, or a selection of what the files hold
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
