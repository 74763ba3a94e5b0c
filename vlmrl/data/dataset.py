"""Interface of datasets (rows made on access, decoded images, hashes of rows), and folders that `vlmrl prep` made.

table_dataset.py reads the user's own tables; open_dataset.py chooses between the two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmrl.data.images import ImageStore, decode_cached
from vlmrl.errors import DataError
from vlmrl.store.checkpoints import file_facts
from vlmrl.store.table_reader import damage_told, open_parquet
from vlmrl.types import Media, Row, Rows
from vlmrl.untrusted import parse_json

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


class Dataset(Protocol):
    """Interface of every source of rows.

    Attributes:
        name: short name of the source, as in metrics and rollouts.
        path: the folder, the file or the hub name, as text.
        info: dataset.json; for a table, a similar mapping (task, splits, role -> column).
        splits: split -> number of rows.
        notes: remarks for the user about the reading of the data; one sentence each.
    """

    @property
    def name(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def info(self) -> Mapping[str, Any]: ...
    @property
    def splits(self) -> Mapping[str, int]: ...
    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def fingerprint(self) -> str:
        """Hash of the content; for a table it is computed on first access."""
        ...

    def rows(self, split: str) -> Sequence[Row]:
        """Return the rows of a split; each is made when it is indexed. Raises: DataError for an unknown split."""
        ...

    def image_bytes(self, media: Media) -> bytes:
        """Return the bytes of the image file as stored."""
        ...

    def image(self, media: Media) -> PILImage:
        """Return the image as PIL RGB, upright. Raises: DataError with the image's place when the file is broken."""
        ...

    def place_of(self, media: Media) -> str:
        """Return the place of an image, for messages: its row, and its path if it is a file of its own."""
        ...


class WrappedDataset:
    """Dataset around another one: all that a subclass does not change is that of the other, `dataset`."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.name, self.path = dataset, dataset.name, dataset.path
        self.info, self.splits, self.notes = dataset.info, dataset.splits, dataset.notes

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def rows(self, split: str) -> Sequence[Row]:
        return self.dataset.rows(split)

    def image_bytes(self, media: Media) -> bytes:
        return self.dataset.image_bytes(media)

    def image(self, media: Media) -> PILImage:
        return self.dataset.image(media)

    def place_of(self, media: Media) -> str:
        return self.dataset.place_of(media)


def require_split(dataset: Dataset, split: str) -> None:
    """Raise a DataError that names the dataset's splits, unless `split` is one of them."""
    if split not in dataset.splits:
        listing = ", ".join(f"{name} ({rows} rows)" for name, rows in dataset.splits.items()) or "none"
        raise DataError(f"no split `{split}` in {dataset.path}", hint=f"splits there: {listing}")


def canonical_json(value: Any) -> bytes:
    """Return the canonical spelling of a JSON value, for hashing."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def content_hash(media: Sequence[Media], columns: Mapping[str, Any], truth: Mapping[str, Any]) -> bytes:
    """Return the SHA-256 of a row's images, columns and truth. The row's id and the name of its source do not count."""
    parts = [[one.sha256 for one in media], dict(columns), dict(truth)]
    return hashlib.sha256(canonical_json(parts)).digest()


INFO_FILE = "dataset.json"
SCHEMA = 1
_REMAKE = "make the dataset again with `vlmrl prep ... --force`"


class PreparedDataset:
    """Dataset folder that `vlmrl prep` made."""

    def __init__(self, path: Path, *, name: str | None = None, task: str | None = None) -> None:
        self._folder, self.path = path, str(path)
        self.info = read_info(path)
        self.name = name or str(self.info["name"])
        self.task = task or str(self.info["task"])
        self.notes: Sequence[str] = ()
        self.splits = {split: int(fields["rows"]) for split, fields in self.info["splits"].items()}
        self._tables: dict[str, Any] = {}
        self._store: ImageStore | None = None

    @property
    def fingerprint(self) -> str:
        return str(self.info["fingerprint"])

    def rows(self, split: str) -> Sequence[Row]:
        table = self._table(split)

        def make(index: int) -> Row:
            fields = table.slice(index, 1).to_pylist()[0]
            prompt_id, truth, images = fields.pop("prompt_id"), fields.pop("truth"), fields.pop("images")
            media = tuple(Media(**image) for image in images)
            return Row(prompt_id, self.name, self.task, truth, media, fields, f"{self.path} {split} row {index}")

        return Rows(self.splits[split], make)

    def image_bytes(self, media: Media) -> bytes:
        if self._store is None:
            self._store = ImageStore(self._folder)
        return self._store.read(media.sha256)

    def image(self, media: Media) -> PILImage:
        return decode_cached(self, media)

    def place_of(self, media: Media) -> str:
        for split in self.splits:
            for index, images in enumerate(self._table(split).column("images").to_pylist()):
                if any(image["sha256"] == media.sha256 for image in images):
                    return f"{self.path} {split} row {index}, image {media.sha256[:16]}"
        return f"{self.path}, image {media.sha256[:16]}"

    def __reduce__(self):
        return (_reopen, (self._folder, self.name, self.task))

    def _table(self, split: str) -> Any:
        require_split(self, split)
        if split not in self._tables:
            path = self._folder / f"{split}.parquet"
            failure = f"split `{split}` cannot be read", DataError
            with damage_told(path, *failure, hint=_REMAKE):
                # Rows that were changed since count as other data, as changed images do.
                if self.info["files"].get(path.name) != file_facts(path):
                    raise OSError("it was changed since dataset.json was written")
            with open_parquet(path, *failure, hint=_REMAKE) as file:
                table = file.read()
            missing = {"prompt_id", "truth", "images"} - set(table.column_names)
            if missing or table.num_rows != self.info["splits"][split]["rows"]:
                what = (
                    f"lacks the column {sorted(missing)[0]}"
                    if missing
                    else f"has {table.num_rows} rows; dataset.json states another number"
                )
                raise DataError(f"split `{split}` {what}", where=str(path), hint=_REMAKE)
            self._tables[split] = table
        return self._tables[split]


def _reopen(path: Path, name: str, task: str) -> PreparedDataset:
    return PreparedDataset(path, name=name, task=task)


def read_info(path: Path) -> dict[str, Any]:
    """Return dataset.json of a prepared folder, after a check of all fields that readers rely on.

    Raises: DataError when it is missing, damaged, of another schema, or lacks a field.
    """
    file = path / INFO_FILE
    try:
        info = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"{path} is not a prepared dataset: {error.strerror or error}", where=str(file), hint="vlmrl prep --help"
        ) from error
    except ValueError as error:
        raise DataError(f"dataset.json is damaged: {error}", where=str(file), hint=_REMAKE) from error
    if not isinstance(info, dict) or info.get("schema") != SCHEMA:
        schema = info.get("schema") if isinstance(info, dict) else None
        raise DataError(
            f"dataset.json has schema {schema!r}; this vlmrl reads schema {SCHEMA}", where=str(file), hint=_REMAKE
        )
    kinds = {"name": str, "task": str, "fingerprint": str, "splits": dict, "files": dict}
    for key, kind in kinds.items():
        if not isinstance(info.get(key), kind):
            raise DataError(f"dataset.json has no `{key}`", where=str(file), hint=_REMAKE)
    for split, fields in info["splits"].items():
        if not isinstance(fields, dict) or not isinstance(fields.get("rows"), int):
            raise DataError(f"dataset.json gives no row count for split `{split}`", where=str(file), hint=_REMAKE)
    return info


@dataclass(frozen=True)
class SavedDeck:
    """Position in the order of one source, as a checkpoint has it."""

    epoch: int
    position: int
    waiting: list[tuple[int, int]]


@dataclass(frozen=True)
class SavedStream:
    """Position of a stream, as a checkpoint has it. Each list has one entry per source."""

    seed: int
    lengths: list[int]
    shares: list[float]
    drawn: list[int]
    decks: list[SavedDeck]

    def __post_init__(self) -> None:
        parts = zip(self.lengths, self.decks, strict=False)
        within = all(0 <= one.position <= n and all(0 <= row < n for row, _ in one.waiting) for n, one in parts)
        if not within or {len(self.lengths)} != {len(one) for one in (self.shares, self.drawn, self.decks)}:
            raise ValueError("the position in the data does not fit the number of rows")
