from __future__ import annotations

import io
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, PngImagePlugin

from vlmrl.data import images as images_module
from vlmrl.data.images import ImageStore, ShardWriter, decode_image, encode_png, image_hash, probe_image, store_decoded
from vlmrl.errors import DataError
from vlmrl.store import media


def file_of(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format=kind, **options)
    return buffer.getvalue()


def noise(width: int = 5, height: int = 3, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_png_is_the_same_for_the_same_pixels_and_keeps_them() -> None:
    image = noise()
    image.info["Software"] = "a clock"
    assert encode_png(image) == encode_png(noise())
    assert np.array_equal(np.asarray(decode_image(encode_png(image))), np.asarray(noise()))


def test_png_jpeg_and_webp_are_stored_as_they_are_and_others_as_png() -> None:
    for kind in ("PNG", "JPEG", "WEBP"):
        data = file_of(noise(), kind)
        assert store_decoded(data)[0] == data
    data, media = store_decoded(file_of(noise(), "BMP"))[:2]
    assert probe_image(data) == (media, "PNG") and (media.width, media.height) == (5, 3)
    assert np.array_equal(np.asarray(decode_image(data)), np.asarray(noise()))


EXIF, PARTS = Image.Exif(), [PngImagePlugin.PngInfo() for _ in range(2)]
EXIF[0x0112] = 6
PARTS[0].add_text("Raw profile type exif", f"\nexif\n{len(EXIF.tobytes())}\n{EXIF.tobytes().hex()}", zip=True)
PARTS[1].add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')


@pytest.mark.parametrize(
    ("kind", "part"),
    [("JPEG", {"exif": EXIF}), ("PNG", {"exif": EXIF}), *(("PNG", {"pnginfo": part}) for part in PARTS)],
)
def test_an_image_is_turned_upright_and_its_size_is_that_of_the_upright_image(kind: str, part: dict) -> None:
    data = file_of(noise(5, 3), kind, **part)
    media, _ = probe_image(data)
    assert (media.width, media.height) == (3, 5) == decode_image(data).size


@pytest.mark.parametrize("kind", images_module.KEPT_FORMATS)
def test_a_reference_needs_no_pixels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(noise(), kind, **({"save_all": True} if kind == "MPO" else {}))
    decoded: list[object] = []
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: decoded.append(image))
    assert probe_image(data)[0].width == 5 and not decoded


def test_transparent_pixels_become_white_and_sixteen_bits_keep_their_brightness() -> None:
    clear = Image.new("RGBA", (1, 1), (200, 0, 0, 0))
    assert decode_image(file_of(clear, "PNG")).getpixel((0, 0)) == (255, 255, 255)
    deep = Image.fromarray(np.array([[0, 128 * 256, 65535]], dtype=np.uint16))
    assert [decode_image(file_of(deep, "PNG")).getpixel((x, 0)) for x in range(3)] == [(0,) * 3, (128,) * 3, (255,) * 3]


@pytest.mark.parametrize("data", [b"", b"hello", b"\x89PNG\r\n\x1a\nrubbish", file_of(noise(40, 40), "PNG")[:-30]])
def test_a_broken_file_is_a_data_error(data: bytes) -> None:
    with pytest.raises(DataError):
        store_decoded(data)


def test_an_image_that_claims_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MAX_PIXELS", 14)
    with pytest.raises(DataError, match="5 x 3 pixels"):
        probe_image(file_of(noise(), "PNG"))


def test_a_format_with_a_dangerous_decoder_is_not_read() -> None:
    with pytest.raises(DataError, match="not an image in a known format"):
        probe_image(file_of(noise(), "EPS"))


def test_shards_hold_each_content_once_and_are_read_back(tmp_path: Path) -> None:
    files = [encode_png(noise(seed=seed)) for seed in (1, 2, 3, 1, 2)]
    writer = ShardWriter(tmp_path, shard_bytes=1)
    for data in files:
        writer.add(image_hash(data), data)
    assert len(writer) == 3 and len(writer.close()) >= 1
    store = pickle.loads(pickle.dumps(ImageStore(tmp_path)))
    assert store.hashes() == [image_hash(data) for data in files[:3]]
    assert [store.read(image_hash(data)) for data in files] == files


def test_shards_split_at_their_size_and_are_the_same_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(media, "BATCH_BYTES", 1)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        writer = ShardWriter(tmp_path / name, shard_bytes=1)
        for seed in range(3):
            data = encode_png(noise(seed=seed))
            writer.add(image_hash(data), data)
        assert [path.name for path in writer.close()] == [f"media-0000{i}.arrow" for i in range(3)]
    assert all((tmp_path / "a" / p.name).read_bytes() == p.read_bytes() for p in (tmp_path / "b").iterdir())
    assert len(ImageStore(tmp_path / "a")) == 3


def test_a_changed_or_missing_image_is_an_error_and_not_another_image(tmp_path: Path) -> None:
    data = encode_png(noise())
    writer = ShardWriter(tmp_path)
    writer.add(image_hash(data), data)
    (path,) = writer.close()
    path.write_bytes(path.read_bytes().replace(data[20:40], bytes(20)))
    with pytest.raises(DataError, match="does not have the bytes"):
        ImageStore(tmp_path).read(image_hash(data))
    with pytest.raises(DataError, match="in no shard"):
        ImageStore(tmp_path).read("0" * 64)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match="cannot be read"):
        ImageStore(tmp_path)
