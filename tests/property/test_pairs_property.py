"""Pairs and splits over random hierarchies."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.data.splits import LabelledImage, drop_repeats, split_classes, split_images
from vlmrl.errors import DataError
from vlmrl.tasks.pairs.draw import _unrank_two, build_pairs, fill, pair_distance
from vlmrl.types import Media


def image(name: str, labels: tuple[str, ...]) -> LabelledImage:
    return LabelledImage(Media(name, 8, 8), labels, name)


@st.composite
def collections(draw: st.DrawFn) -> list[LabelledImage]:
    """Up to 3 x 3 x 3 classes of 0 to 5 images, one to three levels."""
    depth = draw(st.integers(1, 3))
    classes = draw(st.lists(st.tuples(*[st.sampled_from("abc")] * depth), min_size=1, max_size=12, unique=True))
    sizes = draw(st.lists(st.integers(0, 5), min_size=len(classes), max_size=len(classes)))
    return [
        image(f"{'-'.join(labels)}.{i}", labels)
        for labels, size in zip(classes, sizes, strict=True)
        for i in range(size)
    ]


def possible(images: list[LabelledImage]) -> Counter[int]:
    """How many pairs of each distance exist among classes with two images or more, by looking at all of them."""
    sizes = Counter(one.labels for one in images)
    usable = [one for one in images if sizes[one.labels] > 1]
    return Counter(pair_distance(a.labels, b.labels) for a, b in combinations(usable, 2))


@pytest.mark.slow
@given(collections(), st.integers(1, 80), st.integers(0, 5))
@settings(max_examples=300, deadline=None)
def test_half_the_pairs_are_the_same_none_repeats_and_none_is_missing(
    images: list[LabelledImage], wanted: int, seed: int
) -> None:
    room = possible(images)
    half = min((wanted + 1) // 2, room[0], sum(room.values()) - room[0])
    try:
        made = build_pairs(images, wanted, seed=seed)
    except DataError:
        assert half == 0
        return
    distances = Counter(pair.distance for pair in made.pairs)
    assert distances[0] == half and len(made.pairs) == 2 * half
    assert len({pair.key for pair in made.pairs}) == 2 * half
    for pair in made.pairs:
        assert pair.distance == pair_distance(pair.first.labels, pair.second.labels)
        assert pair.first.media != pair.second.media


@given(collections(), st.integers(2, 60), st.integers(0, 5), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_pairs_depend_on_the_seed_and_not_on_the_order_of_the_images(images, wanted, seed, rng) -> None:
    shuffled = list(images)
    rng.shuffle(shuffled)
    try:
        first = build_pairs(images, wanted, seed=seed)
    except DataError:
        return
    assert build_pairs(shuffled, wanted, seed=seed).pairs == first.pairs


@pytest.mark.slow
@given(collections(), st.integers(2, 60))
@settings(max_examples=200, deadline=None)
def test_distances_are_balanced_as_far_as_the_hierarchy_allows(images: list[LabelledImage], wanted: int) -> None:
    room = possible(images)
    try:
        made = Counter(pair.distance for pair in build_pairs(images, wanted, seed=0).pairs)
    except DataError:
        return
    half = made[0]
    short = [d for d in room if d > 0 and made[d] < room[d]]  # those that could have given more
    for distance in short:  # ... gave as much as any other, up to rounding
        assert all(made[distance] >= made[other] - 1 for other in made if other > 0), (half, made, room)


@pytest.mark.slow
@given(collections(), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_splits_share_no_image_and_lose_none(images: list[LabelledImage], seed: int) -> None:
    shares = {"train": 0.6, "validation": 0.15, "test": 0.25}
    splits = split_images(images, shares, seed=seed).images
    seen = [one.media.sha256 for members in splits.values() for one in members]
    assert sorted(seen) == sorted(one.media.sha256 for one in images)
    again = split_images(images[::-1], shares, seed=seed).images
    assert {k: {i.origin for i in v} for k, v in again.items()} == {k: {i.origin for i in v} for k, v in splits.items()}


@pytest.mark.parametrize(("count", "numbers"), [(12, [8, 2, 2]), (7, [3, 2, 2]), (5, [3, 0, 2]), (3, [3, 0, 0])])
def test_no_split_has_a_single_image_of_a_class(count, numbers):
    images = [image(f"{i}", ("a",)) for i in range(count)]
    splits = split_images(images, {"train": 0.65, "validation": 0.15, "test": 0.2}, seed=0).images
    assert [len(splits.get(split, ())) for split in ("train", "validation", "test")] == numbers


@pytest.mark.slow
@given(collections(), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_whole_classes_are_in_one_split_each_and_no_image_is_lost(images: list[LabelledImage], seed: int) -> None:
    shares = {"train": 0.6, "validation": 0.15, "test": 0.25}
    splits = split_classes(images, shares, seed=seed).images
    classes = {split: {one.labels for one in members} for split, members in splits.items()}
    assert sum(map(len, classes.values())) == len({one.labels for one in images})
    assert sorted(one.origin for members in splits.values() for one in members) == sorted(one.origin for one in images)
    sizes = Counter(one.labels for one in images)
    usable = [sum(sizes[labels] > 1 for labels in found) for found in classes.values()]  # one image makes no pair
    if sum(usable) >= 6:
        assert min(usable) >= 2
    assert split_classes(images[::-1], shares, seed=seed).images.keys() == splits.keys()


@pytest.mark.slow
@given(collections(), st.integers(2, 6), st.integers(0, 3))
@settings(max_examples=200, deadline=None)
def test_unseen_classes_are_in_the_test_split_alone(images: list[LabelledImage], unseen: int, seed: int) -> None:
    shares = {"train": 0.6, "validation": 0.15, "test": 0.25}
    num_classes = len({one.labels for one in images})
    try:
        made = split_images(images, shares, seed=seed, unseen_classes=unseen)
    except DataError:
        assert num_classes < unseen + 2
        return
    assert len(made.unseen) == unseen
    for split in ("train", "validation"):
        assert not {one.labels for one in made.images[split]} & set(made.unseen)
    assert set(made.unseen) <= {one.labels for one in made.images["test"]}


@given(
    st.integers(0, 200),
    st.lists(st.tuples(st.floats(0.01, 10), st.integers(0, 60)), min_size=1, max_size=6),
)
def test_fill_gives_what_there_is_and_never_more_than_the_room(total: int, cells: list[tuple[float, int]]) -> None:
    weights = {i: weight for i, (weight, _) in enumerate(cells)}
    room = {i: size for i, (_, size) in enumerate(cells)}
    given_out = fill(total, weights, room)
    assert sum(given_out.values()) == min(total, sum(room.values()))
    assert all(0 <= given_out[i] <= room[i] for i in room)


def test_unranking_counts_every_pair_once() -> None:
    assert [_unrank_two(rank) for rank in range(15)] == [(i, j) for j in range(1, 6) for i in range(j)]


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from("ab")), max_size=20))
def test_a_content_is_kept_once_or_not_at_all_when_its_label_is_in_doubt(rows: list[tuple[str, str]]) -> None:
    images = [LabelledImage(Media(content, 8, 8), (label,), f"{i}") for i, (content, label) in enumerate(rows)]
    kept, dropped = drop_repeats(images)
    labels: dict[str, set[str]] = {}
    for content, label in rows:
        labels.setdefault(content, set()).add(label)
    assert sorted(one.media.sha256 for one in kept) == sorted(c for c, found in labels.items() if len(found) == 1)
    assert len(kept) + len(dropped) == len(images)
