"""Function that opens any dataset, and the share of a split that is held out: `[[data]] validation = 0.1`.

Nothing that rows share (an image, a text) is in both splits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from vlmrl.data.dataset import INFO_FILE, Dataset, PreparedDataset, WrappedDataset, canonical_json, require_split
from vlmrl.data.table_dataset import UNREAD, TableDataset
from vlmrl.data.table_values import read_messages
from vlmrl.errors import DataError
from vlmrl.recipe.template import parse_template, read_template
from vlmrl.types import Row, Rows, hash64

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Data

MAX_LOST = 0.1
"""Largest share of the training rows that may be left out because their images would be in both splits."""


class RowUnits(NamedTuple):
    """Units of a row (such as its images and its text), and its label."""

    units: tuple[Hashable, ...]
    label: Hashable


@dataclass(frozen=True)
class Cut:
    """Positions of the rows that move to the new split, and of those that fit neither split; both sorted.

    All other rows stay in the training split.
    """

    taken: list[int]
    lost: list[int]


def cut_rows(rows: Sequence[RowUnits], num_rows: int, *, seed: int) -> Cut:
    """Select about `num_rows` rows for a new split, so that no unit is both in it and in the rows that stay.

    If the rows form groups that share no unit, whole groups are selected, and no row is lost. Otherwise units are drawn
    for the new split. A row is lost if some, but not all, of its units are drawn. At most 10% of all rows may be lost;
    to keep this limit, fewer rows than `num_rows` are selected. In the new split, each label has the same share as
    among all rows.

    Args:
        seed: the result depends on the seed and on the rows, not on the order of units within a row.
    """
    if num_rows <= 0 or not rows:
        return Cut([], [])
    taken = _whole_groups(rows, num_rows, seed)
    if 2 * len(taken) >= min(num_rows, len(rows)):
        return Cut(taken, [])
    return _drawn_units(rows, num_rows, seed)


def _whole_groups(rows: Sequence[RowUnits], num_rows: int, seed: int) -> list[int]:
    """Go through the groups in a random order, select each that keeps the total within `num_rows`; return the rows."""
    parent: dict[Hashable, Hashable] = {}

    def root(unit: Hashable) -> Hashable:
        parent.setdefault(unit, unit)
        while parent[unit] != unit:
            parent[unit] = parent[parent[unit]]
            unit = parent[unit]
        return unit

    for row in rows:
        for unit in row.units[1:]:
            parent[root(unit)] = root(row.units[0])
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for position, row in enumerate(rows):
        groups[root(row.units[0])].append(position)
    if len(groups) == 1:
        return []
    taken: list[int] = []
    order = sorted(groups.values(), key=lambda members: hash64(seed, "group", members[0]))
    for members in order:
        if len(taken) + len(members) <= num_rows:
            taken += members
    return sorted(taken)


def _drawn_units(rows: Sequence[RowUnits], num_rows: int, seed: int) -> Cut:
    units = sorted({unit for row in rows for unit in row.units}, key=lambda unit: (hash64(seed, "unit", unit), unit))
    rank = {unit: number for number, unit in enumerate(units)}
    first = [min(rank[unit] for unit in row.units) for row in rows]
    last = [max(rank[unit] for unit in row.units) for row in rows]
    shares = {label: count / len(rows) for label, count in Counter(row.label for row in rows).items()}

    def cut_at(drawn: int) -> Cut:
        """Return the cut when the first `drawn` units belong to the new split."""
        inside: dict[Hashable, list[int]] = {label: [] for label in shares}
        for position, row in enumerate(rows):
            if last[position] < drawn:
                inside[row.label].append(position)
        total = min(num_rows, *(int(len(positions) / shares[label]) for label, positions in inside.items()))
        taken: list[int] = []
        for label, positions in inside.items():
            positions.sort(key=lambda position: hash64(seed, "row", position))
            taken += positions[: round(total * shares[label])]
        kept = set(taken)
        lost = [position for position in range(len(rows)) if first[position] < drawn and position not in kept]
        return Cut(sorted(taken), lost)

    low, high, best = 1, len(units), Cut([], [])
    while low <= high:  # binary search: the more units are drawn, the more rows are selected, and the more are lost
        drawn = (low + high) // 2
        cut = cut_at(drawn)
        affordable = len(cut.lost) <= MAX_LOST * len(rows)
        if affordable and (len(cut.taken), -len(cut.lost)) > (len(best.taken), -len(best.lost)):
            best = cut
        if affordable and len(cut.taken) < num_rows:
            low = drawn + 1
        else:
            high = drawn - 1
    return best


VALIDATION = "validation"
_cuts: dict[str, tuple[Cut, str]] = {}
"""Entry, and state of its files -> its cut, with a note: a run opens its data often, and a cut reads every row."""


class HeldOutDataset(WrappedDataset):
    """Dataset whose split `data.split` gives a share of its rows to a new split `validation`.

    The fingerprint covers which rows are held out.
    """

    def __init__(self, dataset: Dataset, data: Data) -> None:
        super().__init__(dataset)
        require_split(dataset, data.split)
        if VALIDATION in dataset.splits:
            message = f"there is a split `{VALIDATION}`, and `validation = {data.validation}` would make another one"
            raise DataError(message, where=data.path, hint="leave `validation` out")
        self.divided, self.task = data.split, getattr(dataset, "task", data.task)
        files = [
            Path(data.path),
            *(Path(data.path).iterdir() if Path(data.path).is_dir() else ()),
            Path(data.prompt or "."),
        ]
        states = sorted((str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.exists())
        key = f"{data.model_dump_json()} {states}"
        rows = min(dataset.splits[data.split], data.max_rows or dataset.splits[data.split])
        if key not in _cuts:
            _cuts[key] = _cut(dataset, data, rows)
        cut, note = _cuts[key]
        self._held_out, left_out = cut.taken, {*cut.taken, *cut.lost}
        self.notes = [*dataset.notes, *filter(None, [note])]
        self._trained = [index for index in range(rows) if index not in left_out]
        self.splits = {**dataset.splits, data.split: len(self._trained), VALIDATION: len(self._held_out)}
        self.info = {**dataset.info, "splits": {split: {"rows": count} for split, count in self.splits.items()}}

    @property
    def fingerprint(self) -> str:
        return f"{hash64(self.dataset.fingerprint, *self._held_out):016x}"

    def rows(self, split: str) -> Sequence[Row]:
        if split not in (self.divided, VALIDATION):
            return self.dataset.rows(split)
        rows, indices = self.dataset.rows(self.divided), self._held_out if split == VALIDATION else self._trained
        return Rows(len(indices), lambda index: rows[indices[index]])


def _cut(dataset: Dataset, data: Data, count: int) -> tuple[Cut, str]:
    """Return the rows to hold out and those that fit neither split, and `_note_on_images`.

    Where too many rows have the same text (one question about many images), only images decide: the question with
    another image is another prompt.

    Raises: DataError if too many rows share their images.
    """
    rows, num_rows, shown = dataset.rows(data.split), max(1, round(float(data.validation or 0) * count)), _shown(data)
    images: list[tuple[str, ...]] = [()] * count
    texts = [f"row {index}" for index in range(count)]
    for index in range(count):
        with suppress(DataError):  # the checks report a row that cannot be read; it shares nothing with others
            texts[index], images[index] = (
                prompt_of(dataset, rows[index], shown),
                tuple(m.sha256 for m in rows[index].media),
            )
    both = [RowUnits((*own, text), "") for own, text in zip(images, texts, strict=True)]
    cut = cut_rows(both, num_rows, seed=data.validation_seed)
    if 2 * len(cut.taken) < num_rows:
        alone = [RowUnits(own or (text,), "") for own, text in zip(images, texts, strict=True)]
        cut = cut_rows(alone, num_rows, seed=data.validation_seed)
    if not cut.taken:
        unread = [] if any(images) else [note for note in dataset.notes if UNREAD in note]
        raise DataError(
            f"no {num_rows:,} of {count:,} rows can be held out: too many share an image or the text of their prompt",
            where=data.path,
            hint="; ".join(unread) or 'name other rows: validation = "rows.jsonl"',
        )
    return cut, _note_on_images(cut, [bool(own) for own in images])


def _note_on_images(cut: Cut, pictured: Sequence[bool]) -> str:
    """Return a note if the share of held-out rows with images differs from that in training by more than chance."""
    out, own = {*cut.taken, *cut.lost}, [pictured[index] for index in cut.taken]
    stay = [has for index, has in enumerate(pictured) if index not in out]
    share = sum(pictured) / len(pictured)
    error = (len(own) * share * (1 - share)) ** 0.5  # of a draw row by row
    if abs(sum(own) - share * len(own)) <= max(2, len(own) / 5, 3 * error):
        return ""
    numbers = (
        f"{sum(own):,} of {len(own):,} validation rows have images, and {sum(stay):,} of {len(stay):,} in training"
    )
    why = "rows that share an image or the text of their prompt stay together, in groups that do not fit the share"
    return f'{numbers}: {why}; name a file of validation rows of your own: validation = "rows.jsonl"'


def _shown(data: Data) -> frozenset[str] | None:
    """Return the columns that the entry's prompt template shows; None if there is none, or it may show any."""
    if data.prompt is None:
        return None
    from jinja2.meta import find_undeclared_variables

    names = find_undeclared_variables(parse_template(read_template(Path(data.prompt)), data.prompt))
    return None if "columns" in names else frozenset(names)


def prompt_of(dataset: Dataset, row: Row, shown: frozenset[str] | None = None) -> str:
    """Return the text of a row's prompt: the columns `shown`, the prompt column, or all columns but the answers."""
    roles = dataset.info.get("columns") or {}
    if shown is None and roles.get("prompt") in row.columns:
        turns = read_messages(row.columns[roles["prompt"]], row.place)[0]
        return " ".join(word for turn in turns for word in (turn.role, *turn.content.split()))
    names = row.columns.keys() - {roles.get("answer"), roles.get("response")} if shown is None else shown
    values = {name: row.columns[name] for name in sorted(names & row.columns.keys())}
    return " ".join(canonical_json(values).decode().split())


def open_dataset(data: Data) -> Dataset:
    """Open a `[[data]]` entry. No row is read and no image is decoded yet, unless a share of the rows is held out.

    Raises: DataError when nothing is at `path`, or the data there cannot be read.
    """
    if isinstance(data.validation, float):
        return HeldOutDataset(open_dataset(data.model_copy(update={"validation": None})), data)
    path = Path(data.path)
    if not data.path.startswith("hub:") and (path / INFO_FILE).is_file():
        # `table` is the default in the recipe, and wrong here: dataset.json of a prepared folder names the task.
        task = None if data.task == "table" else data.task
        return PreparedDataset(path, name=data.name, task=task)
    return TableDataset(data)
