"""Size of an image as a model sees it, for the processors of all families: measured in the pixels that they make."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tinyprocessors import PROCESSORS

from vlmrl.data.encode import Encoder, seen_size
from vlmrl.data.images import encode_png, image_hash
from vlmrl.evaluate.trial import seen_images
from vlmrl.types import Media, Message, Row

SIZES = [(200, 160), (300, 100), (90, 210), (64, 64)]
PATCHES = {"gemma4", "minicpmv4_6"}
"""Families whose tensors are patches in a layout of their own."""


def ramp(width: int, height: int) -> Image.Image:
    """Return an image whose red grows from left to right, and whose green grows from top to bottom, from 0 to 255."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, width)[None, :]
    pixels[..., 1] = np.linspace(0, 255, height)[:, None]
    return Image.fromarray(pixels)


def encoded(name: str, *sizes: tuple[int, int]):
    encoder = Encoder(PROCESSORS[name]())
    pictures = [ramp(*size) for size in sizes]
    media = tuple(Media(image_hash(encode_png(p)), *p.size) for p in pictures)
    row = Row("r", "s", "t", {}, media)
    return encoder, encoder.encode(row, [Message("user", "<image>" * len(media) + "where?")], pictures)


def whole(name: str, prompt, image_processor) -> np.ndarray:
    """Return the image as the model sees it: the first tiles in rows, as many as the declared size says."""
    width, height = prompt.seen_sizes[0]
    tiles = seen_images(prompt, image_processor)
    tall, wide = tiles[0].shape[:2]
    rows, columns = height // tall, width // wide
    assert (rows * tall, columns * wide) == (height, width) and len(tiles) >= rows * columns
    return np.vstack([np.hstack(tiles[row * columns : (row + 1) * columns]) for row in range(rows)])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [name for name in PROCESSORS if name not in PATCHES])
def test_a_share_of_the_image_is_the_same_share_of_the_seen_size(name: str, size: tuple[int, int]) -> None:
    encoder, prompt = encoded(name, size)
    assert len(prompt.seen_sizes) == 1
    picture = whole(name, prompt, encoder.processor.image_processor).astype(float)
    height, width = picture.shape[:2]
    # Pixel k of n shows the share (k + 0.5) / n of the image. At the edges, resampling repeats pixels.
    across = 255 * (np.arange(width) + 0.5) / width
    down = 255 * (np.arange(height) + 0.5) / height
    assert np.abs(picture[..., 0] - across[None, :]).max() < 255 * 2 / min(width, *size)
    assert np.abs(picture[..., 1] - down[:, None]).max() < 255 * 2 / min(height, *size)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", sorted(PATCHES))
def test_patches_of_a_familys_own_layout_cover_the_seen_size(name: str, size: tuple[int, int]) -> None:
    encoder, prompt = encoded(name, size)
    ((width, height),), patch = prompt.seen_sizes, encoder.processor.image_processor.patch_size
    if name == "gemma4":
        # [patches, 2]: column and row of each patch, -1 = padding
        positions = prompt.images["image_position_ids"][0]
        assert ((positions.max(0).values + 1) * patch).tolist() == [width, height]
        return
    # [slices, 2]: rows and columns of patches; the first slice is the thumbnail, if there are several
    slices = prompt.images["target_sizes"].tolist()
    slices = slices[1:] or slices
    assert sum(rows * columns for rows, columns in slices) * patch**2 == width * height
    assert height % (slices[0][0] * patch) == 0 and width % (slices[0][1] * patch) == 0


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_image_of_a_prompt_has_its_own_seen_size(name: str) -> None:
    _, both = encoded(name, (200, 160), (90, 210))
    alone = [encoded(name, size)[1].seen_sizes[0] for size in ((200, 160), (90, 210))]
    assert list(both.seen_sizes) == alone


def test_the_size_is_unknown_where_the_model_does_not_see_the_whole_image() -> None:
    cropped = SimpleNamespace(do_center_crop=True)
    assert seen_size(cropped, (300, 100), (32, 32)) is None
    assert seen_size(cropped, (100, 100), (32, 32)) == (32, 32)
    assert seen_size(SimpleNamespace(), (300, 100), None) is None
