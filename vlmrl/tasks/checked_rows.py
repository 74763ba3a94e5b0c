"""Tables whose rows are checked in parallel processes and then surveyed once, for the tasks of published collections.

The check of a row writes a JSON line into a part. The survey reads the parts: each image once, rows that are wrong or
there twice, and the facts of the others, whose texts are read again when the dataset is written. Where the source has
no validation split, rows are cut off train that share nothing with it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vlmrl.data.dataset_writer import Build
from vlmrl.data.image_scan import Examined, TablePlace, examined, look_at_cell, read_places
from vlmrl.data.open_dataset import RowUnits, cut_rows
from vlmrl.data.parallel_parts import make_parts, write_lines
from vlmrl.data.table_pieces import Located, OpenTable, RowFiles, TablePiece, open_row_files
from vlmrl.data.table_values import split_images
from vlmrl.errors import DataError
from vlmrl.tasks.dataset_assembly import Assembly, Limits, PlannedRow, first_bad, is_few, leave_out
from vlmrl.tasks.table_rows import IMAGES, MAX_CUT, TEST, TRAIN, VALIDATION, split_for_test
from vlmrl.types import LeftOut, Media

Line = dict[str, Any]
Check = Callable[[Mapping[str, Any], Mapping[str, str], list[Any]], tuple[Line, list[str]]]
"""(Cells of a row by roles, role -> column, values of its images) -> JSON values of the row, and its faults. It is a
function of a module, as other processes get it."""
Place = Callable[[RowFiles, TablePiece, int], str]
"""(Table, piece, number of a row in it) -> its place for messages."""


class ChosenPiece(NamedTuple):
    """Piece of a table that is read.

    Args:
        number: of the piece in its table.
        piece: the piece, under the split that its rows get.
    """

    table: int
    number: int
    piece: TablePiece


def _scan_piece(tables: Sequence[OpenTable], check: Check, place: Place, chosen: ChosenPiece, part: Path) -> None:
    """Write the part of a piece: one JSON line per row. It is the `Make` of data/parallel_parts.py.

    A line has what `check` returns, the facts of its `images`, and its place `where`; or `wrong` (faults) and `where`.
    """
    table = tables[chosen.table]
    lines = []
    for index, cells in table.rows(chosen.piece):
        values = split_images(cells.get(IMAGES))
        line, faults = check(cells, table.columns, values)
        line["images"] = [look_at_cell(value, table.files.root) for value in values]
        seen = enumerate(line["images"], start=1)
        faults += [f"image {number}: {image['reason']}" for number, image in seen if "reason" in image]
        lines.append({**({"wrong": faults} if faults else line), "where": place(table.files, chosen.piece, index)})
    write_lines(part, lines)


@dataclass
class CheckedTables:
    """Tables whose rows have been checked, and what a survey of the rows knows of them once `sound_lines` has ended.

    Args:
        pieces, parts: the pieces that were read, and the part of each.
        images, places: every image once, and its place.
        rows: split -> its sound rows; the key of each is the number of its part, and that of the row in it.
        repeated: rows that repeat another row of their split.
        read: split -> rows that were read.
    """

    tables: Sequence[OpenTable]
    pieces: Sequence[ChosenPiece]
    parts: Sequence[Path]
    images: list[Examined] = field(default_factory=list)
    places: list[TablePlace] = field(default_factory=list)
    rows: dict[str, list[PlannedRow]] = field(default_factory=lambda: defaultdict(list))
    bad: list[LeftOut] = field(default_factory=list)
    repeated: list[LeftOut] = field(default_factory=list)
    read: Counter[str] = field(default_factory=Counter)
    numbers: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """Number of rows that were read."""
        return self.read.total()

    def sound_lines(self) -> Iterator[tuple[str, tuple[int, int], Line, tuple[int, ...]]]:
        """Yield split, key, line and image numbers of each row without a fault; the others are added to `bad`."""
        for index, (chosen, part) in enumerate(zip(self.pieces, self.parts, strict=True)):
            split = chosen.piece.split
            for number, line in _lines(part):
                self.read[split] += 1
                if "wrong" in line:
                    self.bad.append(LeftOut(line["where"], "; ".join(line["wrong"])))
                    continue
                images = tuple(
                    self._image_number(fields, TablePlace(chosen.table, chosen.number, number, position, line["where"]))
                    for position, fields in enumerate(line["images"])
                )
                yield split, (index, number), line, images

    def is_sound(self, max_bad: float) -> bool:
        """Return whether there is a sound row, and the share of wrong ones is within `max_bad`."""
        return any(self.rows.values()) and is_few(len(self.bad), self.total, max_bad)

    def refuse_bad(self, max_bad: float, columns: str, *, share: bool = False) -> None:
        """Raise a DataError with the first wrong rows unless `is_sound`.

        Args:
            columns: hint if most rows are wrong.
            share: whether the message has the share of wrong rows.
        """
        bad, total = len(self.bad), self.total
        if self.is_sound(max_bad):
            return
        rows = f"{bad:,} of {total:,} rows" + (f" ({bad / total:.1%})" if share else "")
        message = f"{rows} are wrong, more than --max-bad {max_bad:g}"
        finding = message if any(self.rows.values()) else f"all {total:,} rows are wrong"
        hint = columns if 2 * bad > total else f"fix the rows, or {leave_out(bad, total)}"
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
    build: Build,
    located: Sequence[Located],
    find_columns: Callable[[RowFiles], Mapping[str, str]],
    check: Check,
    limits: Limits,
    *,
    where: Place = RowFiles.where,
) -> CheckedTables:
    """Check every row of a table; with a second one, that is the test split.

    Args:
        find_columns: table -> role -> column. Raises: DataError for a table that lacks a column.
    Raises: DataError when a table cannot be read, or it is not clear which split of the second one is meant.
    """
    opened = []
    for number, one in enumerate(located):
        folder = build.work / f"table-{number}"
        folder.mkdir(exist_ok=True)
        opened.append(open_row_files(one, folder))
    tables = [OpenTable(files, find_columns(files)) for files in opened]
    pieces = _choose_pieces(opened)
    parts = [build.work / f"rows-{i:05d}.jsonl" for i in range(len(pieces))]
    scan = partial(_scan_piece, tables, check, where)
    make_parts(scan, pieces, parts, workers=limits.workers, progress=limits.progress, what="reading rows")
    return CheckedTables(tables, pieces, parts)


def _choose_pieces(tables: Sequence[RowFiles]) -> list[ChosenPiece]:
    chosen = [ChosenPiece(0, number, piece) for number, piece in enumerate(tables[0].pieces)]
    if len(tables) == 1:
        return chosen
    split = split_for_test(tables[1])
    other = [(number, piece) for number, piece in enumerate(tables[1].pieces) if piece.split == split]
    return [
        *(one for one in chosen if one.piece.split != TEST),
        *(ChosenPiece(1, number, replace(piece, split=TEST)) for number, piece in other),
    ]


def _lines(part: Path) -> Iterator[tuple[int, Line]]:
    with part.open(encoding="ascii") as lines:
        yield from ((number, json.loads(line)) for number, line in enumerate(lines))


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
