"""Rows of a task from tables of others: columns by their usual names, each row checked, wrong rows counted.

A task says which columns it needs and what a row of them means; this module reads the tables, one row at a time, for
`prepare_own`. Rows that are there twice are left out. If the table has no validation split, some images of `train` are
cut off for one. The rows may be drawn instead.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vlmrl.data.image_scan import examined, look
from vlmrl.data.images import image_hash
from vlmrl.data.table_pieces import OpenTable, RowFiles, TablePiece, locate_rows, open_row_files
from vlmrl.data.table_values import Spellings, image_bytes, match_columns, read_image, split_images
from vlmrl.errors import DataError
from vlmrl.tasks.base import NewRow, Task
from vlmrl.tasks.dataset_assembly import Limits, Prepared, first_bad, is_few, leave_out
from vlmrl.tasks.own_prep import SoundImage, prepare_own
from vlmrl.tasks.prep_options import TableRequest
from vlmrl.types import LeftOut, Size, hash64

IMAGES = "images"
TRAIN, VALIDATION, TEST = "train", "validation", "test"
MAX_CUT = 0.1
"""Largest share of the training images, or of the training rows, that is cut off for validation."""
Cells = Mapping[str, Any]
"""Role -> cell of a row, without the roles that the table has no column for."""


@dataclass(frozen=True)
class RowForm:
    """Form of a task's rows in tables of others.

    Args:
        spellings: role -> names of columns that are recognised; the role `images` is one of them.
        required: roles without which a table cannot be read; of several in one tuple, one is enough.
        read: (cells, size of the image in pixels) -> (truth, columns for the prompt). Raises: DataError that says what
            is wrong with the row.
        help: the columns in words, for messages.
        any_image: whether a row may have no image; its size is then (0, 0).
    """

    spellings: Spellings
    required: Sequence[tuple[str, ...]]
    read: Callable[[Cells, Size], tuple[Mapping[str, Any], Mapping[str, Any]]]
    help: str
    any_image: bool = False


def read_tables(
    request: TableRequest, form: RowForm, split_names: Mapping[str, str]
) -> dict[str, Iterable[NewRow | LeftOut]]:
    """Return split -> the rows of the tables, which are read when they are iterated over.

    Args:
        split_names: name of a split of the source -> its name in the dataset.
    Raises: DataError for a table that cannot be read, or lacks a column. The last iterator raises it for too many
        wrong rows in all.
    """
    work = TemporaryDirectory(prefix="vlmrl-prep-")
    reader = _Reader(request, form, work)
    source, *tests = request.sources()
    main = reader.open(*source, "source")
    splits = {split_names.get(split, split): (main, _pieces(main, split)) for split in main.files.splits}
    for test in tests:
        other = reader.open(*test, "test")
        splits[TEST] = (other, _pieces(other, split_for_test(other.files)))
    named: dict[str, Iterable[NewRow | LeftOut]] = {
        split: reader.rows(table, pieces) for split, (table, pieces) in splits.items()
    }
    if VALIDATION not in named and TRAIN in named and request.validation_rows:
        table, pieces = splits[TRAIN]
        if cut := reader.choose_images(table, pieces):
            own = {TRAIN: reader.rows(table, pieces, without=cut), VALIDATION: reader.rows(table, pieces, only=cut)}
            named = {**own, **{split: rows for split, rows in named.items() if split != TRAIN}}
    last = list(named)[-1]
    return {**named, last: reader.to_the_end(named[last])}


def split_for_test(files: RowFiles) -> str:
    """Return the split of a second table that becomes the test split: its only one, or `test`.

    Raises: DataError for a table with several splits, and no `test` among them.
    """
    names = list(files.splits)
    if len(names) > 1 and TEST not in names:
        message = f"{files.label} has no split `test`, but: {', '.join(names)}"
        raise DataError(message, hint=f"name one: {files.label}@{names[0]}")
    return TEST if len(names) > 1 else names[0]


def find_columns(
    files: RowFiles, spellings: Spellings, required: Iterable[Sequence[str]], form_help: str
) -> dict[str, str]:
    """Return role -> column of a table. See `RowForm` for the arguments.

    Raises: DataError for a table without a column that is required.
    """
    columns = match_columns(spellings, files.columns)
    for roles in required:
        if not columns.keys() & set(roles):
            names = " or ".join(f"`{spellings[role][0]}`" for role in roles)
            known = ", ".join(files.columns)
            raise DataError(f"no column {names}; the table {files.label} has: {known}", hint=form_help)
    return columns


@dataclass
class _Reader:
    """Reader of open tables.

    Args:
        work: folder for the parts of text tables; it lives as long as the reader.
        total, bad, hints: rows of all splits that were read, those of them that are wrong, and hints for these.
    """

    request: TableRequest
    form: RowForm
    work: TemporaryDirectory[str]
    total: int = 0
    bad: list[LeftOut] = field(default_factory=list)
    hints: dict[str, None] = field(default_factory=dict)

    def open(self, name: str, images_root: Path | None, folder_name: str) -> OpenTable:
        folder = Path(self.work.name) / folder_name
        folder.mkdir()
        files = open_row_files(locate_rows(name, images_root), folder)
        return OpenTable(files, find_columns(files, self.form.spellings, self.form.required, self.form.help))

    def choose_images(self, table: OpenTable, pieces: Sequence[TablePiece]) -> frozenset[int]:
        """Return the images that are cut off for validation, as hashes; empty if every image would be too many."""
        rows_of = Counter[int]()
        for _, cells, root in _cells(table, pieces):
            with suppress(DataError):  # `rows` reports it
                rows_of[_key_of(_only_image(cells, root, self.form), cells)] += 1
        keys = sorted(rows_of)
        random.Random(hash64("validation", str(self.request.seed))).shuffle(keys)
        cut, num_rows = set[int](), 0
        for key in keys[: int(MAX_CUT * len(keys))]:
            if num_rows >= self.request.validation_rows:
                break
            cut.add(key)
            num_rows += rows_of[key]
        return frozenset(cut)

    def rows(
        self,
        table: OpenTable,
        pieces: Sequence[TablePiece],
        *,
        only: frozenset[int] | None = None,
        without: frozenset[int] = frozenset(),
    ) -> Iterator[NewRow | LeftOut]:
        """Yield the rows of a split.

        Args:
            only, without: images of the rows that are read, or not read.
        """
        seen = dict[int, tuple[int, str]]()
        for where, cells, root in _cells(table, pieces):
            key = None
            try:
                data = _only_image(cells, root, self.form)
                key = _key_of(data, cells)
                if (only is not None and key not in only) or key in without:
                    continue
                images = [] if data is None else [_sound(data)]
                media = images[0].facts.media if images else None
                truth, columns = self.form.read(cells, (media.width, media.height) if media else (0, 0))
            except DataError as error:
                if key is None and only is not None:
                    continue  # a row without an image belongs to train
                self.total += 1
                self.bad.append(LeftOut(where, error.message))
                self.hints |= {error.hint: None} if error.hint and key is not None else {}
                yield self.bad[-1]
                continue
            self.total += 1
            shown = hash64(key if images else 0, repr(sorted(columns.items())))
            reason = _repeats(seen, shown, hash64(repr(truth)), where)
            yield LeftOut(where, reason) if reason else NewRow(truth, images, columns, origin=where)

    def to_the_end(self, last: Iterable[NewRow | LeftOut]) -> Iterator[NewRow | LeftOut]:
        """Yield the rows of the last split. Raises: DataError then if too many rows of all splits are wrong."""
        yield from last
        bad, total = len(self.bad), self.total
        if not is_few(bad, total, most := self.request.max_bad):
            fix = f"fix the rows, or {leave_out(bad, total)}" if bad < total else "fix the rows"
            message = f"{bad:,} of {total:,} rows are wrong, more than --max-bad {most:g}; nothing was written:"
            raise DataError(message + first_bad(self.bad), hint="; else ".join([*self.hints, fix]))


def _sound(data: bytes) -> SoundImage:
    """Return an image that has been decoded to its last pixel. Raises: DataError for one that is damaged."""
    fields = look(data)
    if "reason" in fields:
        raise DataError(fields["reason"])
    return SoundImage(data, examined(fields))


def _pieces(table: OpenTable, split: str) -> list[TablePiece]:
    return [piece for piece in table.files.pieces if piece.split == split]


def _cells(table: OpenTable, pieces: Sequence[TablePiece]) -> Iterator[tuple[str, Cells, Path | None]]:
    """Yield place, cells by their roles, and folder of image paths of each row."""
    for piece in pieces:
        for index, cells in table.rows(piece):
            yield table.files.where(piece, index), cells, table.files.root


def _only_image(cells: Cells, root: Path | None, form: RowForm) -> bytes | None:
    values = split_images(cells.get(IMAGES))
    if len(values) != 1 and (values or not form.any_image):
        raise DataError("no image" if not values else f"{len(values)} images, where one is expected")
    return image_bytes(read_image(values[0], root, ""), "") if values else None


def _key_of(data: bytes | None, cells: Cells) -> int:
    """Return the hash of a row's image; of a row without one, that of its cells."""
    return int(image_hash(data)[:16], 16) if data is not None else hash64(repr(sorted(cells.items())))


def _repeats(seen: dict[int, tuple[int, str]], shown: int, answer: int, where: str) -> str:
    """Return why a row is left out: another one shows the same; "" if none does. `seen`: shown -> (answer, place)."""
    if shown not in seen:
        seen[shown] = (answer, where)
        return ""
    other, place = seen[shown]
    return f"the same row as {place}" if other == answer else f"another answer to the image and question of {place}"


def prepare_table(
    task: Task,
    request: TableRequest,
    limits: Limits,
    *,
    form: RowForm,
    settings: Mapping[str, Any],
    draw: Callable[[Mapping[str, int]], Mapping[str, list[NewRow]]],
    drawn_settings: Mapping[str, Any],
    split_names: Mapping[str, str] | None = None,
    files: Mapping[str, str] | None = None,
) -> Prepared:
    """Make the dataset of a task from tables, or draw it.

    Args:
        form, settings: form of the rows in tables, and the task's own options for them.
        draw, drawn_settings: split -> number of rows -> drawn rows, and the task's own options for them.
        split_names: name of a split in published tables -> its name in the dataset.
        files: name -> text of further files of drawn datasets; see `Build.write_text`.
    Raises: DataError for a source, name or row that cannot be used; nothing is written.
    """
    name, out = request.place(task.name)
    counts = request.drawn()
    splits = partial(draw, counts) if counts else partial(read_tables, request, form, split_names or {})
    args = {**request.args(), **(drawn_settings if counts else settings), **limits.args}
    own, texts = replace(task, prep=lambda **_: splits()), (files or {}) if counts else {}
    return prepare_own(own, args, out, limits, name=name, files=texts)
