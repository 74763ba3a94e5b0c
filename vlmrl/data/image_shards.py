"""Writing of image shards on all cores.

It is planned first which images each shard gets. Each shard is then a part of its own (data/parallel_parts.py), and its
bytes do not depend on the process that writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from vlmrl.data import images as limits
from vlmrl.data.images import ImageBatch, ShardFile, decode_image, image_hash, shard_name, store_decoded
from vlmrl.data.measurements import fit_size
from vlmrl.data.near_duplicates import look_hash
from vlmrl.data.parallel_parts import Progress, make_parts
from vlmrl.errors import DataError
from vlmrl.types import Media


@dataclass(frozen=True, slots=True)
class Stored:
    """Image to be stored.

    Args:
        sha256, bytes: hash and size of the file as it is stored.
        place: place of its source file, as the `ShardReader` expects it.
        max_pixels: a larger image is scaled down to this number of pixels; None = the size is not changed.
    """

    sha256: str
    bytes: int
    place: Any
    max_pixels: int | None = None


class ShardReader(Protocol):
    """Reader of image files from their sources. Picklable: each process has its own copy."""

    def files(self, places: Sequence[Any]) -> Iterator[bytes]:
        """Yield the file of each place, in order. Raises: DataError when one no longer exists."""
        ...


@dataclass(frozen=True, slots=True)
class Examined:
    """Facts of a sound image.

    Args:
        media, bytes: reference and size of the file as it is stored.
        look: perceptual hash (data/near_duplicates.py).
        remarks: unusual properties of the source file; see `remarks_on`.
    """

    media: Media
    bytes: int
    look: str
    remarks: tuple[str, ...] = ()


def examine(data: bytes, max_pixels: int | None = None) -> Examined:
    """Decode an image file to prove that it is valid, and return its facts. Raises: DataError if it is not valid."""
    stored, media, image = stored_form(data, max_pixels)
    return Examined(media, len(stored), look_hash(image), tuple(limits.remarks_on(data)))


def stored_form(data: bytes, max_pixels: int | None = None) -> tuple[bytes, Media, Any]:
    """Return the file that is stored for a source file, its reference and its pixels.

    A file within `max_pixels` is stored as `store_decoded` says. A larger one is scaled down (Lanczos) and stored as
    JPEG of quality 95 if it was a JPEG, else as PNG.
    """
    stored, media, image = store_decoded(data)
    size = fit_size(media.width, media.height, max_pixels) if max_pixels else (media.width, media.height)
    if size == (media.width, media.height):
        return stored, media, image
    return _smaller(stored, image, size)


def _smaller(data: bytes, image: Any, size: tuple[int, int]) -> tuple[bytes, Media, Any]:
    import io

    from PIL import Image

    small = image.resize(size, Image.Resampling.LANCZOS)
    if data.startswith(b"\xff\xd8"):  # a JPEG
        buffer = io.BytesIO()
        small.save(buffer, format="JPEG", quality=95, subsampling=0)
        data = buffer.getvalue()
    else:
        data = limits.encode_png(small)
    return data, Media(image_hash(data), *size), decode_image(data)


def plan_shards(images: Iterable[Stored]) -> list[list[Stored]]:
    """Return the images of each shard, in order. A shard ends with the batch in which it reaches `SHARD_BYTES`.

    `ShardWriter` follows the same rule, so both write the same files for the same images.
    """
    shards: list[list[Stored]] = [[]]
    batch = written = 0
    full = False
    for image in images:
        if full:
            shards.append([])
            written, full = 0, False
        shards[-1].append(image)
        batch += image.bytes
        if batch >= limits.BATCH_BYTES:
            written, batch = written + batch, 0
            full = written >= limits.SHARD_BYTES
    return shards


def write_shards(
    folder: Path,
    images: Sequence[Stored],
    reader: ShardReader,
    *,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write `media-*.arrow` into the folder; shards that already exist are not written again.

    Args:
        images: each content once.
    Raises: DataError when a source file has changed.
    """
    plan = plan_shards(images)
    paths = [folder / shard_name(number) for number in range(len(plan))]
    make_parts(_WriteShard(reader), plan, paths, workers=workers, progress=progress, what="writing images")


@dataclass(frozen=True)
class _WriteShard:
    reader: ShardReader

    def __call__(self, images: Sequence[Stored], path: Path) -> None:
        shard, batch = ShardFile(path), ImageBatch()
        for image, data in zip(images, self.reader.files([image.place for image in images]), strict=True):
            if image_hash(data) != image.sha256:  # a file that is stored as it is needs no second decoding
                data = stored_form(data, image.max_pixels)[0]
            if image_hash(data) != image.sha256:
                raise DataError(
                    "an image changed while it was read", where=str(image.place), hint="run the command again"
                )
            batch.add(image.sha256, data)
            if batch.bytes >= limits.BATCH_BYTES:
                shard.write(batch)
                batch = ImageBatch()
        if batch.hashes or not images:
            shard.write(batch)
        shard.close()
