"""Measurements of a dataset without a model: histograms of image sizes, image tokens and prompt lengths."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from vlmrl.types import Media

PATCH_PIXELS = 28
"""Side of one image token of Qwen2.5-VL: 14-pixel patches, merged two by two."""
MIN_PIXELS, MAX_PIXELS = 3136, 1_003_520
"""Bounds of an image's area in pixels after resizing; they are the defaults of the recipe."""
CHARACTERS_PER_TOKEN = 4
NOTE = (
    "tokens are estimates made without a tokenizer: images as for Qwen2.5-VL (28 x 28 pixels per token, "
    f"{MIN_PIXELS} to {MAX_PIXELS} pixels per image), text at {CHARACTERS_PER_TOKEN} characters per token"
)


def estimate_image_tokens(media: Media, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS) -> int:
    """Return the number of tokens of one image in Qwen2.5-VL; other families differ.

    Args:
        min_pixels, max_pixels: bounds of its area after resizing; by default those of the recipe.
    Source: `smart_resize` of transformers' Qwen2-VL image processor: both sides become multiples of 28, and the area is
        brought between the limits.
    Example: 56 x 56 -> 4; 800 x 600 -> 609.
    """
    return _tokens_of_size(max(media.width, 1), max(media.height, 1), min_pixels, max_pixels)


@lru_cache(maxsize=100_000)
def _tokens_of_size(width: int, height: int, min_pixels: int, max_pixels: int) -> int:
    columns, rows = round(width / PATCH_PIXELS), round(height / PATCH_PIXELS)
    columns, rows = max(columns, 1), max(rows, 1)
    if columns * rows * PATCH_PIXELS**2 > max_pixels:
        beta = math.sqrt(width * height / max_pixels)
        columns = max(1, math.floor(width / beta / PATCH_PIXELS))
        rows = max(1, math.floor(height / beta / PATCH_PIXELS))
    elif columns * rows * PATCH_PIXELS**2 < min_pixels:
        beta = math.sqrt(min_pixels / (width * height))
        columns, rows = math.ceil(width * beta / PATCH_PIXELS), math.ceil(height * beta / PATCH_PIXELS)
    return columns * rows


def fit_size(width: int, height: int, max_pixels: int) -> tuple[int, int]:
    """Return the size to which an image is scaled down so that it takes at most max_pixels / 28^2 tokens.

    Both sides are multiples of 28, and the ratio of the sides is nearly the same. An image within the limit keeps its
    size.

    Example: 800 x 800 within 800 tokens (627,200 pixels) -> 784 x 784 (28 x 28 = 784 tokens).
    """
    if _tokens_of_size(width, height, 1, MAX_PIXELS) * PATCH_PIXELS**2 <= max_pixels:
        return width, height
    budget = max(1, max_pixels // PATCH_PIXELS**2)
    scale = math.sqrt(budget * PATCH_PIXELS**2 / (width * height))
    columns = min(budget, max(1, math.floor(width * scale / PATCH_PIXELS)))
    rows = min(max(1, budget // columns), max(1, math.floor(height * scale / PATCH_PIXELS)))
    return columns * PATCH_PIXELS, rows * PATCH_PIXELS


def estimate_text_tokens(characters: int) -> int:
    """Return the tokens of a text at 4 characters per token (English; the true number needs the tokenizer)."""
    return math.ceil(characters / CHARACTERS_PER_TOKEN)


def histogram(values: Sequence[float]) -> dict[str, Any]:
    """Return `{min, max, mean, bins: [[from, to, count], ...]}`.

    A bin holds from <= value < to. The edges are 0 and the powers of two times 1 and 1.5.
    """
    if not values:
        return {"min": None, "max": None, "mean": None, "bins": []}
    edges = [0]
    while edges[-1] <= max(values):
        power = len(edges) - 1
        edges.append(2 ** (power // 2 + 1) if power % 2 else (1 if power == 0 else 3 * 2 ** (power // 2 - 1)))
    counts = Counter(bisect_right(edges, value) - 1 for value in values)
    bins = [[edges[i], edges[i + 1], counts[i]] for i in sorted(counts)]
    return {"min": min(values), "max": max(values), "mean": round(math.fsum(values) / len(values), 2), "bins": bins}


def measure_images(images: Sequence[Media]) -> dict[str, Any]:
    """Return the sizes of images: the 20 most frequent with their counts, and a histogram of pixels.

    Args:
        images: each content once.
    """
    sizes = Counter(f"{media.width}x{media.height}" for media in images)
    common = dict(sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:20])
    return {
        "image_sizes": {**common, "others": sum(sizes.values()) - sum(common.values())},
        "image_pixels": histogram([media.width * media.height for media in images]),
    }
