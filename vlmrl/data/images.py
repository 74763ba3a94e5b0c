"""Images as content: decoding with limits, and shards that hold each image once and are read through a memory map.

A shard `media-00000.arrow` is an Arrow IPC file with the columns `sha256` (hex text) and `bytes` (an image file as it
was found, PNG, JPEG or WebP). Nothing in it depends on the clock or the machine.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import warnings
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmrl.errors import DataError, StoreError
from vlmrl.store.media import ShardFolder
from vlmrl.types import Media

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

MAX_PIXELS = 100_000_000
"""Largest image that is decoded, in pixels: a file may claim any size, and decoding it would fill the memory."""
MAX_FILE_BYTES = 128 * 1024 * 1024
"""Largest image file, in bytes."""
KEPT_FORMATS = ("PNG", "JPEG", "MPO", "WEBP")
"""Formats stored as they are (MPO is a JPEG with more pictures behind the first); others are re-encoded as PNG."""
READ_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read. Others (EPS, PSD, ...) bring decoders that a stranger's file should not reach."""
SHARD_BYTES = 512 * 1024 * 1024
BATCH_BYTES = 8 * 1024 * 1024
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
)
_ORIENTATION_TAG = 0x0112


def image_hash(data: bytes) -> str:
    """SHA-256 of an image file, in hex: its name everywhere in vlmrl."""
    return hashlib.sha256(data).hexdigest()


def probe_image(data: bytes) -> tuple[Media, str]:
    """The reference and the format ("PNG", "JPEG", ...) of an image file, from its header alone.

    Width and height are those of `decode_image`: after the EXIF orientation.
    Raises: DataError when it is no image, too large, or of a format that is not read.
    """
    image = _open(data)
    width, height = image.size
    if _orientation(image) in (5, 6, 7, 8):
        width, height = height, width
    return Media(image_hash(data), width, height), str(image.format)


def decode_image(data: bytes) -> PILImage:
    """The first frame as RGB, upright (EXIF orientation applied), transparent pixels on white.

    Raises: DataError when the file is broken or larger than `MAX_PIXELS` or `MAX_FILE_BYTES`.
    """
    from PIL import Image, ImageOps

    image = _open(data)
    try:
        image.load()
        if _orientation(image) > 1:
            image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 and 32 bits a pixel: Pillow would clip to white, so the top byte is taken
            image = image.point(lambda value: value / 256).convert("L")
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            page = Image.new("RGBA", image.size, (255, 255, 255, 255))
            image = Image.alpha_composite(page, image)
        return image.convert("RGB")
    except _BROKEN as error:
        raise DataError(f"broken image: {error}") from error


def encode_png(image: PILImage) -> bytes:
    """PNG bytes of an image, the same for the same pixels (no time, no metadata)."""
    buffer = io.BytesIO()
    clean = image.copy()
    clean.info = {}
    clean.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()


def store_form(data: bytes) -> tuple[bytes, Media]:
    """The bytes to keep and their reference: PNG, JPEG and WebP unchanged, others as PNG. The image is decoded once
    to prove it sound.
    """
    media, kind = probe_image(data)
    image = decode_image(data)
    if kind in KEPT_FORMATS:
        return data, media
    data = encode_png(image)
    return data, probe_image(data)[0]


def _open(data: bytes) -> PILImage:
    from PIL import Image

    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"image file of {len(data):,} bytes; the limit is {MAX_FILE_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=READ_FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"image of more than {MAX_PIXELS:,} pixels") from error
    except _BROKEN as error:
        raise DataError(f"not an image in a known format ({', '.join(READ_FORMATS)})") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"image of {width} x {height} pixels; the limit is {MAX_PIXELS:,} pixels")
    if width < 1 or height < 1:
        raise DataError(f"image of {width} x {height} pixels")
    return image


def _orientation(image: PILImage) -> int:
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except _BROKEN:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


class ShardWriter:
    """Writes image files into `media-*.arrow` in a folder, each content once, in the order given.

    Args:
        folder: where the shards go; it must exist.
        shard_bytes: a new shard is begun when one holds this many bytes.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes
        self._seen: set[str] = set()
        self._hashes: list[str] = []
        self._files: list[bytes] = []
        self._batch_bytes = self._written_bytes = 0
        self._writer: Any = None
        self._sink: Any = None
        self.paths: list[Path] = []

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, sha256: str, data: bytes) -> None:
        """Add an image file under its hash; one that is already there is left out."""
        if sha256 in self._seen:
            return
        self._seen.add(sha256)
        self._hashes.append(sha256)
        self._files.append(data)
        self._batch_bytes += len(data)
        if self._batch_bytes >= BATCH_BYTES:
            self._flush()

    def close(self) -> list[Path]:
        """Write what is left and make it durable. Returns the shards' paths; one shard at least."""
        self._flush(force=not self.paths)
        self._end_shard()
        return self.paths

    def _flush(self, force: bool = False) -> None:
        import pyarrow as pa

        if not self._hashes and not force:
            return
        schema = pa.schema([("sha256", pa.string()), ("bytes", pa.binary())])
        if self._writer is None:
            path = self._folder / f"media-{len(self.paths):05d}.arrow"
            self.paths.append(path)
            self._sink = path.open("wb")
            self._writer = pa.ipc.new_file(self._sink, schema)
        self._writer.write_batch(
            pa.record_batch([pa.array(self._hashes), pa.array(self._files, pa.binary())], schema=schema)
        )
        self._written_bytes += self._batch_bytes
        self._hashes, self._files, self._batch_bytes = [], [], 0
        if self._written_bytes >= self._shard_bytes:
            self._end_shard()

    def _end_shard(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        self._writer = self._sink = None
        self._written_bytes = 0


class ImageStore:
    """Reads image files by hash from the `media-*.arrow` shards of a folder. Picklable: a copy opens the shards anew.

    Opening reads the hashes only; an image's bytes are touched when they are asked for, and checked against the hash.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            self._shards = ShardFolder(self.folder, "media-*.arrow")
        except StoreError as error:
            hint = "make the dataset again with `vlmrl prep ... --force`"
            raise DataError(error.message, where=error.where, hint=hint) from error

    def __reduce__(self):
        return (type(self), (self.folder,))

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._shards

    def __len__(self) -> int:
        return len(self._shards)

    def hashes(self) -> list[str]:
        """Every image's hash, in shard order."""
        return self._shards.hashes()

    def read(self, sha256: str) -> bytes:
        """The image file with this hash. Raises: DataError when it is missing or its bytes were changed."""
        data = self._shards.get(sha256)
        if data is None:
            raise DataError(f"image {sha256[:16]} is in no shard", where=str(self.folder))
        if image_hash(data) != sha256:
            raise DataError(
                f"image {sha256[:16]} does not have the bytes it was stored with", where=str(self.folder),
                hint="the shard is damaged: make the dataset again with `vlmrl prep ... --force`",
            )  # fmt: skip
        return data
