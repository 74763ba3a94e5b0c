"""Share of a split that is held out as the split `validation`: `[[data]] validation = 0.1`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from vlmrl.data.cells import read_messages
from vlmrl.data.dataset import Dataset, Rows, WrappedDataset, canonical_json, require_split
from vlmrl.data.validation_cut import Cut, RowUnits, cut_rows
from vlmrl.errors import DataError
from vlmrl.recipe.schema import Data
from vlmrl.recipe.template import parse_template, read_template
from vlmrl.types import Row, hash64

VALIDATION = "validation"
_cuts: dict[str, Cut] = {}
"""Entry, and state of its files -> its cut: a run opens its data several times, and every row is read for a cut."""


class HeldOutDataset(WrappedDataset):
    """Dataset whose split `data.split` gives a share of its rows to a new split `validation`.

    No image, and no text of a prompt, is in both. The fingerprint covers which rows are held out.

    Attributes:
        divided: name of the split that is divided.
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
        self._held_out = _cuts[key].taken
        left_out = {*self._held_out, *_cuts[key].lost}
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


def _cut(dataset: Dataset, data: Data, count: int) -> Cut:
    """Return the rows to hold out, and those that fit neither split.

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
        raise DataError(
            f"no {num_rows:,} of {count:,} rows can be held out: too many share an image or the text of their prompt",
            where=data.path,
            hint='name other rows: validation = "rows.jsonl"',
        )
    return cut


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
