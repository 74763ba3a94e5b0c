"""Looking at every image of a collection once, on all cores: is it sound, what is its content, what does it look like.

Results are parts (data/parallel_parts.py), one JSON line an image, so that a killed run goes on where it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from vlmrl.data.image_shards import Examined, ShardReader, examine
from vlmrl.data.images import image_hash
from vlmrl.data.parallel_parts import Progress, make_parts, write_lines
from vlmrl.errors import DataError
from vlmrl.types import Media

PART_FILES = 256
MAX_REMEMBERED = 50_000


class Files(Protocol):
    """Files by relative path. Picklable: a copy opens its source anew."""

    def read(self, path: str) -> bytes:
        """Raises: DataError when the file cannot be read."""
        ...


@dataclass(frozen=True)
class MemoryFiles:
    """Files held in memory."""

    contents: Mapping[str, bytes]

    def read(self, path: str) -> bytes:
        return self.contents[path]


class Examiner:
    """`examine`, each content once: a collection of pairs shows an image again and again."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def look(self, data: bytes) -> dict[str, Any]:
        """What `examined` reads, or {"reason": why the image cannot be used}."""
        name = image_hash(data)
        found = self._known.get(name)
        if found is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            found = self._known[name] = _look(data)
        return found


EXAMINER = Examiner()
"""This process's: what one part has seen the next ones know."""


def examined(fields: dict[str, Any]) -> Examined:
    """The facts of an image from its line."""
    media = Media(fields["sha256"], fields["width"], fields["height"])
    return Examined(media, fields["bytes"], fields["look"], tuple(fields.get("remarks", ())))


def scan_files(
    files: Files,
    paths: Sequence[str],
    work: Path | None = None,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, Examined | str]]:
    """(path, its facts or the reason why it cannot be used) of each image file, in the order of `paths`.

    Args: work: folder for the parts; None = a temporary one.
    """
    if work is None:
        with TemporaryDirectory() as folder:
            yield from scan_files(files, paths, Path(folder), workers=workers, progress=progress)
        return
    seen = look_at(paths, files.read, work, workers=workers, progress=progress)
    for path, fields in zip(paths, seen, strict=True):
        yield path, fields["reason"] if "reason" in fields else examined(fields)


def look_at(
    places: Sequence[Any], read: Callable[[Any], bytes], work: Path, *, workers: int | None, progress: Progress | None
) -> Iterator[dict[str, Any]]:
    """What `Examiner.look` says of each image, in the order of `places`, made on all cores.

    Args:
        read: the file at a place; picklable. A DataError that it raises is the reason.
        work: folder for the parts.
    """
    few = _few_at_a_time(places)
    parts = [work / f"images-{i:05d}.jsonl" for i in range(len(few))]
    make_parts(_Look(read), few, parts, workers=workers, progress=progress, what="reading images")
    for part in parts:
        with part.open(encoding="ascii") as lines:
            yield from map(json.loads, lines)


def _few_at_a_time(places: Sequence[Any]) -> list[Sequence[Any]]:
    return [places[start : start + PART_FILES] for start in range(0, len(places), PART_FILES)]


@dataclass(frozen=True)
class _Look:
    read: Callable[[Any], bytes]

    def __call__(self, places: Sequence[Any], part: Path) -> None:
        write_lines(part, [self._of(place) for place in places])

    def _of(self, place: Any) -> dict[str, Any]:
        try:
            return EXAMINER.look(self.read(place))
        except DataError as error:
            return {"reason": error.message}


@dataclass(frozen=True)
class FileReader:
    """Image files by path, for `write_shards`."""

    source: Files

    def files(self, places: Sequence[str]) -> Iterator[bytes]:
        for path in places:
            yield self.source.read(path)


def _look(data: bytes) -> dict[str, Any]:
    try:
        return _fields(examine(data))
    except DataError as error:
        return {"reason": error.message}


def _fields(seen: Examined) -> dict[str, Any]:
    fields: dict[str, Any] = {"sha256": seen.media.sha256, "width": seen.media.width, "height": seen.media.height}
    fields |= {"bytes": seen.bytes, "look": seen.look}
    return fields | ({"remarks": list(seen.remarks)} if seen.remarks else {})


def shrink_images(
    reader: ShardReader,
    places: Sequence[Any],
    max_pixels: int,
    work: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Examined]:
    """The facts of images brought down to `max_pixels`, in the order of `places`."""
    few = _few_at_a_time(places)
    parts = [work / f"small-{max_pixels}-{i:05d}.jsonl" for i in range(len(few))]
    make_parts(_Shrink(reader, max_pixels), few, parts, workers=workers, progress=progress, what="resizing images")
    for part in parts:
        with part.open(encoding="ascii") as lines:
            yield from (examined(json.loads(line)) for line in lines)


@dataclass(frozen=True)
class _Shrink:
    reader: ShardReader
    max_pixels: int

    def __call__(self, places: Sequence[Any], part: Path) -> None:
        write_lines(part, [_fields(examine(data, self.max_pixels)) for data in self.reader.files(places)])
