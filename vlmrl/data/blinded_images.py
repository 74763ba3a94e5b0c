"""Pictures in the place of a row's images, to measure how much of an accuracy needs the images (`--images`).

They are drawn again from their description, the same on every machine, and never stored; or they are the images of
another row.
"""

from __future__ import annotations

import hashlib
import random
import re
import struct
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from vlmrl.data.dataset import Dataset, WrappedDataset
from vlmrl.data.images import BoundedCache, image_hash
from vlmrl.errors import DataError, RecipeError, listed
from vlmrl.key_facts import MOST_PATCH
from vlmrl.types import GREY, Media, Row, hash64

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


T = TypeVar("T")
ImagePlace = tuple[int, int]
"""(number of a row, position of an image in the row)."""
TRIES = 200
"""Maximum number of other rows that a row tries to exchange its new images with."""


def swap_images(media: Sequence[Sequence[Media]], seed: int) -> list[tuple[ImagePlace, ...]]:
    """Return for each row the places of the images that it shows in the place of its own.

    The images of a row go to another row as a whole, so that the images of one prompt still belong together. Each row
    gives them once, to a row with as many images, if possible of the same sizes in pixels. No row shows an image that
    has the content of one of its own. Only a row for which no such row is found shows single images of several rows;
    then some images are shown twice, or not at all.

    Args:
        media: images of each row; a row without images shows none.
    Returns: one tuple per row, with as many places as the row has images.
    Raises: DataError when the images of a row are the only ones.
    """
    swap = _Swap(media, random.Random(hash64("shuffled images", seed)))
    by_sizes: dict[Hashable, list[int]] = {}
    by_count: dict[int, list[int]] = {}
    for number, images in enumerate(media):
        if images:
            by_sizes.setdefault(tuple((m.width, m.height) for m in images), []).append(number)
            by_count.setdefault(len(images), []).append(number)
    for numbers in by_sizes.values():
        swap.rotate(numbers)
        swap.repair(swap.conflicts(numbers), numbers)
    for numbers in by_count.values():
        open_numbers = swap.conflicts(numbers)
        swap.repair(open_numbers, open_numbers)  # first among themselves: the others keep images of their sizes
        swap.repair(swap.conflicts(open_numbers), numbers)
    pieces = swap.compose(swap.conflicts(range(len(media))))
    return [
        pieces[number] if number in pieces else tuple((swap.giver[number], k) for k in range(len(images)))
        for number, images in enumerate(media)
    ]


class _Swap:
    """Permutation of rows in the making.

    Attributes:
        giver: row -> the row whose images it shows; at first each row shows its own.
    """

    def __init__(self, media: Sequence[Sequence[Media]], rng: random.Random) -> None:
        self.media, self.rng = media, rng
        self.own = [frozenset(m.sha256 for m in images) for images in media]
        self.giver = list(range(len(media)))

    def rotate(self, numbers: Sequence[int]) -> None:
        """Give each row the images of a row further on. Rows with the same images stand together in this order.

        If no content fills more than half of the rows, and rows share either all of their images or none, no row keeps
        an image of its own.
        """
        groups: dict[frozenset[str], list[int]] = {}
        for number in self._shuffled(numbers):
            groups.setdefault(self.own[number], []).append(number)
        order = [number for group in groups.values() for number in group]
        step = max(map(len, groups.values()))
        for place, number in enumerate(order):
            self.giver[number] = order[(place + step) % len(order)]

    def conflicts(self, numbers: Sequence[int]) -> list[int]:
        """Return the rows that show an image with the content of one of their own."""
        return [number for number in numbers if self._shares(number, self.giver[number])]

    def repair(self, numbers: Sequence[int], others: Sequence[int]) -> None:
        """Let rows exchange what they show with one of the others, if neither then shows an image of its own."""
        for number in numbers:
            if not self._shares(number, self.giver[number]):
                continue  # an exchange with an earlier row has settled it
            for other in self._shuffled(others) if len(others) <= TRIES else self.rng.sample(others, TRIES):
                mine, theirs = self.giver[number], self.giver[other]
                if not self._shares(number, theirs) and not self._shares(other, mine):
                    self.giver[number], self.giver[other] = theirs, mine
                    break

    def compose(self, numbers: Sequence[int]) -> dict[int, tuple[ImagePlace, ...]]:
        """Return rows -> images of several rows. Raises: DataError when a row shows all images that there are."""
        if not numbers:
            return {}
        places: dict[str, ImagePlace] = {}
        for number, images in enumerate(self.media):
            for position, one in enumerate(images):
                places.setdefault(one.sha256, (number, position))
        everything = self._shuffled(list(places))
        by_size: dict[tuple[int, int], list[str]] = {}
        for sha256 in everything:
            row, position = places[sha256]
            by_size.setdefault(_size(self.media[row][position]), []).append(sha256)
        return {
            number: tuple(places[self._another(number, by_size[_size(m)], everything)] for m in self.media[number])
            for number in numbers
        }

    def _another(self, number: int, *lists: Sequence[str]) -> str:
        """Return an image of the first of the lists that has one with other content than a row's own images."""
        for images in lists:
            start = self.rng.randrange(len(images))
            for step in range(len(images)):
                if (sha256 := images[(start + step) % len(images)]) not in self.own[number]:
                    return sha256
        raise DataError(
            "the images cannot be shuffled: one row has all of the images",
            hint="evaluate more rows, or use --images blank",
        )

    def _shares(self, number: int, other: int) -> bool:
        return bool(self.own[number] & self.own[other])

    def _shuffled(self, values: Sequence[T]) -> list[T]:
        values = list(values)
        self.rng.shuffle(values)
        return values


def _size(media: Media) -> tuple[int, int]:
    return media.width, media.height


ChangeKind = Literal["blank", "shuffled", "noise", "low", "masked"]
KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)
LOW_SIDE = 32
"""Longer side in pixels that `low` scales an image down to, if no other is given."""
MASK_PATCH, MASK_SHARE = 14, 0.6
"""Side in pixels of the patches that `masked` blackens, and their share, if no others are given."""
DESCRIPTIONS: Mapping[ChangeKind, str] = {
    "blank": "grey images of the same size",
    "shuffled": "the images of another row",
    "noise": "random pixels of the same size",
    "low": "images scaled down to {side} pixels on the longer side, and up again to their size",
    "masked": "images with a share of {share:g} of their patches of {side} pixels blackened",
}
SHOWN_BYTES = 2**28
"""Maximum size in bytes of the cache of drawn pictures."""


@dataclass(frozen=True)
class ImageChange:
    """Change of the images that a model sees.

    Args:
        side: for `low`: longer side of the small image, for `masked`: side of a patch, in pixels; else 0.
        share: for `masked`: probability of each patch to be black; for `low` without a side: scale; else 0.
    """

    kind: ChangeKind
    side: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> ImageChange:
        """Return the change for `blank`, `shuffled`, `noise`, `low`, `low:64`, `masked` or `masked:14:0.6`.

        `str` of a change gives a text that is parsed to the same change.

        Raises: RecipeError for other texts.
        """
        name, colon, number = text.strip().partition(":")
        if name not in KINDS:
            hint = listed(name, list(KINDS), "choices")
            raise RecipeError(f"--images cannot be `{text}`", hint=hint)
        kind = KINDS[KINDS.index(name)]
        if kind == "masked":
            return cls._masked(text, number) if colon else cls(kind, MASK_PATCH, MASK_SHARE)
        if not colon:
            return cls(kind, LOW_SIDE if kind == "low" else 0)
        if kind != "low" or not number.isascii() or not number.isdigit() or not 1 <= int(number) <= 4096:
            raise RecipeError(
                f"--images cannot be `{text}`", hint="low:N has the longer side in pixels, from 1 to 4096: low:64"
            )
        return cls(kind, int(number))

    @classmethod
    def _masked(cls, text: str, numbers: str) -> ImageChange:
        patch, colon, share = numbers.partition(":")
        share = share if colon else str(MASK_SHARE)
        shares = r"1(\.0{1,4})?|0?\.[0-9]{1,4}"
        if numbers.isascii() and re.fullmatch(r"[0-9]{1,4}", patch) and re.fullmatch(shares, share):
            change = cls("masked", int(patch), float(share))
            if 1 <= change.side <= MOST_PATCH and change.share:
                return change
        hint = (
            f"masked:N:S has the side of a patch, from 1 to {MOST_PATCH} pixels, and the share of black patches, above "
            "0 and at most 1, with at most four decimals: masked:14:0.6"
        )
        raise RecipeError(f"--images cannot be `{text}`", hint=hint)

    def __str__(self) -> str:
        share = f":{self.share:g}" if self.kind == "masked" else ""
        return f"{self.kind}:{self.side}{share}" if self.side else self.kind

    @property
    def described(self) -> str:
        """The change in words."""
        return DESCRIPTIONS[self.kind].format(side=self.side, share=self.share)


def parse_changes(text: str | None) -> tuple[ImageChange, ...]:
    """Return the changes of a list such as `blank,low:64`; () for None. Raises: RecipeError for other texts."""
    if text is None:
        return ()
    return tuple(dict.fromkeys(ImageChange.parse(one) for one in text.split(",")))


@dataclass(frozen=True, slots=True)
class ShownMedia(Media):
    """Reference to a drawn picture. `sha256` is the hash of its file (`picture_file`).

    Args:
        key: text that random pixels come from.
    """

    change: ImageChange = field(kw_only=True, compare=False)
    original: Media = field(kw_only=True, compare=False)
    key: str = field(kw_only=True, compare=False)


def noise_key(seed: int, prompt_id: str, position: int) -> str:
    """Return the text that the random pixels of an image come from. `position`: of the image in its row."""
    return f"{seed}\x1f{prompt_id}\x1f{position}"


def leaves_as_it_is(change: ImageChange, media: Media) -> bool:
    """Return whether the model sees an image unchanged: it is not larger than `low` would make it, or has no mask."""
    if change.kind == "masked":
        return change.share == 0
    return change.kind == "low" and not change.share and max(media.width, media.height) <= change.side


def draw_picture(change: ImageChange, original: PILImage | None, size: tuple[int, int], key: str) -> PILImage:
    """Return the picture that is shown in the place of an image. RGB, of the same size.

    Args:
        original: the image, for `low` and `masked`; None is enough for the others.
        size: width and height of the image, in pixels.
        key: of `noise_key`.
    """
    from PIL import Image

    width, height = size
    if change.kind == "blank":
        return Image.new("RGB", size, GREY)
    if change.kind == "noise":
        pixels = hashlib.shake_128(key.encode("utf-8", "surrogatepass")).digest(3 * width * height)
        return Image.frombytes("RGB", size, pixels)
    assert original is not None
    if change.kind == "masked":
        return _masked(original, change, key)
    assert change.kind == "low"
    scale = change.side / max(size) if change.side else change.share
    small = (max(1, round(width * scale)), max(1, round(height * scale)))
    return original.resize(small, Image.Resampling.BOX).resize(size, Image.Resampling.BILINEAR)


def _masked(original: PILImage, change: ImageChange, key: str) -> PILImage:
    """Return an image with black patches. The patches begin at its upper left corner; each is drawn by itself."""
    from PIL import Image

    columns, rows = (-(-length // change.side) for length in original.size)
    digest = hashlib.shake_128(key.encode("utf-8", "surrogatepass")).digest(4 * columns * rows)
    numbers = struct.unpack(f"<{columns * rows}I", digest)
    is_black = bytes(255 * (n < change.share * 2**32) for n in numbers)
    mask = Image.frombytes("L", (columns, rows), is_black)
    mask = mask.resize((columns * change.side, rows * change.side), Image.Resampling.NEAREST)
    picture = original.copy()
    picture.paste((0, 0, 0), mask=mask.crop((0, 0, *original.size)))
    return picture


def picture_file(image: PILImage) -> bytes:
    """Return an RGB image as a PPM file: the same bytes for the same pixels, whichever libraries are installed."""
    return b"P6\n%d %d\n255\n" % image.size + image.tobytes()


class BlindedDataset(WrappedDataset):
    """Dataset whose images are changed: it returns a picture for each `ShownMedia`, else the image as it is."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._pictures: BoundedCache[PILImage] = BoundedCache(SHOWN_BYTES, lambda image: 3 * image.width * image.height)

    def image_bytes(self, media: Media) -> bytes:
        return picture_file(self.image(media)) if isinstance(media, ShownMedia) else self.dataset.image_bytes(media)

    def image(self, media: Media) -> PILImage:
        if not isinstance(media, ShownMedia):
            return self.dataset.image(media)
        return self._pictures.get((media.sha256, media.width, media.height), lambda: self._draw(media))

    def place_of(self, media: Media) -> str:
        return self.dataset.place_of(media.original if isinstance(media, ShownMedia) else media)

    def shown(self, change: ImageChange, original: Media, key: str) -> Media:
        """Return the reference to the picture in the place of an image. Raises: DataError when the image is broken."""
        if leaves_as_it_is(change, original):
            return original
        media = ShownMedia("", original.width, original.height, change=change, original=original, key=key)
        picture = self._draw(media)
        media = replace(media, sha256=image_hash(picture_file(picture)))
        self._pictures.get((media.sha256, media.width, media.height), lambda: picture)
        return media

    def _draw(self, media: ShownMedia) -> PILImage:
        needed = media.change.kind in ("low", "masked")
        original = self.dataset.image(media.original) if needed else None
        return draw_picture(media.change, original, (media.width, media.height), media.key)


class Blinding:
    """Rows of a source as the model sees them.

    Args:
        swaps: for `shuffled`: number of a row -> the images that it shows (`swap_images`).
    """

    def __init__(
        self,
        dataset: Dataset,
        rows: Sequence[Row],
        change: ImageChange,
        seed: int,
        swaps: Sequence[Sequence[ImagePlace]] = (),
    ) -> None:
        self.dataset, self.change = BlindedDataset(dataset), change
        self._rows, self._seed, self._swaps = rows, seed, swaps

    def row(self, number: int, row: Row) -> Row:
        """Return a row with the images that the model sees. `number`: of the row in `rows`.

        The same change, seed and rows give the same images.
        """
        if self.change.kind == "shuffled":
            return replace(row, media=tuple(self._rows[n].media[position] for n, position in self._swaps[number]))
        return changed_row(self.dataset, self.change, row, self._seed)


def changed_row(dataset: BlindedDataset, change: ImageChange, row: Row, seed: int) -> Row:
    """Return a row whose images are changed, for any change but `shuffled`. `seed`: of random pixels and patches."""
    media = (
        dataset.shown(change, one, noise_key(seed, row.prompt_id, position)) for position, one in enumerate(row.media)
    )
    return replace(row, media=tuple(media))
