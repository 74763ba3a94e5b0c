"""Images as the model sees them: from the processor's tensors back to pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from vlmrl.data.encode import EncodedPrompt


def seen_images(prompt: EncodedPrompt, image_processor: Any) -> list[np.ndarray]:
    """The images of a prompt after resizing and normalising, undone to pixels.

    Grid families (`image_grid_thw`): the flat patches are laid back on their grid; the others keep [N, 3, H, W].
    Returns: one uint8 array [H, W, 3] for each image, or each tile where an image is cut into tiles; none where the
    tensors are patches in a layout of the family's own (Gemma 4, MiniCPM-V).
    """
    if not prompt.images or {"image_position_ids", "target_sizes"} & prompt.images.keys():
        return []
    tensors = _from_grid(prompt.images, image_processor) if "image_grid_thw" in prompt.images else _plain(prompt.images)
    scale = np.asarray(getattr(image_processor, "image_std", None) or (1.0, 1.0, 1.0))
    shift = np.asarray(getattr(image_processor, "image_mean", None) or (0.0, 0.0, 0.0))
    factor = 1.0 / float(getattr(image_processor, "rescale_factor", None) or 1 / 255)
    pictures = [np.moveaxis(t.float().cpu().numpy(), 0, -1) * scale + shift for t in tensors]
    return [np.clip(np.rint(picture * factor), 0, 255).astype(np.uint8) for picture in pictures]


def _plain(images: Mapping[str, Tensor]) -> list[Tensor]:
    pixels = images["pixel_values"]
    return list(pixels.reshape(-1, *pixels.shape[-3:]))


def _from_grid(images: Mapping[str, Tensor], image_processor: Any) -> list[Tensor]:
    """Patches in the processor's order (grid cell of merge x merge patches, then the patch) -> [3, H, W] an image."""
    patch, merge = image_processor.patch_size, image_processor.merge_size
    found, start = [], 0
    for grid in images["image_grid_thw"]:
        frames, rows, columns = (int(n) for n in grid)
        count = frames * rows * columns
        flat = images["pixel_values"][start : start + count]
        start += count
        shape = (frames, rows // merge, columns // merge, merge, merge, 3, -1, patch, patch)
        laid = flat.reshape(shape)[0, :, :, :, :, :, 0]  # a still image fills the frames of a patch with copies
        found.append(laid.permute(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch))
    return found
