"""Splits of a labelled image collection: no image is in two splits, and, on request, no class is in two splits."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vlmrl.errors import DataError
from vlmrl.types import LeftOut, Media, hash64

if TYPE_CHECKING:
    from vlmrl.data.image_scan import Examined


@dataclass(frozen=True, slots=True)
class LabelledImage:
    """Image of a collection with a hierarchy of names.

    Args:
        labels: one name per level, coarse to fine. The whole tuple is the class: two groups may use the same leaf
            name.
        origin: place of the image, for messages (`Balinese/character01/0108_01.png`, `scan 17`).
        seen: result of examining the image file; None = it was not examined.
        facts: further facts about the image: name -> value (such as the age of the chimpanzee in this picture).
        path: path of the file if it differs from `origin`, in which names that are not UTF-8 are escaped.
    """

    media: Media
    labels: tuple[str, ...]
    origin: str
    seen: Examined | None = None
    facts: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    path: str | None = None

    @property
    def place(self) -> str:
        """Path from which the image's file is read."""
        return self.origin if self.path is None else self.path


@dataclass
class Splits:
    """Images of each split, and classes that are kept out of training."""

    images: dict[str, list[LabelledImage]]
    unseen: list[tuple[str, ...]] = field(default_factory=list)


def drop_repeats(images: Sequence[LabelledImage]) -> tuple[list[LabelledImage], list[LeftOut]]:
    """Drop repeated images, so that each content occurs once.

    Of copies within a class, the first is kept. Copies in several classes are all dropped: their class is not certain.

    Returns: (images in order, dropped ones).
    """
    by_content: dict[str, list[LabelledImage]] = defaultdict(list)
    for image in images:
        by_content[image.media.sha256].append(image)
    unique, dropped = [], []
    for copies in by_content.values():
        classes = sorted({copy.labels for copy in copies})
        if len(classes) > 1:
            names = " and ".join("/".join(labels) for labels in classes)
            dropped += [LeftOut(copy.origin, f"same image under several classes: {names}") for copy in copies]
            continue
        unique.append(copies[0])
        dropped += [LeftOut(copy.origin, f"same image as {copies[0].origin}") for copy in copies[1:]]
    return unique, dropped


def split_classes(images: Sequence[LabelledImage], shares: Mapping[str, float], *, seed: int) -> Splits:
    """Distribute whole classes over the splits: no individual of the test split is in training.

    Each class goes to the split that is furthest below its share of the images. Every split gets at least two classes
    of two or more images, if there are enough of them.

    Args:
        shares: split -> share of the images.
    """
    by_class = _by_class(images)
    order = sorted(by_class, key=lambda labels: hash64(seed, "class", *labels))
    by_split: dict[str, list[LabelledImage]] = {name: [] for name in shares}
    num_classes = dict.fromkeys(shares, 0)
    classes_left = sum(len(members) > 1 for members in by_class.values())
    for labels in order:
        usable = len(by_class[labels]) > 1
        needy = [name for name in shares if num_classes[name] < 2] if usable else []
        pool = needy if needy and classes_left <= sum(2 - num_classes[name] for name in needy) else list(shares)
        total = sum(len(members) for members in by_split.values()) + len(by_class[labels])
        chosen = max(pool, key=lambda name: shares[name] * total - len(by_split[name]))
        by_split[chosen] += by_class[labels]
        num_classes[chosen] += usable
        classes_left -= usable
    return Splits(by_split)


def split_images(
    images: Sequence[LabelledImage], shares: Mapping[str, float], *, seed: int, unseen_classes: int = 0
) -> Splits:
    """Distribute the images of each class over the splits by share.

    The same images and seed give the same splits, whatever the order of the images.

    Args:
        images: each content once (see `drop_repeats`).
        shares: split -> share; the shares add up to 1. The first split (train) takes the remainder of rounding.
        seed: the split of an image depends only on the seed and on the image's content.
        unseen_classes: number of whole classes that go to the split `test` alone. They are drawn with a sibling where
            possible, so that hard pairs exist among them.
    Returns: Splits. A class that is too small to give every split two images gives them to the first splits;
        `build_pairs` reports it.
    Raises: DataError when `unseen_classes` is not 0 and leaves fewer than 2 classes unseen or seen.
    """
    by_class = _by_class(images)
    if unseen_classes and not 2 <= unseen_classes <= len(by_class) - 2:
        raise DataError(
            f"{unseen_classes} unseen classes of {len(by_class)}: at least 2 must be unseen and 2 seen",
            hint="change --unseen-classes",
        )
    unseen = _choose_unseen(sorted(by_class), unseen_classes, seed)
    by_split: dict[str, list[LabelledImage]] = {name: [] for name in shares}
    for labels in sorted(by_class):
        members = sorted(by_class[labels], key=lambda image: hash64(seed, "split", image.media.sha256))
        if labels in unseen:
            by_split["test"] += members
            continue
        start = 0
        for name, count in _allot(len(members), shares).items():
            by_split[name] += members[start : start + count]
            start += count
    return Splits(by_split, sorted(unseen))


def _by_class(images: Sequence[LabelledImage]) -> dict[tuple[str, ...], list[LabelledImage]]:
    by_class: dict[tuple[str, ...], list[LabelledImage]] = defaultdict(list)
    for image in images:
        by_class[image.labels].append(image)
    return by_class


def _allot(count: int, shares: Mapping[str, float]) -> dict[str, int]:
    """Return the number of images per split for a class of `count` images; the numbers add up to `count`.

    Every split except the first gets its share, rounded down; the first split gets the rest. A split with a single
    image of a class could make no pair of it. Therefore 1 is changed to 2 if more than 2 images then remain for the
    first split, else to 0.

    Example: 12 images, 0.65 + 0.15 + 0.2 -> 8, 2 (of 1.8), 2 (of 2.4).
    """
    first, *others = shares
    numbers = {name: int(count * shares[name] + 1e-9) for name in others}
    for name in others:
        if numbers[name] == 1:
            numbers[name] = 2 if count - sum(numbers.values()) > 2 else 0
    return {first: count - sum(numbers.values()), **numbers}


def _choose_unseen(classes: Sequence[tuple[str, ...]], count: int, seed: int) -> set[tuple[str, ...]]:
    """Draw `count` classes, two siblings at a time.

    At least two classes of each parent stay seen where possible.
    """
    rng = random.Random(hash64(seed, "unseen"))
    families: dict[tuple[str, ...], list[tuple[str, ...]]] = defaultdict(list)
    for labels in classes:
        families[labels[:-1]].append(labels)
    for family in families.values():
        rng.shuffle(family)
    order = list(families)
    rng.shuffle(order)
    chosen: list[tuple[str, ...]] = []
    for keep_seen in (2, 1, 0):
        progress = True
        while len(chosen) < count and progress:
            progress = False
            for parent in order:
                take = min(2, len(families[parent]) - keep_seen, count - len(chosen))
                if take > 0:
                    chosen += [families[parent].pop() for _ in range(take)]
                    progress = True
    return set(chosen[:count])
