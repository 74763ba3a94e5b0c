"""Table files of others, read in order and a few rows at a time: JSONL, CSV, JSON, Parquet and Arrow.

Text files are read line by line, and not with Arrow's readers. So an error names file and line, integers of any size
and cells of mixed types keep their values, and the reading continues after a damaged row. Parquet is read by row group,
so that memory stays bounded. A path may be a file, a folder of files by split, a saved dataset, or a dataset of the
hub; the `datasets` library opens the last two and runs no code from them.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from vlmrl.data.table_values import show
from vlmrl.errors import DataError, nearest
from vlmrl.store.table_reader import damage_told, file_batches, open_parquet
from vlmrl.untrusted import file_problem, parse_json

SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")
LINED = (".jsonl", ".csv")
"""File endings for which messages name a row by its line. For other files, they name the row's number, from 0."""
MAX_CELL_CHARS = 1 << 30
"""Maximum length of a CSV cell, in characters. An image in base64 is one long cell."""
_NOT_UTF8, _SAVE_AS_UTF8 = "not UTF-8 text", "save the file as UTF-8"
_BOM = b"\xef\xbb\xbf"
_HINTS = {
    ".jsonl": "JSONL has one JSON object per line",
    ".csv": 'put text with commas or line breaks in double quotes (a quote in it is written "")',
}
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars"}

Row = TypeVar("Row")
TextRow = dict[str, Any] | bytes | str
"""Row of a text file: its cells, or the bytes of a JSON line, or a text with the reason why it is not a row."""


def require_file(path: Path, *, hint: str | None = None) -> None:
    """Raise a DataError if a table is not a readable regular file, or is a Git LFS pointer instead of the table."""
    try:
        problem = file_problem(path)
    except FileNotFoundError as error:
        raise DataError(f"no such file: {path}", hint=hint) from error
    except OSError as error:
        raise _unreadable(error, path, hint) from error
    if problem:
        raise DataError(f"the table {problem}", where=str(path), hint=hint)


def place_of(path: Path | str, number: int) -> str:
    """Return the place of a row for messages: `rows.jsonl:17` (lines from 1), `rows.parquet row 17` (rows from 0)."""
    return f"{path}:{number}" if str(path).lower().endswith(LINED) else f"{path} row {number}"


def text_rows(path: Path | str) -> Iterator[tuple[int, TextRow]]:
    """Yield (line or number, row) of a JSONL, CSV or JSON file.

    Lines of JSONL are yielded as bytes, for `parsed_row`. JSONL and CSV are read line by line; JSON is held in memory
    as a whole.

    Raises: DataError for a file that cannot be read, and for an error that makes the whole file useless.
    """
    path = Path(path)
    readers = {".jsonl": _jsonl_lines, ".csv": _csv_rows, ".json": _json_rows}
    read = readers.get(path.suffix.lower())
    if read is None:
        raise _no_table(path)
    try:
        yield from read(path)
    except UnicodeDecodeError as error:
        raise _not_utf8(path) from error
    except OSError as error:
        raise _unreadable(error, path) from error


def parsed_row(row: TextRow) -> dict[str, Any] | str:
    """Return the cells of a row, or a text with the reason why it is not a row."""
    if not isinstance(row, bytes):
        return row
    try:
        value = parse_json(row.removeprefix(_BOM).decode("utf-8", "surrogatepass"), unique_keys=True)
    except UnicodeDecodeError as error:
        return f"{_NOT_UTF8}: {error.reason} at byte {error.start} of the line"
    except ValueError as error:
        return f"not JSON: {error}"
    return value if isinstance(value, dict) else _no_object(value)


def sound_rows(path: Path | str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line or number, cells) of a text file.

    Raises: DataError with the place of the first row that cannot be read; when there are no rows; as `text_rows` does.
    """
    number = None
    for number, row in text_rows(path):
        cells = parsed_row(row)
        if isinstance(cells, str):
            hint = _SAVE_AS_UTF8 if cells.startswith(_NOT_UTF8) else _HINTS.get(Path(path).suffix.lower())
            raise DataError(cells, where=place_of(path, number), hint=hint)
        yield number, cells
    if number is None:
        raise DataError("the table has no rows", where=str(path))


def in_portions(
    rows: Iterable[tuple[int, Row]], most_rows: int, most_bytes: int | None = None
) -> Iterator[list[tuple[int, Row]]]:
    """Yield rows of a text file as lists of at most `most_rows`; a list ends when its JSONL lines have `most_bytes`."""
    portion: list[tuple[int, Row]] = []
    size = 0
    for number, row in rows:
        portion.append((number, row))
        size += len(row) if isinstance(row, bytes) else 0
        if len(portion) == most_rows or (most_bytes is not None and size >= most_bytes):
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _jsonl_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as file:
        lines = chain.from_iterable(map(bytes.splitlines, file))  # \r also ends a line, as in Python's text files
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        value = parse_json(text, unique_keys=True)
    except ValueError as error:
        hint = "a file with one object per line is JSONL: rename it to end in .jsonl"
        is_lines = str(error).startswith("Extra data")
        raise DataError(f"not JSON: {error}", where=str(path), hint=hint if is_lines else None) from error
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise DataError("expected a list of objects (or an object with such a list as `data`)", where=str(path))
    yield from enumerate(row if isinstance(row, dict) else _no_object(row) for row in value)


def _csv_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    old_limit = csv.field_size_limit(min(sys.maxsize, MAX_CELL_CHARS))
    start = 1  # line where the row begins; a row can span several lines
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            header = next(reader, [])
            _require_header(header, path)
            start = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(header):
                    yield start, dict(zip(header, cells, strict=True))
                elif cells:
                    yield start, f"the row has {len(cells)} cells, the header has {len(header)}"
                start = reader.line_num + 1
    except csv.Error as error:
        raise DataError(f"not CSV: {error}", where=f"{path}:{start}") from error
    finally:
        csv.field_size_limit(old_limit)


def _require_header(header: Sequence[str], path: Path) -> None:
    if len(set(header)) < len(header) or not header or not all(name.strip() for name in header):
        raise DataError("the header is empty, or has an empty or repeated column name", where=f"{path}:1")
    mark = next((sign for sign in _SEPARATORS if len(header) == 1 and sign in header[0]), None)
    if mark is not None:
        raise DataError(
            f"the header is one cell with {mark!r} in it",
            where=f"{path}:1",
            hint=f"its cells are separated by {_SEPARATORS[mark]}: save it with commas",
        )


def _no_object(value: Any) -> str:
    return f"a row is {show(value, 60)}, not an object"


def _not_utf8(path: Path) -> DataError:
    """Return the error that names the first line which is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                message = f"{_NOT_UTF8}: {error.reason} at byte {error.start} of the line"
                return DataError(message, where=f"{path}:{number}", hint=_SAVE_AS_UTF8)
    return DataError(_NOT_UTF8, where=str(path), hint=_SAVE_AS_UTF8)


def _unreadable(error: OSError, path: Path, hint: str | None = None) -> DataError:
    return DataError(f"the table cannot be read: {error.strerror or error}", where=str(path), hint=hint)


def parquet_table(path: Path | str) -> AbstractContextManager[Any]:
    """Open a Parquet file (`open_parquet`). Raises: DataError when it is no Parquet file, or damaged."""
    return open_parquet(path, "not a readable Parquet file", DataError)


def parquet_columns(path: Path | str) -> list[str]:
    """Return the column names of a Parquet file. Raises: DataError as `parquet_table`."""
    with parquet_table(path) as file:
        return list(file.schema_arrow.names)


def parquet_batches(path: Path | str, columns: Sequence[str], rows: int, group: int | None = None) -> Iterator[Any]:
    """Yield the record batches of a Parquet file (`file_batches`). Raises: DataError as `parquet_table`."""
    with parquet_table(path) as file:
        yield from file_batches(file, rows, columns, group)


def arrow_batches(path: Path | str) -> Iterator[Any]:
    """Yield the record batches of an Arrow file or stream, memory-mapped. Raises: DataError when it cannot be read."""
    import pyarrow as pa

    with damage_told(path, "the table cannot be read", DataError):
        source = pa.memory_map(str(path))
        try:
            reader = pa.ipc.open_file(source)
            yield from (reader.get_batch(number) for number in range(reader.num_record_batches))
        except pa.ArrowInvalid:
            source.seek(0)
            yield from pa.ipc.open_stream(source)


def kind_of_files(files: Sequence[Path]) -> str:
    """Return the ending of the files of one split, in lower case.

    Raises: DataError when a file cannot be read, the files are of several kinds, or there are several text files.
    """
    for file in files:
        require_file(file)
    kinds = {file.suffix.lower() for file in files}
    if len(kinds) > 1:
        raise DataError(
            f"files of several kinds in one split: {', '.join(sorted(kinds))}",
            where=str(files[0].parent),
            hint="name one file, or keep one kind",
        )
    kind = kinds.pop()
    if kind not in SUFFIXES:
        raise _no_table(files[0])
    if kind != ".parquet" and len(files) > 1:
        raise DataError(
            f"{len(files)} {kind} files in one split", where=str(files[0].parent), hint="join them, or name one of them"
        )
    return kind


def _no_table(path: Path) -> DataError:
    return DataError(
        f"{path} is not a kind of table that can be read", hint=f"supported endings: {', '.join(SUFFIXES)}"
    )


SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
    "testing": "test",
}

Table = TypeVar("Table")


def find_tables(path: str) -> dict[str, Any]:
    """Find the tables of a path, without reading their rows.

    Args:
        path: a file, a folder of files (their names contain the split as a word: `train-00000.parquet`; files with
            other names are train), a folder written by `Dataset.save_to_disk`, or `hub:name[#config]`.
    Returns: split -> its files (a list of paths), or a dataset of the `datasets` library, train first (`in_order`). A
        single file is the split `train`, whatever its name.
    Raises: DataError when nothing is at the path, or it cannot be opened.
    """
    if path.startswith("hub:"):
        return in_order(_splits_of(_load_hub(path.removeprefix("hub:")), path))
    place = Path(path)
    if not place.exists():
        hint = "name a table file, a folder of them, or hub:name; `vlmrl prep` makes datasets"
        raise DataError(f"no dataset at {path}", hint=_near_files(place) or hint)
    if not place.is_dir():
        return {"train": [place]}
    return in_order(_splits_of(_load_saved(place), path) if is_saved(place) else _folder_files(place))


def in_order(splits: Mapping[str, Table]) -> dict[str, Table]:
    """Return splits in their usual order: train, validation, test, then the others in the given order.

    The order is used by the search for copies: it reports images of a split that are also in an earlier split.
    """
    usual = [name for name in ("train", "validation", "test") if name in splits]
    return {name: splits[name] for name in dict.fromkeys((*usual, *splits))}


def is_saved(place: Path) -> bool:
    """Return whether a folder was written by `Dataset.save_to_disk`."""
    return (place / "dataset_info.json").is_file() or (place / "dataset_dict.json").is_file()


def _folder_files(place: Path) -> dict[str, list[Path]]:
    """Return split -> the table files of a folder, sorted. Raises: DataError when there are none."""
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


def _split_of(file: Path, root: Path) -> str:
    """Return the split that is named in a file's name or folders; train if none is.

    `train-00000-of-00003.parquet`, `train/0.parquet` and `DF20-train_metadata.csv` are train.
    """
    for part in (file.name, *reversed(file.relative_to(root).parts[:-1])):
        for word in re.findall(r"[A-Za-z]+", part):
            if word.lower() in SPLIT_NAMES:
                return SPLIT_NAMES[word.lower()]
    return "train"


def _load_hub(spec: str) -> Any:
    """Open a hub dataset, which the `datasets` library downloads, or a local folder that `load_dataset` can read."""
    name, _, config = spec.partition("#")
    if not name.strip("/"):
        raise DataError("`hub:` without a dataset name", hint='path = "hub:org/name", or "hub:org/name#config"')
    import datasets

    try:
        return datasets.load_dataset(name, config or None)
    except Exception as error:  # `datasets` raises many types: its own, and those of the network libraries
        text = str(error).strip().split("\n")[0]
        raise DataError(
            f"the hub dataset `{name}` cannot be loaded: {type(error).__name__}: {text}",
            hint="check the name, the config (`hub:name#config`) and the network, or name a copy on this machine; gated"
            " datasets need `hf auth login`",
        ) from error


def _load_saved(place: Path) -> Any:
    import datasets

    try:
        return datasets.load_from_disk(str(place))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"the saved dataset cannot be read: {error}", where=str(place)) from error


def _splits_of(loaded: Any, label: str) -> dict[str, Any]:
    """Return the splits that have rows, of a dataset of the `datasets` library.

    If a split selects or reorders the rows of its files (`_indices`), it is written again with its rows in order.
    """
    splits = {str(name): part for name, part in loaded.items()} if hasattr(loaded, "items") else {"train": loaded}
    with_rows = {
        split: part if part._indices is None else part.flatten_indices()
        for split, part in splits.items()
        if part.num_rows
    }
    if not with_rows:
        raise DataError("the dataset has no rows", where=label)
    return with_rows


def _near_files(place: Path) -> str | None:
    if not place.parent.is_dir():
        return None
    names = [
        path.name
        for path in place.parent.iterdir()
        if path.is_dir() or (path.is_file() and path.suffix.lower() in SUFFIXES)
    ]
    near = nearest(place.name, names)
    return f"did you mean {place.parent / near}?" if near else None
