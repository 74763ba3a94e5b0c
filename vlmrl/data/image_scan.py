"""Scan of all images of a collection, on all cores: validity, hash of the content, perceptual hash.

Results are written in parts (data/parallel_parts.py) with one JSON line per image. After a kill, the next run makes
only the missing parts.
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
"""Number of images per part."""
MAX_REMEMBERED = 50_000
"""Maximum number of images whose results a process keeps in memory. When it is reached, all are removed."""


class Files(Protocol):
    """Reader of files by relative path. Picklable: a copy in another process opens the source again."""

    def read(self, path: str) -> bytes:
        """Return the bytes of a file. Raises: DataError when it cannot be read."""
        ...


@dataclass(frozen=True)
class MemoryFiles:
    """Reader of files that are in memory."""

    contents: Mapping[str, bytes]

    def read(self, path: str) -> bytes:
        return self.contents[path]


class Examiner:
    """Cache of the results of `examine` by content, because a collection of pairs repeats its images."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, Any]] = {}

    def look(self, data: bytes) -> dict[str, Any]:
        """Return the fields for `examined`, or {"reason": why the image cannot be used}."""
        sha256 = image_hash(data)
        fields = self._known.get(sha256)
        if fields is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            fields = self._known[sha256] = _look(data)
        return fields


EXAMINER = Examiner()
"""Examiner of this process. All parts that the process makes share its results."""


def examined(fields: dict[str, Any]) -> Examined:
    """Return the facts of an image from its JSON line."""
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
    """Yield (path, its facts or the reason why it cannot be used) of each image file, in the order of `paths`.

    Args:
        work: folder for the parts; None = a temporary one.
    """
    if work is None:
        with TemporaryDirectory() as folder:
            yield from scan_files(files, paths, Path(folder), workers=workers, progress=progress)
        return
    results = look_at(paths, files.read, work, workers=workers, progress=progress)
    for path, fields in zip(paths, results, strict=True):
        yield path, fields["reason"] if "reason" in fields else examined(fields)


def look_at(
    places: Sequence[Any], read: Callable[[Any], bytes], work: Path, *, workers: int | None, progress: Progress | None
) -> Iterator[dict[str, Any]]:
    """Yield the result of `Examiner.look` for each image, in the order of `places`, computed on all cores.

    Args:
        read: returns the file at a place; picklable. The message of its DataError becomes the "reason".
        work: folder for the parts.
    """
    portions = _portions(places)
    parts = [work / f"images-{i:05d}.jsonl" for i in range(len(portions))]
    make_parts(_Look(read), portions, parts, workers=workers, progress=progress, what="reading images")
    for part in parts:
        with part.open(encoding="ascii") as lines:
            yield from map(json.loads, lines)


def _portions(places: Sequence[Any]) -> list[Sequence[Any]]:
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
    """Reader of image files by path, for `write_shards`."""

    source: Files

    def files(self, places: Sequence[str]) -> Iterator[bytes]:
        for path in places:
            yield self.source.read(path)


def _look(data: bytes) -> dict[str, Any]:
    try:
        return _fields(examine(data))
    except DataError as error:
        return {"reason": error.message}


def _fields(image: Examined) -> dict[str, Any]:
    fields: dict[str, Any] = {"sha256": image.media.sha256, "width": image.media.width, "height": image.media.height}
    fields |= {"bytes": image.bytes, "look": image.look}
    return fields | ({"remarks": list(image.remarks)} if image.remarks else {})


def shrink_images(
    reader: ShardReader,
    places: Sequence[Any],
    max_pixels: int,
    work: Path,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Iterator[Examined]:
    """Yield the facts of images scaled down to `max_pixels`, in the order of `places`."""
    portions = _portions(places)
    parts = [work / f"small-{max_pixels}-{i:05d}.jsonl" for i in range(len(portions))]
    make_parts(_Shrink(reader, max_pixels), portions, parts, workers=workers, progress=progress, what="resizing images")
    for part in parts:
        with part.open(encoding="ascii") as lines:
            yield from (examined(json.loads(line)) for line in lines)


@dataclass(frozen=True)
class _Shrink:
    reader: ShardReader
    max_pixels: int

    def __call__(self, places: Sequence[Any], part: Path) -> None:
        write_lines(part, [_fields(examine(data, self.max_pixels)) for data in self.reader.files(places)])
