"""Size of a whole image after an image processor's resize: the size that a model's pixel coordinates refer to."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from vlmrl.types import Size


def seen_size(image_processor: Any, stored: Size, tile: Size | None) -> Size | None:
    """Return (width, height) of an image as the model sees it, for a processor without a grid of patches.

    If the model sees the image in tiles, it is the size of all tiles together; a thumbnail beside them has no effect.

    Args:
        image_processor: of transformers.
        stored: (width, height) of the image as stored.
        tile: (width, height) of one tile, or of the image if there are no tiles; None if the tensors do not show it.
    Returns: None if it is unknown, or if the model does not see the whole image (a crop of its centre).
    """
    width, height = stored
    if hasattr(image_processor, "get_sliced_grid"):
        return _of_slices(image_processor, stored)
    if hasattr(image_processor, "pooling_kernel_size"):
        return _of_pooled_patches(image_processor, stored)
    if tile is None:
        return None
    if getattr(image_processor, "do_center_crop", False) and width != height:
        return None
    if getattr(image_processor, "do_image_splitting", False):
        _, rows, columns = image_processor.get_number_of_image_patches(height, width, {})
        return (tile[0] * max(1, columns), tile[1] * max(1, rows))
    if hasattr(image_processor, "crop_to_patches"):
        return _of_canvas(image_processor, stored, tile)
    return tile


def _of_slices(image_processor: Any, stored: Size) -> Size:
    """Return the size for MiniCPM-V: an image that is cut into slices is resized to a multiple of the grid first."""
    size, scale = (stored[1], stored[0]), image_processor.scale_resolution
    grid = image_processor.get_sliced_grid(size, image_processor.max_slice_nums, scale)
    settings = {
        "scale_resolution": scale,
        "patch_size": image_processor.patch_size,
        "downsample_mode": image_processor.downsample_mode,
        "allow_upscale": True,
    }
    if not image_processor.slice_mode or grid is None:
        height, width = image_processor.find_best_resize(size, **settings)
    else:
        height, width = image_processor.get_refine_size(size, grid, **settings)
    return width, height


def _of_pooled_patches(image_processor: Any, stored: Size) -> Size | None:
    """Return the size for Gemma 4: it keeps the proportions, within a number of patches."""
    resize = getattr(import_module(type(image_processor).__module__), "get_aspect_ratio_preserving_size", None)
    if resize is None:
        return None
    pool = image_processor.pooling_kernel_size
    most = image_processor.max_soft_tokens * pool**2
    height, width = resize(stored[1], stored[0], image_processor.patch_size, most, pool)
    return width, height


def _of_canvas(image_processor: Any, stored: Size, tile: Size) -> Size | None:
    """Return the size for InternVL: the image is stretched to a canvas of tiles with nearly its proportions.

    Its processor always cuts images into tiles, whatever `crop_to_patches` of the image processor is.
    """
    canvas = getattr(import_module(type(image_processor).__module__), "get_optimal_tiled_canvas", None)
    if canvas is None:
        return None
    limits = image_processor.min_patches, image_processor.max_patches
    columns, rows = canvas((stored[1], stored[0]), (tile[1], tile[0]), *limits)
    return tile[0] * columns, tile[1] * rows
