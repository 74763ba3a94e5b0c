"""Raw tables: Parquet, JSONL, JSON, CSV, folders of them, and hub datasets, behind one small protocol."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from vlmrl.data.unreadable import unreadable_cell
from vlmrl.errors import DataError
from vlmrl.json_text import parse_json
from vlmrl.regular_file import file_problem

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
IN_MEMORY_BYTES = 1 << 30
"""Parquet of more than this is unpacked once into a memory-mapped file in the cache folder: random access to rows of
compressed row groups would read a whole group each time."""
SPLIT_NAMES = {"train": "train", "training": "train", "validation": "validation", "valid": "validation",
                "val": "validation", "dev": "validation", "test": "test", "testing": "test"}  # fmt: skip


Table = TypeVar("Table")


class RawTable(Protocol):
    """Rows as plain Python values, one at a time."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """The row's values by column; a fresh dict."""
        ...

    def where(self, index: int) -> str:
        """How a person finds the row: `rows.jsonl:17`, `rows.parquet row 17` (rows count from 0, lines from 1)."""
        ...

    def digest(self) -> str:
        """Hash of the content."""
        ...


class ListTable:
    """Rows held in memory, from a text file. Missing keys of a row are missing columns of that row only."""

    def __init__(self, path: Path, rows: Sequence[Mapping[str, Any]], lines: Sequence[int] | None = None) -> None:
        self._path, self._rows, self._lines = path, rows, lines
        self.columns: Sequence[str] = list(dict.fromkeys(key for row in rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def where(self, index: int) -> str:
        return f"{self._path}:{self._lines[index]}" if self._lines else f"{self._path} row {index}"

    def digest(self) -> str:
        return file_digest([self._path])


class ArrowTable:
    """A pyarrow table, in memory or memory-mapped."""

    def __init__(self, label: str, table: Any, digest: Callable[[], str]) -> None:
        self._label, self._table, self._digest = label, table, digest
        self.columns: Sequence[str] = list(table.column_names)

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        """Return the row's values. Raises: DataError with column and row for a value that Python cannot hold."""
        few = self._table.slice(index, 1)
        try:
            return few.to_pylist()[0]
        except (ValueError, OverflowError, KeyError) as error:  # a date beyond year 9999, an unknown time zone
            raise unreadable_cell(few, [self.where(index)]) from error

    def where(self, index: int) -> str:
        return f"{self._label} row {index}"

    def digest(self) -> str:
        return self._digest()


def open_tables(path: str) -> dict[str, RawTable]:
    """The tables of a path, by split, train first (`in_order`). A single file is the split `train`, whatever its name.

    Args:
        path: a file, a folder of files (their names hold the split as a word: `train-00000.parquet`; other names are
            train), a folder written by `Dataset.save_to_disk`, or `hub:name` with `#config` if any.
    Raises: DataError when there is nothing, or it cannot be read.
    """
    if path.startswith("hub:"):
        return in_order(_arrow_splits(load_hub(path.removeprefix("hub:")), path))
    place = Path(path)
    if not place.exists():
        raise DataError(
            f"no dataset at {path}", hint=_near_files(place) or "make one with `vlmrl prep`, or name a table file"
        )
    if not place.is_dir():
        return {"train": open_files([place])}
    if is_saved(place):
        return in_order(_arrow_splits(load_saved(place), str(place)))
    return in_order({split: open_files(files) for split, files in table_files(place).items()})


def in_order(splits: Mapping[str, Table]) -> dict[str, Table]:
    """Splits as people think of them: train, validation, test, then the others as they come. What looks for copies asks
    which images of a split are in an earlier one.
    """
    known = [name for name in ("train", "validation", "test") if name in splits]
    return {name: splits[name] for name in dict.fromkeys((*known, *splits))}


def table_files(place: Path) -> dict[str, list[Path]]:
    """The table files of a folder by split, sorted. Raises: DataError when there are none."""
    by_split: dict[str, list[Path]] = {}
    for file in sorted(file for pattern in SUFFIXES for file in place.rglob(f"*{pattern}")):
        if not any(part.startswith(".") for part in file.relative_to(place).parts):
            by_split.setdefault(_split_of(file, place), []).append(file)
    if not by_split:
        raise DataError(
            f"the folder {place} holds no dataset",
            hint=f"expected dataset.json, or files ending in {', '.join(SUFFIXES)}",
        )
    return by_split


def file_digest(paths: Iterable[Path]) -> str:
    """SHA-256 over the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def _split_of(file: Path, root: Path) -> str:
    """`train-00000-of-00003.parquet`, `train/0.parquet` and `DF20-train_metadata.csv` are train; what names no split is
    train.
    """
    for part in (file.name, *reversed(file.relative_to(root).parts[:-1])):
        for word in re.findall(r"[A-Za-z]+", part):
            if word.lower() in SPLIT_NAMES:
                return SPLIT_NAMES[word.lower()]
    return "train"


def open_files(files: Sequence[Path]) -> RawTable:
    """The files of one split as one table. Raises: DataError when they are of several kinds, or cannot be read."""
    for file in files:
        require_file(file)
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"files of several kinds in one split: {', '.join(sorted(kinds))}", where=str(files[0].parent),
            hint="name one file, or keep one kind",
        )  # fmt: skip
    kind = kinds.pop()
    if kind == ".parquet":
        return _open_parquet(files)
    readers: dict[str, Callable[[Path], RawTable]] = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}
    if kind not in readers:
        raise DataError(f"{files[0]} is not a kind of table that is read", hint=f"endings: {', '.join(SUFFIXES)}")
    if len(files) > 1:
        raise DataError(
            f"{len(files)} {kind} files in one split", where=str(files[0].parent), hint="join them, or name one of them"
        )
    return readers[kind](files[0])


def require_file(path: Path) -> None:
    """Raise a DataError when a table is no regular file, or a pointer of Git LFS in place of one."""
    try:
        problem = file_problem(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from error
    if problem:
        raise DataError(f"the table {problem}", where=str(path))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"not UTF-8 text at byte {error.start}", where=str(path), hint="save the file as UTF-8"
        ) from error
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _read_jsonl(path: Path) -> RawTable:
    rows, lines = [], []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, unique_keys=True)
        except ValueError as error:
            raise DataError(
                f"not JSON: {error}", where=f"{path}:{number}", hint="JSONL has one JSON object a line"
            ) from error
        if not isinstance(row, dict):
            raise DataError(f"a row must be an object, not {type(row).__name__}", where=f"{path}:{number}")
        rows.append(row)
        lines.append(number)
    return _not_empty(ListTable(path, rows, lines), path)


def _read_json(path: Path) -> RawTable:
    try:
        value = parse_json(_read_text(path), unique_keys=True)
    except ValueError as error:
        hint = "one object a line is JSONL: give the file that ending"
        raise DataError(f"not JSON: {error}", where=str(path), hint=hint) from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise DataError("expected a list of objects (or an object with such a list as `data`)", where=str(path))
    return _not_empty(ListTable(path, value), path)


def _read_csv(path: Path) -> RawTable:
    text = _read_text(path)
    old_limit = csv.field_size_limit(min(sys.maxsize, 1 << 30))  # an image in base64 is one long field
    try:
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header = next(reader, [])
        if len(header) == 1 and (other := set(";\t|") & set(header[0])):
            raise DataError(
                f"the header is one cell with {other.pop()!r} in it", where=f"{path}:1", hint="put commas between cells"
            )
        if len(set(header)) < len(header) or not all(name.strip() for name in header):
            raise DataError("the header has an empty or repeated column name", where=f"{path}:1")
        rows, lines, start = [], [], 2
        for cells in reader:
            if cells and len(cells) != len(header):
                raise DataError(
                    f"{len(cells)} cells, the header has {len(header)}", where=f"{path}:{start}",
                    hint='put text with commas or line breaks in double quotes (a quote in it is written "")',
                )  # fmt: skip
            if cells:
                rows.append(dict(zip(header, cells, strict=True)))
                lines.append(start)
            start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", where=str(path)) from error
    finally:
        csv.field_size_limit(old_limit)
    return _not_empty(ListTable(path, rows, lines), path)


def _not_empty(table: ListTable, path: Path) -> RawTable:
    if not len(table):
        raise DataError("the table has no rows", where=str(path))
    return table


def _open_parquet(files: Sequence[Path]) -> RawTable:
    import pyarrow as pa
    import pyarrow.parquet as pq

    label = str(files[0]) if len(files) == 1 else f"{files[0].parent}/*.parquet"
    try:
        metadata = [pq.read_metadata(file) for file in files]
        size = sum(m.row_group(i).total_byte_size for m in metadata for i in range(m.num_row_groups))
        if size > IN_MEMORY_BYTES:
            table = _unpacked(files)
        else:
            tables = [pq.ParquetFile(file).read() for file in files]
            table = pa.concat_tables(tables, promote_options="default")
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", where=label) from error
    if not table.num_rows:
        raise DataError("the table has no rows", where=label)
    return ArrowTable(label, table, lambda: file_digest(files))


def _unpacked(files: Sequence[Path]) -> Any:
    """The files as one memory-mapped Arrow file in the cache folder, made on the first use."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    folder = cache_folder() / "tables"
    path = folder / f"{name}.arrow"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{name}.{os.getpid()}"
        try:
            schema = pa.unify_schemas([pq.read_schema(file) for file in files])
            with part.open("wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for file in files:
                    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
                        writer.write_table(
                            pa.concat_tables([pa.table(batch), schema.empty_table()], promote_options="default").select(
                                schema.names
                            )
                        )
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def cache_folder() -> Path:
    """`$VLMRL_CACHE`, else `~/.cache/vlmrl`. All in it can be removed at any time."""
    return Path(os.environ.get("VLMRL_CACHE") or Path.home() / ".cache" / "vlmrl")


def load_hub(spec: str) -> Any:
    """A hub dataset, or a local folder in a form that `datasets.load_dataset` reads. It is downloaded by that
    library.
    """
    name, _, config = spec.partition("#")
    if not name.strip("/"):
        raise DataError("`hub:` without a dataset name", hint='path = "hub:org/name", or "hub:org/name#config"')
    import datasets

    try:
        return datasets.load_dataset(name, config or None)
    except Exception as error:  # that library raises many kinds, its own and those of the network
        text = str(error).strip().split("\n")[0]
        raise DataError(
            f"the hub dataset `{name}` cannot be loaded: {type(error).__name__}: {text}",
            hint="check the name, the config (`hub:name#config`) and the network, or name a copy on this machine; gated"
            " datasets need `hf auth login`",
        ) from error


def is_saved(place: Path) -> bool:
    """Whether a folder was written by `Dataset.save_to_disk`."""
    return (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file()


def load_saved(place: Path) -> Any:
    """A folder written by `Dataset.save_to_disk`."""
    import datasets

    try:
        return datasets.load_from_disk(str(place))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the saved dataset cannot be read: {error}", where=str(place)) from error


def splits_of(loaded: Any, label: str) -> dict[str, Any]:
    """The splits of a dataset of the `datasets` library that have rows, in their order of rows."""
    splits = {str(name): part for name, part in loaded.items()} if hasattr(loaded, "items") else {"train": loaded}
    out = {
        split: part if part._indices is None else part.flatten_indices()
        for split, part in splits.items()
        if part.num_rows
    }
    if not out:
        raise DataError("the dataset has no rows", where=label)
    return out


def _arrow_splits(loaded: Any, label: str) -> dict[str, RawTable]:
    out: dict[str, RawTable] = {}
    for split, part in splits_of(loaded, label).items():
        files = [Path(file["filename"]) for file in part.cache_files]
        out[split] = ArrowTable(
            f"{label} {split}", part.data.table, lambda part=part, files=files: _arrow_digest(part, files)
        )
    return out


def _arrow_digest(part: Any, files: Sequence[Path]) -> str:
    return file_digest(sorted(files)) if files else hashlib.sha256(str(part._fingerprint).encode()).hexdigest()


def _near_files(place: Path) -> str | None:
    from difflib import get_close_matches

    if not place.parent.is_dir():
        return None
    names = [
        path.name
        for path in place.parent.iterdir()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in SUFFIXES)
    ]
    close = get_close_matches(place.name, names, 1)
    return f"did you mean {place.parent / close[0]}?" if close else None
