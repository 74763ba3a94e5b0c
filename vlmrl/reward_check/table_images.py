"""The images of those rows of a table that are shown. Whoever wrote the table is not trusted: see `read_image`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vlmrl.data.columns import read_image, split_images
from vlmrl.errors import DataError
from vlmrl.reward_check.response_table import TableReader
from vlmrl.reward_check.scores import Ints
from vlmrl.reward_check.table_cells import RowCells

MOST_A_ROW = 16
BATCH_ROWS = 16
"""Of a Parquet column of images, which are large, so many rows are in memory at a time."""


def row_images(reader: TableReader, rows: Iterable[int]) -> Iterator[tuple[int, list[bytes | str]]]:
    """(row, its images) of these rows, in their order in the table: each image as the bytes of its file, unchecked, or
    as a text that says why it cannot be had. Nothing for a table without a column of images.

    A path must stay in the table's folder, links resolved, and nothing is fetched from the network. At most MOST_A_ROW
    images of a row are read.
    Raises: DataError when the table can no longer be read.
    """
    column = reader.decoder.roles.get("images")
    wanted = np.unique(np.asarray(list(rows), dtype=np.int64))
    if column is None or not len(wanted):
        return
    root = Path(reader.path).absolute().parent
    cells = _parquet_cells if reader.decoder.kind == ".parquet" else _text_cells
    for row, cell in cells(reader, column, wanted):
        values = split_images(cell)
        found = [_file(value, root) for value in values[:MOST_A_ROW]]
        more = len(values) - len(found)
        yield row, [*found, f"{more:,} more images"] if more > 0 else found


def _file(value: Any, root: Path) -> bytes | str:
    try:
        found = read_image(value, root, "")
        return found.read_bytes() if isinstance(found, Path) else found
    except DataError as error:
        return error.message
    except OSError as error:
        return f"the image file cannot be read: {error.strerror}"


def _parquet_cells(reader: TableReader, column: str, wanted: Ints) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(reader.path, pre_buffer=False, buffer_size=1 << 20) as file:
            first = 0
            for group in range(file.num_row_groups):
                end = first + file.metadata.row_group(group).num_rows
                if np.any((wanted >= first) & (wanted < end)):
                    batches = file.iter_batches(BATCH_ROWS, row_groups=[group], columns=[column], use_threads=False)
                    place = first
                    for batch in batches:
                        for row in wanted[(wanted >= place) & (wanted < place + batch.num_rows)].tolist():
                            yield row, batch.column(0)[row - place].as_py()
                        place += batch.num_rows
                first = end
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"the images cannot be read: {error}", where=reader.path) from error


def _text_cells(reader: TableReader, column: str, wanted: Ints) -> Iterator[tuple[int, Any]]:
    for chunk in reader.chunks(wanted):
        here = wanted[(wanted >= chunk.first) & (wanted < chunk.first + chunk.rows)]
        lines = RowCells([chunk.data[row - chunk.first] for row in here.tolist()])
        yield from zip(here.tolist(), lines.column(column), strict=True)
