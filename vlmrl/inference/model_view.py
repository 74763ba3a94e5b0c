"""Images as the model sees them: from the processor's tensors back to pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vlmrl.data.encode import EncodedPrompt


def seen_images(prompt: EncodedPrompt, image_processor: Any) -> list[np.ndarray]:
    """Return the images of a prompt after resizing and normalising, converted back to pixels.

    Grid families (`image_grid_thw`): the flat patches are put back on their grid; the others have [N, 3, H, W].

    Returns: one uint8 array [H, W, 3] for each image, or for each tile of an image that is cut into tiles; none if the
        tensors are patches in a layout of the family's own (Gemma 4, MiniCPM-V).
    """
    if not prompt.images or {"image_position_ids", "target_sizes"} & prompt.images.keys():
        return []
    tensors = _from_grid(prompt.images, image_processor) if "image_grid_thw" in prompt.images else _plain(prompt.images)
    scale = np.asarray(getattr(image_processor, "image_std", None) or (1.0, 1.0, 1.0))
    shift = np.asarray(getattr(image_processor, "image_mean", None) or (0.0, 0.0, 0.0))
    factor = 1.0 / float(getattr(image_processor, "rescale_factor", None) or 1 / 255)
    # [3, H, W] -> [H, W, 3]
    pictures = [np.moveaxis(t.float().cpu().numpy(), 0, -1) * scale + shift for t in tensors]
    return [np.clip(np.rint(picture * factor), 0, 255).astype(np.uint8) for picture in pictures]


def _plain(images: Mapping[str, Tensor]) -> list[Tensor]:
    pixels = images["pixel_values"]
    # [.., 3, H, W] -> N times [3, H, W]
    return list(pixels.reshape(-1, *pixels.shape[-3:]))


def _from_grid(images: Mapping[str, Tensor], image_processor: Any) -> list[Tensor]:
    """Rearrange patches from the processor's order (cells of merge x merge patches) to one [3, H, W] per image."""
    patch, merge = image_processor.patch_size, image_processor.merge_size
    pictures, start = [], 0
    for grid in images["image_grid_thw"]:
        frames, rows, columns = (int(n) for n in grid)
        count = frames * rows * columns
        # [patches, 3 * frames of a patch * patch * patch]
        flat = images["pixel_values"][start : start + count]
        start += count
        shape = (frames, rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
        grid_patches = flat.reshape(shape)[0, :, :, :, :, :, 0]  # all frames of a still image are copies
        # [R / merge, C / merge, merge, merge, 3, patch, patch] -> [3, R * patch, C * patch]; R, C: the grid in patches
        pictures.append(grid_patches.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch))
    return pictures
