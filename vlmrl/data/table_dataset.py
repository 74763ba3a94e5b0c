"""Tables with random access to their rows, as datasets: Parquet, JSONL, JSON or CSV, folders of files, hub datasets.

Rows have the same form for all tables; the names of the columns have no effect on it. The images of a row are found and
checked when the row is read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from vlmrl.data.dataset import canonical_json, require_split
from vlmrl.data.images import decode_cached, image_hash, probe_image
from vlmrl.data.table_files import find_tables, kind_of_files, parquet_table, place_of, sound_rows
from vlmrl.data.table_values import (
    TRAINING,
    Mapped,
    image_bytes,
    looks_like_image,
    map_columns,
    missing_prompt,
    plain_at,
    python_rows,
    read_answer,
    read_image,
    read_messages,
    read_tools,
    show,
    split_images,
    structured,
)
from vlmrl.errors import DataError
from vlmrl.store.checkpoints import sha256_of
from vlmrl.types import Media, Row, Rows, hash64

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

    from vlmrl.recipe.schema import Data


IN_MEMORY_BYTES = 1 << 30
"""Maximum uncompressed size in bytes of a Parquet table that is held in memory. A larger one is unpacked once into a
memory-mapped file in the cache folder, because random access to compressed rows would read a whole row group each time.
"""


UNREAD = "images that are not read"
"""Words of the note on a column of images that the recipe does not name."""


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
        rows = list(sound_rows(path))
        self._places, self._rows = [place for place, _ in rows], [row for _, row in rows]
        self.columns: Sequence[str] = list(dict.fromkeys(key for row in self._rows for key in row))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        return dict(self._rows[index])

    def where(self, index: int) -> str:
        return place_of(self._path, self._places[index])

    def digest(self) -> str:
        return sha256_of(self._path)


class ArrowTable:
    """Table of pyarrow, in memory or memory-mapped."""

    def __init__(self, label: str, table: Any, digest: Callable[[], str]) -> None:
        self._label, self._table, self.digest = label, table, digest
        self.columns: Sequence[str] = list(table.column_names)

    def __len__(self) -> int:
        return self._table.num_rows

    def row(self, index: int) -> dict[str, Any]:
        """Return the row's values by column. Raises: DataError with row and column for a value Python cannot hold."""
        return python_rows(self._table.slice(index, 1), lambda _: self.where(index))[0]

    def where(self, index: int) -> str:
        return f"{self._label} row {index}"


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


def _open_parquet(files: Sequence[Path]) -> RawTable:
    import pyarrow as pa

    label = str(files[0]) if len(files) == 1 else f"{files[0].parent}/*.parquet"
    size, schemas = 0, []
    for path in files:
        with parquet_table(path) as file:
            size += sum(file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            schemas.append(_plain_columns(pa.Table.from_batches([], file.schema_arrow)).schema)
    schema = _one_schema(schemas, files)
    table = _unpacked(files, schema) if size > IN_MEMORY_BYTES else pa.concat_tables(_parts(files, schema))
    if not table.num_rows:
        raise DataError("the table has no rows", where=label)
    return ArrowTable(label, table, lambda: sha256_of(*files))


def _parts(files: Sequence[Path], schema: Any, rows: int | None = None) -> Iterator[Any]:
    """Yield the rows of Parquet files in the form of `schema`, at most `rows` at a time; None = a file at a time."""
    import pyarrow as pa

    for path in files:
        with parquet_table(path) as file:
            parts = [file.read()] if rows is None else (pa.table(batch) for batch in file.iter_batches(rows))
            for part in parts:
                whole = [_plain_columns(part), pa.Table.from_batches([], schema)]  # `empty_table` would load pandas
                yield pa.concat_tables(whole, promote_options="permissive").select(schema.names)


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


def _unpacked(files: Sequence[Path], schema: Any) -> Any:
    """Return the rows of Parquet files as a memory-mapped Arrow file in the cache folder, written on first use."""
    import pyarrow as pa

    state = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    name = hashlib.sha256(json.dumps(state).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("VLMRL_CACHE") or Path.home() / ".cache" / "vlmrl")
    path = folder / "tables" / f"{name}.arrow"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{name}.{os.getpid()}")
        try:
            with part.open("wb") as sink, pa.ipc.new_file(sink, schema) as writer:
                for table in _parts(files, schema, 256):
                    writer.write_table(table)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    return pa.ipc.open_file(pa.memory_map(str(path))).read_all()


def _open_dataset(label: str, part: Any) -> RawTable:
    """Open one split of a dataset of the `datasets` library."""
    files = [Path(file["filename"]) for file in part.cache_files]

    def digest() -> str:
        return sha256_of(*sorted(files)) if files else hashlib.sha256(str(part._fingerprint).encode()).hexdigest()

    return ArrowTable(label, part.data.table, digest)


TABLE, TRUTH = "table", "truth"
"""Task of a table without a task of its own; column with the whole truth of a row."""
Place = tuple[str, int, int]
"""Split, row and position of an image."""


_CLIPS = ("videos", "video", "audios", "audio")
_CLIP_FILE = re.compile(r"\.(mp4|webm|mkv|avi|mov|m4v|gif|wav|mp3|flac|ogg|m4a)\b|^\s*\[", re.IGNORECASE)
NOTED_ROWS = 100
"""Number of the first rows whose calls of tools are compared with their column of tools."""


class TableDataset:
    """Dataset of a user's own table.

    A row's columns are all columns of the table except the images. Its truth is {"answer": ...} if the table has an
    answer column. No image is read when the table is opened. When a row is read, its images are hashed and their
    headers are read. The fingerprint covers the bytes of the table and of the image files that it names by path.

    Args:
        data: entry whose `path` is a file, a folder of files, or `hub:name[#config]`.
    Raises: DataError when it cannot be read, has no rows or no prompt column, or lacks a column that the recipe names.
    """

    def __init__(self, data: Data) -> None:
        self._data, self._tables = data, open_tables(data.path)
        self.path, self.task = data.path, data.task
        self.name = data.name or _short_name(data.path)
        self._root = _images_root(data)
        self._places: dict[str, Place] = {}
        self._files: dict[tuple[str, int, int], Media] = {}
        self._mapped = {split: self._map(table) for split, table in self._tables.items()}
        self.splits = {split: len(table) for split, table in self._tables.items()}
        mapped = self._mapped.get(data.split) or next(iter(self._mapped.values()))
        guesses = _notes_on_guesses(mapped, self._tables, data.columns)
        self.notes: Sequence[str] = (*guesses, *self._notes_on_images(mapped), *self._notes_on_calls())
        self.info: Mapping[str, Any] = {
            "name": self.name,
            "task": data.task,
            "entry": {
                "path": data.path if data.path.startswith("hub:") else str(Path(data.path).resolve()),
                "images_root": None if self._root is None else str(self._root.resolve()),
                "prompt": data.prompt and str(Path(data.prompt).resolve()),
                "columns": dict(data.columns),
            },
            "columns": mapped.named(),
            "style": mapped.style,
            "description": _describe(mapped),
            "response_column": mapped.response or self._answers_in_messages(mapped),
            "splits": {split: {"rows": rows} for split, rows in self.splits.items()},
        }

    @property
    def fingerprint(self) -> str:
        """Hash of the table's content; the first call reads all of it."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        parts = [part for split in sorted(self._tables) for part in (split, self._tables[split].digest())]
        return f"{hash64(*parts, *self._image_hashes()):016x}"

    def _image_hashes(self) -> list[str]:
        """Return the hashes of all image files that the tables name by path, in the order of the rows.

        A cell that cannot be read counts as no image here; reading its row is an error.
        """
        hashes: dict[Path, str] = {}
        known: set[str] = set()  # cells whose image has a hash: the paths of a table often repeat
        for split, table in self._tables.items():
            for index in range(len(table)):
                try:
                    values = self._image_values(split, index, table.row(index))
                    if values and all(isinstance(value, str) and value in known for value in values):
                        continue
                    images = [read_image(value, self._root, "") for value in values]
                    for value, image in zip(values, images, strict=True):
                        if isinstance(image, Path):
                            hashes[image] = hashes.get(image) or self._file(image).sha256
                            known |= {value} if isinstance(value, str) else set()
                except (DataError, OSError):
                    continue
                if images and not any(isinstance(image, Path) for image in images):
                    break  # the images are in the table itself, whose bytes are covered
        return list(hashes.values())

    def rows(self, split: str) -> Sequence[Row]:
        require_split(self, split)
        return Rows(self.splits[split], lambda index: self._row(split, index))

    def image_bytes(self, media: Media) -> bytes:
        split, index, position = self._places.get(media.sha256) or self._search(media)
        data = image_bytes(self._image_file(split, index, position), self._where(split, index, "images"))
        if image_hash(data) != media.sha256:
            raise DataError("an image file changed since it was first read", where=self._where(split, index, "images"))
        return data

    def _search(self, media: Media) -> Place:
        """Read rows until one has the image, and return its place.

        This serves callers that have only the image's hash, such as a report on an old run.
        """
        for split, count in self.splits.items():
            for index in range(count):
                self._row(split, index)
                if media.sha256 in self._places:
                    return self._places[media.sha256]
        raise DataError(f"no row has the image {media.sha256[:16]}", where=self.path)

    def image(self, media: Media) -> PILImage:
        return decode_cached(self, media)

    def place_of(self, media: Media) -> str:
        split, index, position = self._places.get(media.sha256) or self._search(media)
        image = self._image_file(split, index, position)
        column = self._mapped[split].images or self._mapped[split].prompt or "images"
        return self._where(split, index, column) + (f", {image}" if isinstance(image, Path) else "")

    def _image_file(self, split: str, index: int, position: int) -> bytes | Path:
        value = self._image_values(split, index, self._tables[split].row(index))[position]
        return read_image(value, self._root, self._where(split, index, "images"))

    def __reduce__(self):
        return (type(self), (self._data,))

    def _map(self, table: RawTable) -> Mapped:
        where = table.where(0).rpartition(" row ")[0] or table.where(0).rpartition(":")[0]
        mapped = map_columns(table.columns, self._data.columns, table.row(0), where)
        if mapped.prompt is None and self._data.prompt is None:
            raise missing_prompt(table.columns, where)
        return mapped

    def _answers_in_messages(self, mapped: Mapped) -> str | None:
        """Return the prompt column if its first row ends with an assistant's turn: that turn is the response."""
        split, table = next(iter(self._tables.items()))
        if mapped.prompt is None:
            return None
        where = self._where(split, 0, mapped.prompt)
        return mapped.prompt if read_messages(table.row(0).get(mapped.prompt), where).response else None

    def _notes_on_images(self, mapped: Mapped) -> list[str]:
        """Return a note if the first row has images in a column that is not read.

        The name of an image file counts only if no images are read: beside them, it may just be their name.
        """
        split, table = next(iter(self._tables.items()))
        fields = table.row(0)
        reads = mapped.images is not None or bool(self._image_values(split, 0, fields))
        unread = [
            name for name, value in fields.items() if name != mapped.images and looks_like_image(value, not reads)
        ]
        if not unread or (reads and mapped.images is None):
            return []
        name = unread[0]
        hint = f'name the column of the images: columns = {{images = "{name}"}}, or --columns images={name}'
        return [f"`{'`, `'.join(unread)}` {'have' if len(unread) > 1 else 'has'} {UNREAD}: {hint}"]

    def _notes_on_calls(self) -> list[str]:
        """Return a note if one of the first rows calls a tool that its column of tools does not list."""
        split = self._data.split if self._data.split in self._mapped else next(iter(self._mapped))
        table, mapped = self._tables[split], self._mapped[split]
        for index in range(min(len(table), NOTED_ROWS) if mapped.tools and mapped.prompt else 0):
            fields, where = table.row(index), self._where(split, index, mapped.prompt or "")
            with suppress(DataError):  # of a row that cannot be read, which is reported with the rows
                tools = [tool["function"]["name"] for tool in read_tools(fields.get(mapped.tools or ""), where)]
                turns = read_messages(fields.get(mapped.prompt or ""), where).response
                calls = [call.name for turn in turns for call in turn.calls]
                if tools and (unknown := set(calls) - set(tools)):
                    names = f"`{min(unknown)}`, which its `{mapped.tools}` does not list ({', '.join(tools)})"
                    return [f"{table.where(index)} calls {names}: its prompt does not show that tool"]
        return []

    def _where(self, split: str, index: int, column: str) -> str:
        return f"{self._tables[split].where(index)}, column `{column}`"

    def _image_values(self, split: str, index: int, fields: Mapping[str, Any]) -> list[Any]:
        mapped = self._mapped[split]
        if mapped.images is not None:
            return split_images(fields.get(mapped.images), self._where(split, index, mapped.images))
        if mapped.prompt is None or self._data.prompt is not None:
            return []
        return read_messages(fields.get(mapped.prompt), self._where(split, index, mapped.prompt)).images

    def _row(self, split: str, index: int) -> Row:
        mapped, fields = self._mapped[split], self._tables[split].row(index)
        media, shown = [], 0
        for position, value in enumerate(self._image_values(split, index, fields)):
            one = self._media(value, self._where(split, index, mapped.images or mapped.prompt or "images"))
            self._places.setdefault(one.sha256, (split, index, position))
            media.append(one)
        truth = self._truth_of_task(mapped, fields, self._where(split, index, TRUTH))
        if mapped.answer is not None:
            where = self._where(split, index, mapped.answer)
            if mapped.answer not in fields:
                raise DataError(f"the row has no `{mapped.answer}`", where=where, hint=f"it has: {', '.join(fields)}")
            truth |= {"answer": read_answer(fields[mapped.answer], where)}
        if mapped.prompt is not None and self._data.prompt is None:
            where = self._where(split, index, mapped.prompt)
            if fields.get(mapped.prompt) is None:
                raise DataError(f"the row has no `{mapped.prompt}`", where=where, hint=f"it has: {', '.join(fields)}")
            chat = read_messages(fields[mapped.prompt], where)
            self._refuse_clips(split, index, fields, str(chat.prompt))
            if not truth and chat.answer is not None:  # the last turn of a conversation, as LLaVA and ShareGPT have it
                truth = {"answer": chat.answer}
            if not chat.response and not truth and self.info["response_column"] == mapped.prompt:
                hint = "other rows end with a turn of gpt or assistant: add it to this row, or remove the row"
                raise DataError("the conversation has no answer as its last turn", where=where, hint=hint)
            # Images inside the messages would be stored as text in every rollout.
            if chat.images:
                fields[mapped.prompt] = [
                    {"role": turn.role, "content": turn.content}
                    | ({"tool_calls": [asdict(call) for call in turn.calls]} if turn.calls else {})
                    for turn in (*chat.prompt, *chat.response)
                ]
            shown = sum(turn.content.count("<image>") for turn in chat.response if turn.role != "assistant")
            if shown > len(media):
                raise DataError(f"the results of tools have {shown} <image> marks for {len(media)} images", where=where)
        given = {name: value for name, value in fields.items() if name != mapped.images}
        columns = {name: plain_at(value, self._where(split, index, name)) for name, value in given.items()}
        identity = canonical_json([columns, [one.sha256 for one in media]])
        prompt_id = f"{self.name}-{hash64(identity.decode()):016x}"
        tools = read_tools(fields.get(mapped.tools or ""), self._where(split, index, mapped.tools or "tools"))
        of_prompt, of_response = tuple(media[: len(media) - shown]), tuple(media[len(media) - shown :])
        place = self._tables[split].where(index)
        return Row(prompt_id, self.name, self.task, truth, of_prompt, columns, place, of_response, tools)

    def _refuse_clips(self, split: str, index: int, fields: Mapping[str, Any], prompt: str) -> None:
        """Raise a DataError if a row has a video or a sound in a column of its own. A word without a mark is a name."""
        for name in _CLIPS:
            value, kind = fields.get(name), name.rstrip("s")
            is_name = isinstance(value, str) and not _CLIP_FILE.search(value) and f"<{kind}>" not in prompt
            if split_images(value) and not is_name and name not in self._mapped[split].named().values():
                message = f"the row has {show(value)}, and {kind} is not read: remove the row, or give images instead"
                hint = f"if `{name}` is not for the model, rename the column"
                raise DataError(message, where=self._where(split, index, name), hint=hint)

    def _file(self, path: Path) -> Media:
        """Return the reference of an image file. It is read again if its size or time has changed."""
        state = path.stat()
        key = (str(path), state.st_size, state.st_mtime_ns)
        if key not in self._files:
            self._files[key] = probe_image(path.read_bytes())[0]
        return self._files[key]

    def _truth_of_task(self, mapped: Mapped, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the truth of a row for a task of its own: its column `truth`, else all columns; {} for any table."""
        own = structured(fields.get(TRUTH), where)
        if isinstance(own, Mapping):
            return {str(name): plain_at(value, where) for name, value in own.items()}
        if self.task == TABLE:
            return {}
        left_out = {mapped.images, mapped.prompt, mapped.answer, mapped.response, TRUTH}
        return {name: plain_at(value, where) for name, value in fields.items() if name not in left_out}

    def _media(self, value: Any, where: str) -> Media:
        image = read_image(value, self._root, where)
        try:
            return self._file(image) if isinstance(image, Path) else probe_image(image)[0]
        except OSError as error:
            raise DataError(f"the image cannot be read: {error.strerror or error}", where=where) from error
        except DataError as error:
            raise DataError(error.message, where=where, hint=error.hint) from error


def _short_name(path: str) -> str:
    if path.startswith("hub:"):
        return path.removeprefix("hub:").partition("#")[0].rstrip("/").rpartition("/")[2]
    place = Path(path)
    return place.stem if place.is_file() else place.resolve().name


def _images_root(data: Data) -> Path | None:
    """Return the folder that image paths must stay in.

    It is `images_root` of the recipe, else the folder of the table. For `hub:` followed by a local folder, it is that
    folder; for any other hub dataset, it is the cache folder of the `datasets` library.

    Raises: DataError when `images_root` is not a folder.
    """
    if data.images_root is not None:
        root = Path(data.images_root)
        if not root.is_dir():
            raise DataError(f"images_root {data.images_root} is not a folder", where=data.path)
        return root
    if data.path.startswith("hub:"):
        local = Path(data.path.removeprefix("hub:").partition("#")[0])
        if local.is_dir():
            return local
        from datasets import config

        return Path(config.HF_CACHE_HOME)
    place = Path(data.path)
    return place if place.is_dir() else place.parent


def _notes_on_guesses(mapped: Mapped, tables: Mapping[str, RawTable], named: Mapping[str, str]) -> list[str]:
    """Return a note for each role for which several columns are possible; the chosen column is then a guess."""
    columns = next(iter(tables.values())).columns
    notes = []
    for role in ("prompt", "images", "answer"):
        chosen = getattr(mapped, role)
        others = [name for name in TRAINING[role] if name in columns and name != chosen]
        if role not in named and others:
            unread = "`, `".join(others)
            notes.append(f"{role}: read from `{chosen}`, not from `{unread}`: name the right one in `columns`")
    return notes


def _describe(mapped: Mapped) -> str:
    parts = [f"{key} from `{column}`" for key, column in mapped.named().items()]
    spelled = "" if mapped.style == "own" else f" (spelled as in {mapped.style})"
    return f"columns: {', '.join(parts) or 'none recognised'}{spelled}"
