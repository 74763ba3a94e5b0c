"""Rows of tasks from tables of others: columns by their usual names, each row checked, wrong rows counted.

The rows are checked in parallel processes. The check of a row writes a JSON line into a part. Then the parts are read:
each image once, the wrong rows, and the facts of the others.

Most tasks say by a `RowForm` which columns they need and what a row of them means, and `prepare_own` writes their
rows. Rows that are there twice are left out. If the table has no validation split, some images of `train` are cut off
for one. The rows may be drawn instead. Collections with several images in a row, and rows that contradict each other,
make a survey of the lines themselves (`CheckedTables`).
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from vlmrl.data.image_scan import Examined, TablePlace, examined, look, look_at_cell, read_places
from vlmrl.data.images import image_hash
from vlmrl.data.open_dataset import RowUnits, cut_rows
from vlmrl.data.parallel_parts import make_parts, write_lines
from vlmrl.data.table_pieces import Located, OpenTable, RowFiles, TablePiece, locate_rows, open_row_files
from vlmrl.data.table_values import Spellings, image_bytes, match_columns, read_image, split_images
from vlmrl.errors import DataError
from vlmrl.tasks.base import NewRow, Task
from vlmrl.tasks.dataset_assembly import Assembly, Limits, PlannedRow, Prepared, first_bad, is_few, leave_out
from vlmrl.tasks.own_prep import SoundImage, prepare_own, require_kept
from vlmrl.tasks.prep_options import TableRequest
from vlmrl.types import LeftOut, Media, Size, hash64

IMAGES = "images"
TRAIN, VALIDATION, TEST = "train", "validation", "test"
MAX_CUT = 0.1
"""Largest share of the training images, or of the training rows, that is cut off for validation."""
Line = dict[str, Any]
Cells = Mapping[str, Any]
"""Role -> cell of a row, without the roles that the table has no column for."""
MakeLine = Callable[[OpenTable, Cells], Line]
"""(Table, cells of a row) -> JSON values of the row: `images`, the facts of its images, and what a task needs; of a
wrong row `wrong`, its faults. It is a function of a module, as other processes get it."""
Check = Callable[[Cells, Mapping[str, str], list[Any]], tuple[Line, list[str]]]
"""(Cells of a row by roles, role -> column, values of its images) -> JSON values of the row, and its faults."""


class ChosenPiece(NamedTuple):
    """Piece of a table that is read.

    Args:
        number: of the piece in its table.
        split: of its rows in the dataset.
    """

    table: int
    number: int
    piece: TablePiece
    split: str

    def place(self, files: RowFiles, index: int) -> str:
        """Return the place of row `index` for messages."""
        return files.where(self.piece, index)


Place = Callable[[ChosenPiece, RowFiles, int], str]
"""(Piece, its table, number of a row in the piece) -> the place of the row for messages."""


def checked_line(check: Check, table: OpenTable, cells: Cells) -> Line:
    """Return the line of a row of any number of images, with all its faults and those of the images."""
    values = split_images(cells.get(IMAGES))
    line, faults = check(cells, table.columns, values)
    line["images"] = [look_at_cell(value, table.files.root) for value in values]
    seen = enumerate(line["images"], start=1)
    faults += [f"image {number}: {image['reason']}" for number, image in seen if "reason" in image]
    return {"wrong": faults} if faults else line


def _scan_piece(tables: Sequence[OpenTable], make: MakeLine, place: Place, chosen: ChosenPiece, part: Path) -> None:
    """Write the part of a piece: one line per row, with its place `where`. See `Make` in data/parallel_parts.py."""
    table = tables[chosen.table]
    rows = table.rows(chosen.piece)
    write_lines(part, [{**make(table, cells), "where": place(chosen, table.files, i)} for i, cells in rows])


@dataclass
class CheckedTables:
    """Tables whose rows have been checked, and what a survey of the rows knows of them once `lines` has ended.

    Args:
        pieces, parts: the pieces that were read, and the part of each.
        bad, hints: wrong rows, and hints for them.
        read: split -> rows that were read.
        images, places: every image of `sound_lines` once, and its place.
        rows: split -> its sound rows; the key of each is the number of its part, and that of the row in it.
        repeated: rows that repeat another row of their split.
    """

    tables: Sequence[OpenTable]
    pieces: Sequence[ChosenPiece]
    parts: Sequence[Path]
    bad: list[LeftOut] = field(default_factory=list)
    hints: dict[str, None] = field(default_factory=dict)
    read: Counter[str] = field(default_factory=Counter)
    images: list[Examined] = field(default_factory=list)
    places: list[TablePlace] = field(default_factory=list)
    rows: dict[str, list[PlannedRow]] = field(default_factory=lambda: defaultdict(list))
    repeated: list[LeftOut] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of rows that were read."""
        return self.read.total()

    def lines(self) -> Iterator[tuple[ChosenPiece, tuple[int, int], Line]]:
        """Yield piece, key and line of each row; they are counted, and the wrong ones are added to `bad`."""
        for index, (chosen, part) in enumerate(zip(self.pieces, self.parts, strict=True)):
            for number, line in _lines(part):
                self.read[chosen.split] += 1
                if "wrong" in line:
                    self.bad.append(_left_out(line))
                    self.hints |= {line["hint"]: None} if line.get("hint") else {}
                yield chosen, (index, number), line

    def sound_lines(self) -> Iterator[tuple[str, tuple[int, int], Line, tuple[int, ...]]]:
        """Yield split, key, line and image numbers of each row without a fault."""
        for chosen, key, line in self.lines():
            if "wrong" not in line:
                images = zip(line["images"], _places(chosen, key[1], line), strict=True)
                yield chosen.split, key, line, tuple(self._image_number(*image) for image in images)

    def is_sound(self, max_bad: float) -> bool:
        """Return whether there is a sound row, and the share of wrong ones is within `max_bad`."""
        return len(self.bad) < self.total and is_few(len(self.bad), self.total, max_bad)

    def refuse_bad(self, max_bad: float, columns: str = "", *, share: bool = False) -> None:
        """Raise a DataError with the first wrong rows unless `is_sound`.

        Args:
            columns: hint if most rows are wrong; "" = none.
            share: whether the message has the share of wrong rows.
        """
        bad, total = len(self.bad), self.total
        if self.is_sound(max_bad):
            return
        rows = f"{bad:,} of {total:,} rows" + (f" ({bad / total:.1%})" if share else "")
        message = f"{rows} are wrong, more than --max-bad {max_bad:g}"
        finding = message if bad < total else f"all {total:,} rows are wrong"
        fix = "fix the rows" + (f", or {leave_out(bad, total)}" if bad < total else "")
        hint = columns if columns and 2 * bad > total else "; else ".join([*self.hints, fix])
        raise DataError(f"{finding}; nothing was written:{first_bad(self.bad)}", hint=hint)

    def _image_number(self, fields: dict[str, Any], place: TablePlace) -> int:
        """Return the number of an image; an image that was not there before is added."""
        sha256 = str(fields["sha256"])
        if sha256 not in self.numbers:
            self.numbers[sha256] = len(self.images)
            self.images.append(examined(fields))
            self.places.append(place)
        return self.numbers[sha256]

    def assembly(self, fields: Callable[..., Any], schema: Any) -> Assembly:
        """Return the content of the dataset. `fields`: (facts of a row, its line, its images) -> its columns."""

        def columns(planned: Sequence[PlannedRow], media: Sequence[Media]) -> Iterator[dict[str, Any]]:
            facts_of = {row.key: row.facts for row in planned}
            for index in sorted({index for index, _ in facts_of}):
                for number, line in _lines(self.parts[index]):  # the texts are read again
                    if (facts := facts_of.get((index, number))) is not None:
                        yield fields(facts, line, [media[i] for i in facts.images])

        dropped = [*self.bad, *self.repeated]
        reader = partial(read_places, self.tables)
        assembly = Assembly(self.images, self.places, reader, dict(self.rows), columns, schema, dropped)
        if self.bad:
            share = f"{len(self.bad):,} of {self.total:,} rows ({len(self.bad) / self.total:.2%})"
            assembly.notes["rows that are wrong"] = ("look", f"{share} left out: dropped.jsonl")
        return assembly


def check_tables(
    work: Path,
    located: Sequence[Located],
    find_columns: Callable[[RowFiles], Mapping[str, str]],
    make: MakeLine,
    limits: Limits,
    *,
    where: Place = ChosenPiece.place,
    split_names: Mapping[str, str] | None = None,
) -> CheckedTables:
    """Check every row of a table; with a second one, that is the test split.

    Args:
        work: folder for the parts.
        find_columns: table -> role -> column. Raises: DataError for a table that lacks a column.
        split_names: name of a split of the table -> its name in the dataset.
    Raises: DataError when a table cannot be read, or it is not clear which split of the second one is meant.
    """
    tables = []
    for number, one in enumerate(located):
        folder = work / f"table-{number}"
        folder.mkdir(exist_ok=True)
        files = open_row_files(one, folder)
        tables.append(OpenTable(files, find_columns(files)))
    pieces = _choose_pieces([table.files for table in tables], split_names or {})
    parts = [work / f"rows-{i:05d}.jsonl" for i in range(len(pieces))]
    scan = partial(_scan_piece, tables, make, where)
    make_parts(scan, pieces, parts, workers=limits.workers, progress=limits.progress, what="reading rows")
    return CheckedTables(tables, pieces, parts)


def _choose_pieces(tables: Sequence[RowFiles], names: Mapping[str, str]) -> list[ChosenPiece]:
    first = [
        ChosenPiece(0, number, piece, names.get(piece.split, piece.split))
        for number, piece in enumerate(tables[0].pieces)
    ]
    if len(tables) == 1:
        return first
    split = split_for_test(tables[1])
    other = [(number, piece) for number, piece in enumerate(tables[1].pieces) if piece.split == split]
    return [
        *(one for one in first if one.split != TEST),
        *(ChosenPiece(1, number, piece, TEST) for number, piece in other),
    ]


def _lines(part: Path) -> Iterator[tuple[int, Line]]:
    with part.open(encoding="ascii") as lines:
        yield from ((number, json.loads(line)) for number, line in enumerate(lines))


def _left_out(line: Line) -> LeftOut:
    return LeftOut(line["where"], "; ".join(line["wrong"]))


def _places(chosen: ChosenPiece, number: int, line: Line) -> list[TablePlace]:
    """Return the places of the images of a row. `number`: of the row in its piece."""
    images = range(len(line.get("images", ())))
    return [TablePlace(chosen.table, chosen.number, number, position, line["where"]) for position in images]


def cut_validation(
    assembly: Assembly,
    units: Mapping[str, Sequence[RowUnits]],
    num_rows: int,
    seed: int,
    *,
    shares: str,
    option: str = "",
) -> None:
    """Move rows of `train` to a new split `validation` if there is none, and report it.

    Args:
        units: what the rows of `train` may not share between splits, by its name; the first that gives rows is used.
        shares: reason of a row that fits neither split, with `{by}` for that name.
        option: option for the number of rows, which a note names where there are fewer; "" = none.
    """
    check, rows = "validation split", assembly.rows
    if VALIDATION in rows or TRAIN not in rows:
        own = VALIDATION in rows
        alone = "a test split" if set(rows) == {TEST} else " and ".join(rows)
        finding = "the source's own" if own else f"none: the source has {alone} alone"
        assembly.notes[check] = ("ok" if own else "look", finding)
        return
    train = rows[TRAIN]
    most = min(num_rows, int(MAX_CUT * len(train)))
    cuts = ((by, cut_rows(members, most, seed=seed)) for by, members in units.items())
    by, cut = next(((by, cut) for by, cut in cuts if cut.taken), ("", None))
    if cut is None:
        why = "none was asked for" if not num_rows else "no row can be kept out of training"
        assembly.notes[check] = ("look", f"none: {why}; do not choose checkpoints on the test split")
        return
    taken, lost = set(cut.taken), set(cut.lost)
    assembly.rows = {
        TRAIN: [row for i, row in enumerate(train) if i not in taken and i not in lost],
        VALIDATION: [train[i] for i in cut.taken],
        **{split: members for split, members in rows.items() if split != TRAIN},
    }
    assembly.dropped += [LeftOut(train[i].facts.name, shares.format(by=by)) for i in cut.lost]
    note = f"the source has none: {len(taken):,} rows cut off train, which share no {by} with it"
    note += f"; {len(lost):,} rows with a {by} of both left out" if lost else ""
    note += f" ({option} is {num_rows:,})" if option and len(taken) < num_rows else ""
    assembly.notes[check] = ("look", note)


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
    request: TableRequest, form: RowForm, limits: Limits, split_names: Mapping[str, str] | None = None
) -> dict[str, Iterable[NewRow | LeftOut]]:
    """Check the rows of the tables. Return split -> its rows, whose images are read when they are iterated over.

    Args:
        split_names: name of a split of the source -> its name in the dataset.
    Raises: DataError for a table that cannot be read, or lacks a column, and for too many wrong rows in all.
    """
    work = TemporaryDirectory(prefix="vlmrl-prep-")
    located = [locate_rows(*one) for one in request.sources()]
    find = partial(find_columns, spellings=form.spellings, required=form.required, form_help=form.help)
    make = partial(_form_line, form)
    checked = check_tables(Path(work.name), located, find, make, limits, split_names=split_names)
    rows_of = Counter(line["key"] for chosen, _, line in checked.lines() if chosen.split == TRAIN)
    checked.refuse_bad(request.max_bad)
    if VALIDATION in checked.read or not (cut := _choose_images(rows_of, request)):
        return {split: _new_rows(work, checked, split) for split in checked.read}
    own = {TRAIN: _new_rows(work, checked, TRAIN, cut), VALIDATION: _new_rows(work, checked, TRAIN, cut, is_cut=True)}
    return {**own, **{split: _new_rows(work, checked, split) for split in checked.read if split != TRAIN}}


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


def _form_line(form: RowForm, table: OpenTable, cells: Cells) -> Line:
    """Return the line of a row: truth, columns, facts of its image, and `key`, the hash of this image.

    Of a row that is wrong, the first fault and its hint. The key is None if the image cannot be read.
    """
    key = None
    try:
        data = _only_image(cells, table.files.root, form)
        key = _key_of(data, cells)
        images = [] if data is None else [look(data)]
        if images and "reason" in images[0]:
            raise DataError(images[0]["reason"])
        truth, columns = form.read(cells, (images[0]["width"], images[0]["height"]) if images else (0, 0))
        require_kept([truth, columns], "the row")
    except DataError as error:
        return {"wrong": [error.message], "hint": error.hint if key is not None else None, "key": key}
    return {"truth": truth, "columns": columns, "images": images, "key": key}


def _choose_images(rows_of: Counter[int | None], request: TableRequest) -> frozenset[int]:
    """Return the images that are cut off for validation, as hashes; empty if every image would be too many.

    Args:
        rows_of: image -> number of its rows in train; None = images that cannot be read.
    """
    keys = sorted(key for key in rows_of if key is not None)
    random.Random(hash64("validation", str(request.seed))).shuffle(keys)
    cut, num_rows = set[int](), 0
    for key in keys[: int(MAX_CUT * len(keys))]:
        if num_rows >= request.validation_rows:
            break
        cut.add(key)
        num_rows += rows_of[key]
    return frozenset(cut)


def _new_rows(
    work: TemporaryDirectory[str],
    checked: CheckedTables,
    split: str,
    cut: frozenset[int] = frozenset(),
    *,
    is_cut: bool = False,
) -> Iterator[NewRow | LeftOut]:
    """Yield the rows of a split.

    Args:
        work: folder of the parts, which lives until the last split is read.
        cut, is_cut: images, and whether their rows are the ones that are read; else all others are.
    """
    seen = dict[int, tuple[int, str]]()
    for chosen, part in zip(checked.pieces, checked.parts, strict=True):
        if chosen.split != split:
            continue
        lines = [(number, line) for number, line in _lines(part) if (line["key"] in cut) is is_cut]
        places = [place for number, line in lines for place in _places(chosen, number, line)]
        files = read_places(checked.tables, places)
        for _, line in lines:
            if "wrong" in line:
                yield _left_out(line)
                continue
            where, truth, columns = line["where"], line["truth"], line["columns"]
            images = [SoundImage(next(files), examined(fields)) for fields in line["images"]]
            shown = hash64(line["key"] if images else 0, repr(sorted(columns.items())))
            reason = _repeats(seen, shown, hash64(repr(truth)), where)
            yield LeftOut(where, reason) if reason else NewRow(truth, images, columns, origin=where)


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
    splits = partial(draw, counts) if counts else partial(read_tables, request, form, limits, split_names)
    args = {**request.args(), **(drawn_settings if counts else settings), **limits.args}
    own, texts = replace(task, prep=lambda **_: splits()), (files or {}) if counts else {}
    return prepare_own(own, args, out, limits, name=name, files=texts)
