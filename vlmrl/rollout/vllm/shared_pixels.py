"""Pixels that the trainer's image processor computed, for an engine that runs the model's processor itself.

An engine gets an image and calls its own copy of the image processor. Where the trainer has pixels of that very image,
the copy returns these. This works for families whose processor fits an image to a grid of patches; for others the
engine processes the images again. An image is identified by its content, because engines and processors copy images.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from vlmrl.data.bounded_cache import BoundedCache
from vlmrl.data.encode import NOT_MODEL_INPUTS, EncodedPrompt, tensor_bytes

GRID = "image_grid_thw"
"""Name of the tensor with frames, rows and columns of patches of each image; the patches of all images follow each
other."""
MADE_BYTES = 2**28
"""Size of the cache of pixels that an engine computed itself; 256 MiB are 10 images of one megapixel."""


class SharedPixels:
    """Pixels by image: those of the current prompt, and those computed here before.

    Attributes:
        made: number of images that were processed here.
    """

    def __init__(self) -> None:
        self.made = 0
        self._given: list[tuple[Any, Mapping[str, Tensor]]] = []
        self._kept: BoundedCache[Mapping[str, Tensor]] = BoundedCache(MADE_BYTES, tensor_bytes)

    @contextmanager
    def of(self, prompt: EncodedPrompt) -> Iterator[None]:
        """Context manager: the pixels of this prompt's images are available. Nothing is copied."""
        pixels = split_images(prompt.images)
        self._given = list(zip(prompt.pictures, pixels, strict=True)) if pixels else []
        try:
            yield
        finally:
            self._given = []

    def serve(self, image_processor: Any) -> None:
        """Make an image processor of a grid family ask this object first, instead of any other that it asked before.

        Does nothing for other families.
        """
        own = type(image_processor)
        if isinstance(image_processor, _Asking):
            own = own.__mro__[2]
        if hasattr(image_processor, "merge_size"):
            image_processor.__class__ = type(own.__name__, (_Asking, own), {"shared": self})

    def pixels(self, image: Any, process: Any) -> Mapping[str, Tensor]:
        """Return the tensors of one image.

        Args:
            process: computes them.
        """
        for picture, pixels in self._given:
            if _equal(picture, image):
                return pixels

        def make() -> Mapping[str, Tensor]:
            self.made += 1
            return process()

        return self._kept.get(_content(image), make)


def _equal(picture: Any, image: Any) -> bool:
    if picture is image:
        return True
    alike = (picture.mode, picture.size) == (image.mode, image.size)
    return alike and picture.tobytes() == image.tobytes()


def _content(image: Any) -> Hashable:
    return image.mode, image.size, blake2b(image.tobytes(), digest_size=16).digest()


class _Asking:
    """Image processor that asks `shared` for the pixels of each image."""

    shared: SharedPixels

    def __call__(self, images: Any, *args: Any, **kwargs: Any) -> Any:
        from transformers.feature_extraction_utils import BatchFeature

        process = super().__call__  # type: ignore[misc]  # method of the class that this one is mixed into
        every = images if isinstance(images, (list, tuple)) else [images]
        if not every or any(isinstance(image, (list, tuple)) for image in every):
            return process(images, *args, **kwargs)
        if any(kwargs.get(step) is False for step in ("do_resize", "do_rescale", "do_normalize")):
            self.shared.made += len(every)  # not the trainer's pixels: the engine does that step elsewhere
            return process(images, *args, **kwargs)
        tensors = [self.shared.pixels(image, lambda image=image: process([image], *args, **kwargs)) for image in every]
        names = [name for name in tensors[0] if name not in NOT_MODEL_INPUTS]
        return BatchFeature({name: torch.cat([pixels[name] for pixels in tensors]) for name in names})


def split_images(images: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the tensors of each image of a prompt, as views.

    [] for families without a grid of patches, and for no images. Example: grids [1, 2, 2] and [1, 4, 2]: the first 4
    patches and the next 8.
    """
    if GRID not in images:
        return []
    lengths = images[GRID].prod(-1).tolist()
    parts = {name: x.split(1 if name == GRID else lengths) for name, x in images.items()}
    return [{name: part[k] for name, part in parts.items()} for k in range(len(lengths))]
