"""Images of those rows of a table that a report displays. A table is untrusted input: see `read_image`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.data.table_files import parquet_batches, parquet_groups
from vlmrl.data.table_values import UNREADABLE, image_bytes, read_image, split_images, unreadable_cell
from vlmrl.errors import DataError
from vlmrl.reward_check.response_table import TableReader
from vlmrl.reward_check.scores import Ints
from vlmrl.reward_check.table_cells import RowCells

MOST_A_ROW = 16
"""Largest number of images that are read per row."""
BATCH_ROWS = 16
"""Number of rows of a Parquet column of images that are read at a time: few, because images are large."""


def row_images(reader: TableReader, rows: Iterable[int]) -> Iterator[tuple[int, list[bytes | str]]]:
    """Yield (row, its images) for `rows`, in the order of the table; nothing if the table has no images.

    An image is the bytes of its file, unchecked, or a text with the reason why it cannot be read. After links are
    resolved, a path must lie in the table's folder. Nothing is fetched from the network. At most MOST_A_ROW images of a
    row are read; if there are more, a text states how many were left out.

    Raises: DataError if the table can no longer be read.
    """
    column = reader.decoder.roles.get("images")
    row_numbers = np.unique(np.asarray(list(rows), dtype=np.int64))
    if column is None or not len(row_numbers):
        return
    root = Path(reader.paths[0]).absolute().parent
    cells = _parquet_cells if reader.decoder.kind == ".parquet" else _text_cells
    for row, cell in cells(reader, column, row_numbers):
        values = split_images(cell)
        files = [_file(value, root) for value in values[:MOST_A_ROW]]
        more = len(values) - len(files)
        yield row, [*files, f"{more:,} more images"] if more > 0 else files


def _file(value: Any, root: Path) -> bytes | str:
    try:
        return image_bytes(read_image(value, root, ""), "")
    except DataError as error:
        return error.message


def _parquet_cells(reader: TableReader, column: str, row_numbers: Ints) -> Iterator[tuple[int, Any]]:
    first = 0
    for group, rows in enumerate(parquet_groups(reader.paths[0])):
        if np.any((row_numbers >= first) & (row_numbers < first + rows)):
            place = first
            for batch in parquet_batches(reader.paths[0], [column], BATCH_ROWS, group):
                for row in row_numbers[(row_numbers >= place) & (row_numbers < place + batch.num_rows)].tolist():
                    yield row, _cell(batch, row - place, reader.decoder.place(0, row))
                place += batch.num_rows
        first += rows


def _cell(batch: Any, index: int, place: str) -> Any:
    try:
        return batch.column(0)[index].as_py()
    except UNREADABLE as error:
        raise unreadable_cell(batch.slice(index, 1), lambda _: place) from error


def _text_cells(reader: TableReader, column: str, row_numbers: Ints) -> Iterator[tuple[int, Any]]:
    for chunk in reader.chunks(row_numbers):
        here = row_numbers[(row_numbers >= chunk.first) & (row_numbers < chunk.first + chunk.rows)]
        lines = RowCells([chunk.data[row - chunk.first] for row in here.tolist()])
        yield from zip(here.tolist(), lines.column(column), strict=True)
