"""Images inside the rows of a table: examined row by row, and read again by their place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.data.cells import image_bytes, read_image, show, split_images
from vlmrl.data.image_scan import Examiner
from vlmrl.data.table_pieces import RowFiles, read_piece
from vlmrl.errors import DataError

MAX_PATH = 1000
"""Longest path of an image, in characters; a longer text is an image in base64."""


class RowPlace(NamedTuple):
    """Place of an image in a table: piece, row in the piece, position in the row."""

    piece: int
    row: int
    position: int


@dataclass(frozen=True)
class RowReader:
    """Reader of image files by their place in a table, for `write_shards`.

    Places in the table's order are read in one pass.
    """

    table: RowFiles
    column: str

    def files(self, places: Sequence[RowPlace]) -> Iterator[bytes]:
        for index, piece_places in groupby(places, key=lambda place: place[0]):
            rows = enumerate(read_piece(self.table.pieces[index], [self.column]))
            number, values = -1, []
            for place in piece_places:
                while number < place[1]:
                    number, row = next(rows)
                    values = split_images(row.get(self.column))
                yield image_bytes(read_image(values[place[2]], self.table.root, ""), "")


def look_at_cell(value: Any, root: Path | None, examiner: Examiner) -> dict[str, Any]:
    """Return the fields of an image value of a cell, or {"reason": why the image cannot be used}.

    Args:
        root: folder that image paths start from; None = image paths are refused.
    """
    try:
        data = image_bytes(read_image(value, root, ""), "")
    except DataError as error:
        return {"reason": error.message}
    fields = examiner.look(data)
    name = _name_of(value)
    return {"reason": f"{name}: {fields['reason']}"} if "reason" in fields and name else fields


def _name_of(value: Any) -> str:
    """Return the path that a table gives for an image; "" if it gives none."""
    path = value.get("path") if isinstance(value, Mapping) else value
    is_path = isinstance(path, str) and 0 < len(path) <= MAX_PATH and not path.startswith("data:")
    return show(path, 60) if is_path else ""
