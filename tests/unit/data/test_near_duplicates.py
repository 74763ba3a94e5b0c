from __future__ import annotations

import io
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from vlmrl.data import image_scan
from vlmrl.data.image_scan import COARSE_BITS, FINE_BITS, HASH_BYTES, find_near_copies, look_hash

TRAIN, TEST, OTHER = 1, 2, 4


def scene(seed: int) -> Image.Image:
    cells = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((400, 300), Image.Resampling.BICUBIC)


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(io.BytesIO(buffer.getvalue()))


def test_another_size_and_quality_look_alike_and_other_scenes_do_not() -> None:
    images = [scene(seed) for seed in range(30)] + [as_jpeg(scene(7).resize((200, 150)), 40)]
    found = find_near_copies([look_hash(image) for image in images], [TRAIN] * 30 + [TEST])
    assert found.near == [TEST if i == 7 else TRAIN if i == 30 else 0 for i in range(31)]
    assert found.examples == [(7, 30)] and found.skipped == 0


def test_a_hash_says_which_of_two_neighbours_is_brighter() -> None:
    # 17 x 16 cells that fall from left to right: every cell is brighter than its right neighbour, every bit is 1.
    falling = Image.fromarray(np.tile(np.linspace(255, 0, 170).astype(np.uint8), (160, 1))).convert("RGB")
    assert look_hash(falling) == "f" * 2 * HASH_BYTES
    assert look_hash(Image.new("RGB", (50, 50), (200, 200, 200))) == "0" * 2 * HASH_BYTES


def slow_search(table: np.ndarray, groups: list[int]) -> list[int]:
    bits = np.unpackbits(table, axis=1)
    near = [0] * len(table)
    for i in range(len(table)):
        for j in range(len(table)):
            differing = bits[i] != bits[j]
            if i != j and differing[:64].sum() <= COARSE_BITS and differing[64:].sum() <= FINE_BITS:
                near[i] |= groups[j]
    return near


@pytest.mark.parametrize("most", [image_scan.MAX_NEIGHBOURS, 2])
def test_the_search_finds_what_comparing_all_pairs_finds(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (60, HASH_BYTES), dtype=np.uint8)
    bits = np.unpackbits(np.repeat(base, 4, axis=0), axis=1)
    for row in range(len(bits)):  # two copies differ in 0 to 8 coarse and 0 to 46 fine bits: both sides of the limits
        coarse = rng.choice(64, rng.integers(0, 5), replace=False)
        fine = 64 + rng.choice(256, rng.integers(0, 24), replace=False)
        if row % 8:  # the first copy of every second image is left as it is: some hashes are equal
            bits[row, [*coarse, *fine]] ^= 1
        elif row:
            bits[row - 1] = bits[row - 2]
    table = np.packbits(bits, axis=1)
    groups = [int(group) for group in rng.integers(1, 8, len(table))]
    expected = slow_search(table, groups)
    assert 40 < sum(near == 0 for near in expected) < 200  # some images have near copies, others none
    monkeypatch.setattr(image_scan, "MAX_NEIGHBOURS", most)
    found = find_near_copies([row.tobytes().hex() for row in table], groups, shown=500)
    if most > 2:
        assert found.near == expected
    else:  # fewer are compared: nothing is found that is not there
        assert found.near != expected and all(a | b == b for a, b in zip(found.near, expected, strict=True))
    for i, j in found.examples:
        assert i < j and groups[i] != groups[j] and slow_search(table[[i, j]], [1, 1]) == [1, 1]
    assert len(found.examples) > 20


def test_equal_hashes_look_alike_and_flat_images_are_counted() -> None:
    name, other, flat = "ab" * HASH_BYTES, "10" * HASH_BYTES, "00" * HASH_BYTES
    found = find_near_copies([flat, name, other, name, flat, name], [TRAIN, TRAIN, TRAIN, TRAIN | TEST, TEST, OTHER])
    # the second image looks like the fourth (train, test) and the sixth; the fourth like two others, itself left out
    assert found.near == [0, TRAIN | TEST | OTHER, 0, TRAIN | OTHER, 0, TRAIN | TEST]
    assert found.examples == [(1, 3), (1, 5)] and found.skipped == 2
    assert find_near_copies([], []).near == [] and find_near_copies([flat], [1]).near == [0]


@pytest.mark.slow
def test_frames_of_a_film_take_no_more_memory_than_as_many_photographs() -> None:
    rng = np.random.default_rng(1)
    bits = np.repeat(rng.integers(0, 2, (1, 8 * HASH_BYTES), dtype=np.uint8), 3000, axis=0)
    bits[np.arange(3000), 64 + rng.integers(0, 256, 3000)] ^= 1
    bits[np.arange(3000), 64 + rng.integers(0, 256, 3000)] ^= 1
    hashes = [row.tobytes().hex() for row in np.packbits(bits, axis=1)]
    tracemalloc.start()
    try:
        found = find_near_copies(hashes, [TRAIN] * 2999 + [TEST])
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.near == [TRAIN | TEST] * 2999 + [TRAIN]
    assert most < 3000 * 1000  # 4.5 million pairs look alike: 1,000 bytes an image is far from one byte a pair
