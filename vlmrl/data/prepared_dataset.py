"""Dataset folders that `vlmrl prep` made. Rows and images are read on access."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.data.dataset import Rows, decode_cached, require_split
from vlmrl.data.images import ImageStore
from vlmrl.errors import DataError
from vlmrl.store.checkpoints import file_facts
from vlmrl.types import Media, Row
from vlmrl.untrusted import file_problem, parse_json

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

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
        import pyarrow as pa
        import pyarrow.parquet as pq

        require_split(self, split)
        if split not in self._tables:
            path = self._folder / f"{split}.parquet"
            try:
                if problem := file_problem(path):
                    raise OSError(f"it {problem}")
                # Rows that were changed since count as other data, as changed images do.
                if self.info["files"].get(path.name) != file_facts(path):
                    raise OSError("it was changed since dataset.json was written")
                table = pq.read_table(path)
            except (OSError, pa.ArrowException) as error:
                raise DataError(f"split `{split}` cannot be read: {error}", where=str(path), hint=_REMAKE) from error
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
