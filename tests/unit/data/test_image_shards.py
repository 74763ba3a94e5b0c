from __future__ import annotations

import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlmrl.data import images as limits
from vlmrl.data.image_scan import Stored, examine, scan_files, stored_form, write_shards
from vlmrl.data.images import ImageStore, ShardWriter, decode_image, encode_png, image_hash
from vlmrl.data.measurements import MAX_PIXELS, PATCH_PIXELS, estimate_image_tokens, fit_size
from vlmrl.errors import DataError
from vlmrl.store import media
from vlmrl.types import Media


def noise(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def collection(count: int) -> dict[str, bytes]:
    return {f"{i:03d}.png": encode_png(noise(i)) for i in range(count)}


def planned(files: dict[str, bytes]) -> list[Stored]:
    return [Stored(image_hash(data), len(data), name) for name, data in files.items()]


EXACT = sum(len(data) for data in list(collection(3).values())[:3])
"""A shard that its third image fills to the byte."""


@pytest.mark.parametrize(("batch", "shard"), [(1, 1), (1, EXACT), (9_000, 20_000), (1 << 20, 1 << 20)])
def test_shards_written_in_parts_are_those_written_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch: int, shard: int
) -> None:
    monkeypatch.setattr(media, "BATCH_BYTES", batch)
    monkeypatch.setattr(limits, "SHARD_BYTES", shard)
    files = collection(20)
    (tmp_path / "one").mkdir()
    writer = ShardWriter(tmp_path / "one")
    for data in files.values():
        writer.add(image_hash(data), data)
    writer.close()
    (tmp_path / "parts").mkdir()
    write_shards(tmp_path / "parts", planned(files), partial(map, files.__getitem__), workers=1)
    one, parts = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "parts"))
    assert one == parts and len(one) == (20 if shard == 1 else 1 if shard > 100_000 else len(one))
    store = ImageStore(tmp_path / "parts")
    assert [store.read(image_hash(data)) for data in files.values()] == list(files.values())


def test_an_image_that_changed_after_it_was_examined_is_an_error(tmp_path: Path) -> None:
    files = collection(3)
    images = planned(files)
    files["001.png"] = encode_png(noise(99))
    with pytest.raises(DataError, match="changed while it was read"):
        write_shards(tmp_path, images, partial(map, files.__getitem__), workers=1)
    assert not list(tmp_path.glob("media-*"))


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(4, 1400))
def test_an_image_brought_down_takes_no_more_tokens_than_its_budget(width: int, height: int, budget: int) -> None:
    size = fit_size(width, height, budget * PATCH_PIXELS**2)
    tokens = estimate_image_tokens(Media("", *size), 1, MAX_PIXELS)
    assert tokens <= budget
    if estimate_image_tokens(Media("", width, height), 1, MAX_PIXELS) <= budget:
        assert size == (width, height)
    elif max(width, height) < 4 * min(width, height) and budget >= 64:
        assert tokens > 0.7 * budget  # and not much smaller than it has to be
        assert 0.7 < (size[0] / size[1]) / (width / height) < 1.4


def test_fit_size_of_an_800_pixel_square() -> None:
    # 800 x 800 takes 29 x 29 = 841 tokens (round(800 / 28) = 29). Within 800 tokens: scale sqrt(627200 / 640000) =
    # 0.98995, 791.96 / 28 = 28.28 -> 28 columns and rows, 784 tokens.
    assert estimate_image_tokens(Media("", 800, 800)) == 841
    assert fit_size(800, 800, 800 * 28 * 28) == (784, 784)


def test_a_photograph_made_smaller_stays_a_jpeg_and_a_drawing_a_png() -> None:
    for kind in ("JPEG", "PNG"):
        buffer = io.BytesIO()
        noise(1, 280, 280).save(buffer, kind)
        data, media, image = stored_form(buffer.getvalue(), 25 * 28 * 28)
        assert (media.width, media.height) == (140, 140) == image.size == decode_image(data).size
        assert Image.open(io.BytesIO(data)).format == kind
        assert stored_form(buffer.getvalue(), 25 * 28 * 28)[0] == data
        assert examine(buffer.getvalue(), 25 * 28 * 28).media == media == Media(image_hash(data), 140, 140)


def test_a_scan_says_what_each_file_is_in_the_order_of_the_paths(tmp_path: Path) -> None:
    files: dict[str, bytes] = {**collection(5), "broken.png": b"\x89PNG rubbish", "none.png": b""}
    names: Sequence[str] = ["none.png", *list(files)[:5], "broken.png"]
    found = list(scan_files(files.__getitem__, names, tmp_path, workers=1))
    assert [name for name, _ in found] == list(names)
    assert found[0][1] == "an empty file (0 bytes)" and "not an image" in str(found[-1][1])
    assert [seen for _, seen in found[1:6]] == [examine(files[name]) for name in names[1:6]]
    assert list(scan_files({}.__getitem__, names, tmp_path, workers=1)) == found  # read from the parts, not the files
