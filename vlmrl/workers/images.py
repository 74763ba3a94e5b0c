"""Images on their way to workers: each goes to a worker once, for all responses to its prompt."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmrl.types import RewardInput

HELD_SHARE = 8
"""A worker keeps images of at most 1 / HELD_SHARE of its memory limit, besides those of its current request."""


class ImageKeys:
    """Content keys of the images of a pool's inputs, and how many inputs without an outcome need each."""

    def __init__(self) -> None:
        self._keys: dict[int, tuple[Any, str]] = {}  # with the image itself: an id is used again after its end
        self._uses: Counter[str] = Counter()

    def of(self, x: RewardInput) -> list[str]:
        """Return the key of each image of an input."""
        return [self._key(image) for image in x.images]

    def add(self, inputs: Sequence[RewardInput]) -> None:
        """Count the images of inputs that will be scored."""
        self._uses.update(key for x in inputs for key in self.of(x))

    def done(self, x: RewardInput) -> None:
        """Count an input that has its outcome."""
        self._uses.subtract(self.of(x))

    def is_needed(self, key: str) -> bool:
        """Return whether an input without an outcome has this image."""
        return self._uses[key] > 0

    def _key(self, image: Any) -> str:
        if id(image) not in self._keys:
            content = hashlib.blake2b(pixels_of(image), digest_size=16, person=b"%dx%d" % image.size)
            self._keys[id(image)] = image, content.hexdigest()
        return self._keys[id(image)][1]


@dataclass
class Parcel:
    """Images that go along with a request.

    Args:
        keys: keys of the images of each input.
        sent: (key, width, height) of the images that the worker does not have; their pixels are `blobs`.
        dropped: keys that the worker forgets.
    """

    keys: list[list[str]] = field(default_factory=list)
    sent: list[tuple[str, int, int]] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


@dataclass
class HeldImages:
    """The images that one worker has, as the pool knows them. `most`: their bytes beyond those of a request."""

    most: int
    _sizes: dict[str, int] = field(default_factory=dict)

    def parcel(self, inputs: Sequence[RewardInput], keys: ImageKeys) -> Parcel:
        """Return what the worker needs for a request of these inputs, and what it forgets before."""
        parcel = Parcel([keys.of(x) for x in inputs])
        images: dict[str, Any] = {}
        for x, of_x in zip(inputs, parcel.keys, strict=True):
            images |= dict(zip(of_x, x.images, strict=True))
        for key in [key for key in self._sizes if key not in images]:
            # The oldest go first, down to the limit; those that nobody needs go in any case.
            if sum(self._sizes.values()) > self.most or not keys.is_needed(key):
                parcel.dropped.append(key)
                del self._sizes[key]
        for key, image in images.items():
            if key not in self._sizes:
                parcel.sent.append((key, *image.size))
                parcel.blobs.append(pixels_of(image))
                self._sizes[key] = len(parcel.blobs[-1])
        return parcel


class ReceivedImages:
    """The images that a worker has, in the worker."""

    def __init__(self) -> None:
        self._pixels: dict[str, tuple[tuple[int, int], bytes]] = {}

    def take(self, body: Mapping[str, Any], blobs: Sequence[bytes]) -> None:
        """Take the images of a request, after those that it drops."""
        for key in body["dropped"]:
            del self._pixels[key]
        for (key, width, height), pixels in zip(body["sent"], blobs, strict=True):
            self._pixels[key] = (width, height), pixels

    def images(self, keys: Sequence[str]) -> list[Any]:
        """Return new PIL images. What a reward does to them does not reach the other responses to the prompt."""
        if not keys:
            return []
        from PIL import Image

        return [Image.frombytes("RGB", *self._pixels[key]) for key in keys]


def pixels_of(image: Any) -> bytes:
    """Return the pixels of a PIL image as RGB bytes."""
    return (image if image.mode == "RGB" else image.convert("RGB")).tobytes()
