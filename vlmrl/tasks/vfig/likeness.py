"""Likeness of two pictures as released models see it: LPIPS, and cosines of CLIP, DINO and SigLIP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

COSINES: dict[str, tuple[str, Literal["image_features", "pooler"]]] = {
    "clip": ("openai/clip-vit-base-patch32", "image_features"),
    "dino": ("facebook/dinov2-base", "pooler"),
    "siglip": ("google/siglip2-so400m-patch14-384", "image_features"),
}
"""Name -> published model, and what of it stands for a picture."""
LPIPS = "lpips"


@dataclass(frozen=True)
class PictureModel:
    """Model that compares pictures.

    Args:
        look: pictures, each (height, width, 3) uint8 RGB -> what the model sees in each.
        compare: what it sees in two pictures -> their cosine in [-1, 1], or for LPIPS their distance, >= 0.
    """

    look: Callable[[Sequence[np.ndarray]], Sequence[Any]]
    compare: Callable[[Any, Any], float]


def open_picture_model(name: str, source: str, device: str) -> PictureModel:
    """Load a model.

    Args:
        name: LPIPS, or one of COSINES.
        source: folder, or model of the hub; "" = the published one; for LPIPS see `Lpips`.
        device: as `model.device` of a recipe.
    Raises: CheckpointError if it cannot be loaded.
    """
    from PIL import Image

    from vlmrl.model.picture_models import Lpips, PictureFeatures

    if name == LPIPS:
        return PictureModel(list, Lpips(source, device).distance)
    published, output = COSINES[name]
    features = PictureFeatures(source or published, output, device)
    return PictureModel(
        lambda pictures: list(features.of([Image.fromarray(picture) for picture in pictures])),
        lambda one, other: float((one * other).sum()),
    )
