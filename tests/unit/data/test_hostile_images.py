"""Each kind of image file that a collection may hold: handled, or dropped with the reason."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from vlmrl.data.image_scan import examine, stored_form
from vlmrl.data.images import MAX_PIXELS, decode_image
from vlmrl.errors import DataError

PIXELS = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
RGB = Image.fromarray(PIXELS)
OTHER = Image.new("RGB", (60, 40), (1, 2, 3))


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def deep() -> Image.Image:
    """16 bits a pixel: 0, 257, 514, ... so that the top byte of pixel k is k."""
    return Image.fromarray((np.arange(200, dtype=np.uint16) * 257).reshape(10, 20))


def bomb() -> bytes:
    """A PNG of a few hundred bytes that claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return file_of(RGB, "JPEG", exif=exif)


HANDLED: dict[str, tuple[Callable[[], bytes], str]] = {
    "16-bit PNG": (lambda: file_of(deep(), "PNG"), "16 bits a channel"),
    "16-bit TIFF": (lambda: file_of(deep(), "TIFF"), "16 bits a channel"),
    "CMYK JPEG": (lambda: file_of(RGB.convert("CMYK"), "JPEG"), "CMYK"),
    "CMYK TIFF": (lambda: file_of(RGB.convert("CMYK"), "TIFF"), "CMYK"),
    "palette PNG": (lambda: file_of(RGB.convert("P"), "PNG"), "palette"),
    "animated GIF": (
        lambda: file_of(RGB.convert("P"), "GIF", save_all=True, append_images=[OTHER]),
        "first of several frames",
    ),
    "animated WebP": (
        lambda: file_of(RGB, "WEBP", save_all=True, append_images=[OTHER], lossless=True),
        "first of several frames",
    ),
    "animated PNG": (lambda: file_of(RGB, "PNG", save_all=True, append_images=[OTHER]), "first of several frames"),
    "EXIF-rotated JPEG": (turned, "turned upright (EXIF)"),
    "transparent PNG": (lambda: file_of(RGB.convert("RGBA"), "PNG"), "transparency"),
}
DROPPED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "an empty file (0 bytes)"),
    "truncated JPEG": (lambda: file_of(RGB, "JPEG")[:-200], "broken image: image file is truncated"),
    "truncated PNG": (lambda: file_of(RGB, "PNG")[:500], "broken image"),
    "truncated TIFF": (lambda: file_of(RGB, "TIFF")[:300], "broken image"),
    "truncated WebP": (lambda: file_of(RGB, "WEBP")[:300], "not an image in a known format"),
    "web page": (lambda: b"<html>404 not found</html>", "not an image in a known format"),
    "PDF": (lambda: file_of(RGB, "PDF"), "not an image in a known format"),
    "floating point": (lambda: file_of(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "floating-point pixels"),
    "decompression bomb": (bomb, "pixels"),
}


@pytest.mark.parametrize("name", HANDLED)
def test_an_unusual_image_is_handled_and_remarked_on(name: str) -> None:
    make, remark = HANDLED[name]
    data = make()
    seen = examine(data)
    kept, media, image = stored_form(data)
    assert remark in seen.remarks and seen.media == media and seen.bytes == len(kept)
    assert image.mode == "RGB" and image.size == (media.width, media.height) == decode_image(kept).size


def test_what_is_handled_keeps_its_picture() -> None:
    top_bytes = np.asarray(decode_image(HANDLED["16-bit PNG"][0]()))[..., 0]
    assert top_bytes.ravel().tolist() == list(range(200))
    assert np.array_equal(np.asarray(decode_image(HANDLED["animated PNG"][0]())), PIXELS)
    assert np.array_equal(np.asarray(decode_image(HANDLED["animated WebP"][0]())), PIXELS)
    assert decode_image(turned()).size == (40, 60)
    upright = np.asarray(decode_image(file_of(RGB, "JPEG")))
    assert np.abs(np.asarray(decode_image(turned())).astype(int) - np.rot90(upright, -1)).mean() < 1
    assert np.abs(np.asarray(decode_image(HANDLED["CMYK TIFF"][0]())).astype(int) - PIXELS).max() <= 1


@pytest.mark.parametrize("name", DROPPED)
def test_a_file_that_cannot_be_used_is_dropped_with_the_reason(name: str) -> None:
    make, reason = DROPPED[name]
    with pytest.raises(DataError) as caught:
        examine(make())
    assert reason in caught.value.message


def test_a_bomb_is_refused_before_its_pixels_are_made() -> None:
    assert MAX_PIXELS < 60_000 * 60_000 and len(bomb()) < 200
    with pytest.raises(DataError, match=r"pixels"):
        examine(bomb())
