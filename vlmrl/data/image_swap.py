"""Choice of the images of another row for each row, for evaluations with shuffled images."""

from __future__ import annotations

import random
from collections.abc import Hashable, Sequence
from typing import TypeVar

from vlmrl.errors import DataError
from vlmrl.types import Media, hash64

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
        seed: seed of the choice.
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
            for other in self._some(others):
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
            "the images cannot be shuffled: a row shows all images that there are",
            hint="evaluate more rows, or use --images blank",
        )

    def _shares(self, number: int, other: int) -> bool:
        return bool(self.own[number] & self.own[other])

    def _some(self, numbers: Sequence[int]) -> Sequence[int]:
        return self._shuffled(numbers) if len(numbers) <= TRIES else self.rng.sample(numbers, TRIES)

    def _shuffled(self, values: Sequence[T]) -> list[T]:
        values = list(values)
        self.rng.shuffle(values)
        return values


def _size(media: Media) -> tuple[int, int]:
    return media.width, media.height
