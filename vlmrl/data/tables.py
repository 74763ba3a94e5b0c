"""Tables with random access to their rows: files of Parquet, JSONL, JSON or CSV, folders of files, and hub datasets."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from vlmrl.data.cells import python_rows
from vlmrl.data.table_files import kind_of_files, place_of, sound_rows
from vlmrl.data.table_sources import find_tables
from vlmrl.errors import DataError

IN_MEMORY_BYTES = 1 << 30
"""Maximum uncompressed size in bytes of a Parquet table that is held in memory. A larger one is unpacked once into a
memory-mapped file in the cache folder, because random access to compressed rows would read a whole row group each time.
"""


class RawTable(Protocol):
    """Table that returns one row at a time, as plain Python values."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> dict[str, Any]:
        """Return the row's values by column, as a fresh dict."""
        ...

    def where(self, index: int) -> str:
        """Return the place of the row for messages; see `place_of`."""
        ...

    def digest(self) -> str:
        """Return a hash of the content."""
        ...


class TextTable:
    """Table of a text file, held in memory. A column may be missing in some rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: list[Mapping[str, Any]] = []
        self._places: list[int] = []
        for place, row in sound_rows(path):
            self._rows.append(row)
            self._places.append(place)
        self.columns: Sequence[str] = list(dict.fromkeys(key for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def where(self, index: int) -> str:
        return place_of(self._path, self._places[index])

    def digest(self) -> str:
        return file_digest([self._path])


class ArrowTable:
    """Table of pyarrow, in memory or memory-mapped."""

    def __init__(self, label: str, table: Any, digest: Callable[[], str]) -> None:
        self._label, self._table, self._digest = label, table, digest
        self.columns: Sequence[str] = list(table.column_names)

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        """Return the row's values by column. Raises: DataError with row and column for a value Python cannot hold."""
        return python_rows(self._table.slice(index, 1), lambda _: self.where(index))[0]

    def where(self, index: int) -> str:
        return f"{self._label} row {index}"

    def digest(self) -> str:
        return self._digest()


def open_tables(path: str) -> dict[str, RawTable]:
    """Open the tables of a path: split -> table, train first.

    Args:
        path: see `find_tables`.
    Raises: DataError when nothing is at the path, or it cannot be read.
    """
    label = path if path.startswith("hub:") else str(Path(path))
    return {
        split: open_files(table) if isinstance(table, list) else _open_dataset(f"{label} {split}", table)
        for split, table in find_tables(path).items()
    }


def open_files(files: Sequence[Path]) -> RawTable:
    """Open the files of one split as one table. Raises: DataError when their kinds differ or one cannot be read."""
    return _open_parquet(files) if kind_of_files(files) == ".parquet" else TextTable(files[0])


def file_digest(paths: Iterable[Path]) -> str:
    """Return the SHA-256 over the bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


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
            tables = [_plain_columns(pq.ParquetFile(file).read()) for file in files]
            _one_schema([table.schema for table in tables], files)
            table = pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError, OSError) as error:
        raise DataError(f"not a readable Parquet file: {error}", where=label) from error
    if not table.num_rows:
        raise DataError("the table has no rows", where=label)
    return ArrowTable(label, table, lambda: file_digest(files))


def _plain_columns(table: Any) -> Any:
    """Return a table without dictionary encoding, which other shards of the same table may lack."""
    import pyarrow as pa

    for index, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


def _one_schema(schemas: Sequence[Any], files: Sequence[Path]) -> Any:
    """Return the schema that holds the rows of all files. Raises: DataError that names the first file that differs."""
    import pyarrow as pa

    schema = schemas[0]
    for each, file in zip(schemas[1:], files[1:], strict=True):
        try:
            schema = pa.unify_schemas([schema, each], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(
                f"its columns do not fit those of {files[0].name}: {error}",
                where=str(file),
                hint="write all files of a split with the same types",
            ) from error
    return schema


def _unpacked(files: Sequence[Path]) -> Any:
    """Return the rows of Parquet files as a memory-mapped Arrow file in the cache folder, written on first use."""
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
            empty = [_plain_columns(pq.read_schema(file).empty_table()).schema for file in files]
            schema = _one_schema(empty, files)
            with part.open("wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for file in files:
                    for batch in pq.ParquetFile(file).iter_batches(batch_size=256):
                        writer.write_table(
                            pa.concat_tables(
                                [_plain_columns(pa.table(batch)), schema.empty_table()], promote_options="permissive"
                            ).select(schema.names)
                        )
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def cache_folder() -> Path:
    """Return `$VLMRL_CACHE`, else `~/.cache/vlmrl`. All files in it can be removed at any time."""
    return Path(os.environ.get("VLMRL_CACHE") or Path.home() / ".cache" / "vlmrl")


def _open_dataset(label: str, part: Any) -> RawTable:
    """Open one split of a dataset of the `datasets` library."""
    files = [Path(file["filename"]) for file in part.cache_files]

    def digest() -> str:
        return file_digest(sorted(files)) if files else hashlib.sha256(str(part._fingerprint).encode()).hexdigest()

    return ArrowTable(label, part.data.table, digest)
