from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from vlmrl.data import likeness
from vlmrl.data.likeness import COARSE_BITS, FINE_BITS, HASH_BYTES, look_hash, near_duplicates


def scene(seed: int) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((400, 300), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_another_size_and_quality_look_alike_and_other_scenes_do_not() -> None:
    images = [scene(seed) for seed in range(30)] + [as_jpeg(scene(7).resize((200, 150)), 40)]
    assert near_duplicates([look_hash(image) for image in images]).pairs == [(7, 30)]


def test_a_hash_says_which_of_two_neighbours_is_brighter() -> None:
    # 17 x 16 cells that fall from left to right: every cell is brighter than its right neighbour, every bit is 1.
    falling = Image.fromarray(np.tile(np.linspace(255, 0, 170).astype(np.uint8), (160, 1))).convert("RGB")
    assert look_hash(falling) == "f" * 2 * HASH_BYTES
    assert look_hash(Image.new("RGB", (50, 50), (200, 200, 200))) == "0" * 2 * HASH_BYTES


def slow_search(table: np.ndarray) -> list[tuple[int, int]]:
    bits = np.unpackbits(table, axis=1)
    found = []
    for i in range(len(table)):
        for j in range(i + 1, len(table)):
            differing = bits[i] != bits[j]
            if differing[:64].sum() <= COARSE_BITS and differing[64:].sum() <= FINE_BITS:
                found.append((i, j))
    return found


@pytest.mark.parametrize("bucket", [likeness.MAX_BUCKET, 3])
def test_the_search_finds_what_comparing_all_pairs_finds(monkeypatch: pytest.MonkeyPatch, bucket: int) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (40, HASH_BYTES), dtype=np.uint8)
    bits = np.unpackbits(np.repeat(base, 4, axis=0), axis=1)
    for row in range(len(bits)):  # two copies differ in 0 to 6 coarse and 0 to 32 fine bits: both sides of the limits
        coarse = rng.choice(64, rng.integers(0, 4), replace=False)
        fine = 64 + rng.choice(256, rng.integers(0, 17), replace=False)
        bits[row, [*coarse, *fine]] ^= 1
    table = np.packbits(bits, axis=1)
    expected = slow_search(table)
    assert 20 < len(expected) < 230  # some of the 240 pairs of copies are near, others not
    monkeypatch.setattr(likeness, "MAX_BUCKET", bucket)
    found = near_duplicates([row.tobytes().hex() for row in table]).pairs
    assert found == expected if bucket > 3 else set(found) <= set(expected)


def test_equal_hashes_are_joined_to_the_first_and_flat_images_are_counted() -> None:
    name, other, flat = "ab" * HASH_BYTES, "10" * HASH_BYTES, "00" * HASH_BYTES
    found = near_duplicates([flat, name, other, name, flat, name])
    assert found.pairs == [(1, 3), (1, 5)] and found.skipped == 2
    assert near_duplicates([]).pairs == []
