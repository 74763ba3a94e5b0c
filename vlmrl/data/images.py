"""Decoding of images with limits, and their storage by content in shards, which are read through a memory map.

A shard `media-00000.arrow` is an Arrow IPC file with the columns `sha256` (hex text) and `bytes` (the image file: PNG,
JPEG or WebP). Nothing in it depends on the clock or the machine.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from shlex import quote
from threading import Lock
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from vlmrl.errors import DataError, StoreError
from vlmrl.store.media import ShardFolder, ShardStream
from vlmrl.types import Media
from vlmrl.untrusted import BROKEN_IMAGE

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


MAX_PIXELS = 100_000_000
"""Largest image that is decoded, in pixels. A file may state any size, and decoding could fill the memory."""
MAX_FILE_BYTES = 128 * 1024 * 1024
"""Largest image file, in bytes."""
KEPT_FORMATS = ("PNG", "JPEG", "MPO", "WEBP")
"""Formats whose files are stored unchanged; others are stored as PNG. MPO is a JPEG with further pictures appended."""
READ_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""Formats that are read. Image files are untrusted input: the decoders of other formats (EPS, PSD, ...) never run."""
SHARD_BYTES = 512 * 1024 * 1024
"""Size in bytes at which a shard ends."""
SMALLER = "make the image smaller: a model sees a few megapixels at most (`max_pixels` of its processor)"
_ORIENTATION_TAG = 0x0112
_PNG_ORIENTED = (b"eXIf", b"Raw profile type exif", b"XML:com.adobe.xmp")
"""Names of the parts of a PNG that can hold an orientation. Pillow decodes all pixels to find that there is none."""


def image_hash(data: bytes) -> str:
    """Return the SHA-256 of an image file, in hex: its name everywhere in vlmrl."""
    return hashlib.sha256(data).hexdigest()


def probe_image(data: bytes) -> tuple[Media, str]:
    """Return the reference and the format ("PNG", "JPEG", ...) of an image file, from its header alone.

    Width and height are those of `decode_image`: after the EXIF orientation.

    Raises: DataError when the file is no image, too large, or of a format that is not read.
    """
    image = _open(data)
    width, height = image.size
    known = image.format != "PNG" or any(name in data for name in _PNG_ORIENTED)
    if known and _orientation(image) in (5, 6, 7, 8):  # turned by 90 degrees: width and height change places
        width, height = height, width
    return Media(image_hash(data), width, height), str(image.format)


def decode_image(data: bytes) -> PILImage:
    """Return the first frame as RGB, upright (EXIF orientation applied), transparent pixels on white.

    Raises: DataError when the file is broken or larger than `MAX_PIXELS` or `MAX_FILE_BYTES`.
    """
    from PIL import Image, ImageOps

    image = _open(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of damaged metadata, which is not read
            image.load()
            if _orientation(image) > 1:
                image = ImageOps.exif_transpose(image)
            if image.mode == "F":
                raise DataError(
                    "floating-point pixels: it is not known which value is white; save the image with 8 or 16 bits"
                )
            if image.mode.startswith("I"):  # 16 bits and more: take the top byte, because Pillow would clip to white
                image = _eight_bits(image)
            if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
                image = image.convert("RGBA")
                page = Image.new("RGBA", image.size, (255, 255, 255, 255))
                image = Image.alpha_composite(page, image)
            return image if image.mode == "RGB" else image.convert("RGB")
    except BROKEN_IMAGE as error:
        raise DataError(f"broken image: {error}") from error


def encode_png(image: PILImage) -> bytes:
    """Return the PNG bytes of an image, the same for the same pixels (no time, no metadata)."""
    buffer = io.BytesIO()
    clean = image.copy()
    clean.info = {}
    clean.save(buffer, format="PNG", compress_level=6)
    return buffer.getvalue()


def store_decoded(data: bytes) -> tuple[bytes, Media, PILImage]:
    """Return the bytes to store, their reference, and the decoded image, which equals the result of `decode_image`.

    PNG, JPEG and WebP are stored unchanged, others as PNG. The image is decoded once to prove it sound.
    """
    media, kind = probe_image(data)
    image = decode_image(data)
    if kind in KEPT_FORMATS:
        return data, media, image
    data = encode_png(image)
    return data, probe_image(data)[0], image


def remarks_on(data: bytes) -> list[str]:
    """Return the unusual properties of a valid image file, from its header.

    `decode_image` handles all of them; the data doctor counts them. Possible remarks: "turned upright (EXIF)",
    "first of several frames", "16 bits a channel", "CMYK", "palette", "transparency".
    """
    image = _open(data)
    remarks = {
        "turned upright (EXIF)": _orientation(image) > 1,
        "first of several frames": _has_frames(image),
        "16 bits a channel": image.mode.startswith("I"),
        "CMYK": image.mode == "CMYK",
        "palette": image.mode in ("P", "PA"),
        "transparency": image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info,
    }
    return [name for name, applies in remarks.items() if applies]


def _has_frames(image: PILImage) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except BROKEN_IMAGE:  # a later frame is broken: there is more than one frame
        return True


def _eight_bits(image: PILImage) -> PILImage:
    """Return the top byte of 16-bit pixels.

    Pillow may read a 16-bit file into its 32-bit mode; the range of the values is then still 16 bits. Values of a
    32-bit file that are all below 256 have 8 bits.
    """
    import numpy as np
    from PIL import Image

    values = np.asarray(image).astype(np.int64)  # [H, W]
    largest = int(values.max(initial=0)) if image.mode == "I" else 65535
    shift = 0 if largest < 256 else 8 if largest < 65536 else 24
    return Image.fromarray((values >> shift).clip(0, 255).astype(np.uint8))


def _open(data: bytes) -> PILImage:
    from PIL import Image, PngImagePlugin

    # Editors and generators write long texts into PNG files; a file is not larger than MAX_FILE_BYTES.
    PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY = MAX_FILE_BYTES

    if not data:
        raise DataError("an empty file (0 bytes)")
    if len(data) > MAX_FILE_BYTES:
        raise DataError(f"image file of {len(data):,} bytes; the limit is {MAX_FILE_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image = Image.open(io.BytesIO(data), formats=READ_FORMATS)
    except Image.DecompressionBombError as error:
        raise DataError(f"image of more than {MAX_PIXELS:,} pixels", hint=SMALLER) from error
    except BROKEN_IMAGE as error:
        raise DataError(f"not an image in a known format ({', '.join(READ_FORMATS)})") from error
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise DataError(f"image of {width} x {height} pixels; the limit is {MAX_PIXELS:,} pixels", hint=SMALLER)
    if width < 1 or height < 1:
        raise DataError(f"image of {width} x {height} pixels")
    return image


def _orientation(image: PILImage) -> int:
    try:
        value = image.getexif().get(_ORIENTATION_TAG, 1)
    except BROKEN_IMAGE:
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


class ShardWriter:
    """Writer of image files into `media-*.arrow` of a folder: each content once, in the order given.

    Args:
        folder: folder of the shards; it must exist.
        shard_bytes: size in bytes at which a shard ends; None = `SHARD_BYTES`.
    """

    def __init__(self, folder: Path, shard_bytes: int | None = None) -> None:
        self._folder, self._shard_bytes = folder, shard_bytes or SHARD_BYTES
        self._seen: set[str] = set()
        self._shard: ShardFile | None = None
        self.paths: list[Path] = []

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, sha256: str, data: bytes) -> None:
        """Add an image file under its hash; if the hash was added before, do nothing."""
        if sha256 in self._seen:
            return
        self._seen.add(sha256)
        shard = self._shard or self._open_shard()
        shard.add(sha256, data)
        if shard.written_bytes >= self._shard_bytes:
            self._end_shard()

    def close(self) -> list[Path]:
        """Write the rest, sync it to disk, and return the paths of the shards, at least one."""
        if not self.paths:
            self._open_shard()
        self._end_shard()
        return self.paths

    def _open_shard(self) -> ShardFile:
        self.paths.append(self._folder / shard_name(len(self.paths)))
        self._shard = ShardFile(self.paths[-1])
        return self._shard

    def _end_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._shard = None


class ShardFile(ShardStream):
    """Shard that is being written to a path. `close` syncs it to disk."""

    def __init__(self, path: Path) -> None:
        self._sink = path.open("wb")
        super().__init__(self._sink)

    def close(self) -> None:
        super().close()
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()


def shard_name(number: int) -> str:
    """Return the file name of a shard, counted from 0."""
    return f"media-{number:05d}.arrow"


class ImageStore(ShardFolder):
    """Reader of image files by hash from the `media-*.arrow` shards of a folder.

    Opening a store reads only the hashes. The bytes of an image are read on request, and compared with the hash.
    Picklable: a copy opens the shards again.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        try:
            super().__init__(self.folder, "media-*.arrow")
        except StoreError as error:
            hint = "make the dataset again with `vlmrl prep ... --force`"
            raise DataError(error.message, where=error.where, hint=hint) from error

    def __reduce__(self):
        return (type(self), (self.folder,))

    def read(self, sha256: str) -> bytes:
        """Return the image file with this hash. Raises: DataError when it is missing or its bytes were changed."""
        data = self.get(sha256)
        if data is None:
            raise DataError(f"image {sha256[:16]} is in no shard", where=str(self.folder))
        if image_hash(data) != sha256:
            raise DataError(
                f"image {sha256[:16]} does not have the bytes it was stored with",
                where=str(self.folder),
                hint="the shard is damaged: make the dataset again with `vlmrl prep ... --force`",
            )
        return data


T = TypeVar("T")


class BoundedCache(Generic[T]):
    """Values by key, up to a total size; the least recently used values go first.

    Args:
        limit_bytes: limit of all values together, in bytes; the newest value stays, however large it is.
        size_of: returns the size of a value in bytes.
    """

    def __init__(self, limit_bytes: int, size_of: Callable[[T], int]) -> None:
        self.limit_bytes, self.size_of = limit_bytes, size_of
        self.bytes = 0
        self._values: OrderedDict[Hashable, T] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return the value of a key; `make` is called if there is none.

        An exception of `make` is passed on, and nothing is stored.
        """
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        # `make` is called without the lock. So two threads may make the same value; the cache keeps the first one.
        value = make()
        with self._lock:
            if key not in self._values:
                self._values[key] = value
                self.bytes += self.size_of(value)
            while self.bytes > self.limit_bytes and len(self._values) > 1:
                self.bytes -= self.size_of(self._values.popitem(last=False)[1])
        return value


class ImageSource(Protocol):
    """A dataset, as far as its images are concerned (`data/dataset.py`)."""

    @property
    def path(self) -> str: ...
    def image_bytes(self, media: Media) -> bytes: ...
    def place_of(self, media: Media) -> str: ...


DECODED_BYTES = 2**29
"""Maximum size of a process's cache of decoded images, in bytes. The model, the engine and the reward read the same
images of a prompt, and datasets of pairs repeat images. 512 MiB are 170 images of one megapixel."""
_decoded: BoundedCache[PILImage] = BoundedCache(DECODED_BYTES, lambda image: 3 * image.width * image.height)


def decode_cached(source: ImageSource, media: Media) -> PILImage:
    """Return a decoded image of a dataset, from the process's cache if it is there.

    The cache (see `DECODED_BYTES`) returns the same object to all callers: do not change its pixels.

    Raises: DataError that says where the image is.
    """

    def decode() -> PILImage:
        data = source.image_bytes(media)
        try:
            return decode_image(data)
        except DataError as error:
            hint = f"repair the file or remove the row; `vlmrl data doctor {quote(source.path)}` decodes every image"
            raise DataError(error.message, where=source.place_of(media), hint=hint) from error

    return _decoded.get((source.path, media.sha256), decode)
