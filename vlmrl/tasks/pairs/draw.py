"""Drawing of image pairs for the question "same class or not?".

Half of the pairs are of the same class; the others are balanced over the distance of their classes. The distance of a
pair is the number of levels, counted from the finest level up, at which its names differ: 0 = the same class, 1 = only
the finest level differs, ..., n = the coarsest of n levels differs, too. Pairs are drawn by their number (rank) from a
space of known size. So the drawing always ends, and a class that is too small or has no sibling is reported.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from vlmrl.data.splits import LabelledImage
from vlmrl.errors import DataError
from vlmrl.types import hash64

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two images. `distance` is defined at the top of this file."""

    first: LabelledImage
    second: LabelledImage
    distance: int

    @property
    def key(self) -> tuple[str, str]:
        a, b = self.first.media.sha256, self.second.media.sha256
        return (a, b) if a < b else (b, a)


@dataclass
class PairSet:
    """Pairs of one split. `reports`: entries for dataset.json about pairs that could not be drawn."""

    pairs: list[Pair]
    reports: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class _Node:
    """Images below one name of the hierarchy. Two images below different children of this name make a pair.

    The distance of such a pair is the number of levels below this name.
    """

    path: Labels
    classes: list[list[LabelledImage]]
    child_spans: list[tuple[int, int]]

    @property
    def capacity(self) -> int:
        sizes = [sum(len(c) for c in self.classes[start:end]) for start, end in self.child_spans]
        return (sum(sizes) ** 2 - sum(size * size for size in sizes)) // 2


def pair_distance(first: Labels, second: Labels) -> int:
    """Return 0 for the same class, else the number of levels from the coarsest different one down to the finest."""
    for level, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            return len(first) - level
    return 0


def build_pairs(
    images: Sequence[LabelledImage], num_pairs: int, *, seed: int, distance_shares: Mapping[int, float] | None = None
) -> PairSet:
    """Draw distinct pairs: half of the same class, half of different classes with the given share of each distance.

    Args:
        images: images of one split, each content once. Classes with one image are left out and reported: they have no
            pair of the same class, so their name would reveal the answer "different".
        num_pairs: number of pairs; an odd number is increased by 1. If there are not enough pairs, fewer are drawn, and
            this is reported.
        seed: the result depends on the seed and on the images' contents and labels, not on the order of the images.
        distance_shares: distance -> relative share of the different pairs; default: equal shares of all distances that
            exist.
    Returns: the pairs, in random order, and the reports.
    Raises: DataError when no same or no different pair can be drawn at all, or a share has an impossible distance.
    """
    depth = len(images[0].labels) if images else 0
    shares = _check_shares(distance_shares, depth)
    rng = random.Random(hash64(seed, "pairs"))
    classes, reports = _usable_classes(images)
    nodes = {distance: _nodes(classes, depth - distance) for distance in range(1, depth + 1)}
    reports += _report_lonely(classes, nodes, depth)
    room = {distance: sum(node.capacity for node in nodes[distance]) for distance in nodes}
    same_room = sum(len(c) * (len(c) - 1) // 2 for c in classes.values())
    distances = [distance for distance in shares if shares[distance] > 0]
    different_room = sum(room[distance] for distance in distances)
    half = min((num_pairs + 1) // 2, same_room, different_room)
    if half == 0:
        lacking = "same-class" if same_room == 0 else "different-class"
        raise DataError(
            f"no {lacking} pair can be made from {len(images)} images; classes with two or more: {len(classes)}",
            hint="check the levels, and that classes have several images in each split (7 images fill three splits)",
        )
    if half < (num_pairs + 1) // 2:
        reports.append({"reason": "fewer pairs than asked", "wanted": num_pairs, "made": 2 * half})
    quota = fill(half, {d: shares[d] for d in distances}, {d: room[d] for d in distances})
    reports += _report_shares(half, {d: shares[d] for d in distances}, room, quota)
    pairs = _same_pairs(classes, half, rng)
    for distance in sorted(quota):
        pairs += _different_pairs(nodes[distance], quota[distance], distance, rng)
    rng.shuffle(pairs)
    return PairSet([Pair(p.second, p.first, p.distance) if rng.random() < 0.5 else p for p in pairs], reports)


def fill(total: int, weights: Mapping[Any, float], room: Mapping[Any, int]) -> dict[Any, int]:
    """Divide `total` among the keys in proportion to their weights; no key gets more than its room.

    The rest of a key whose room is full is divided among the other keys. The results are whole numbers that add up to
    min(total, sum of room). Of keys with equal fractions, the earlier one is rounded up. There is at most one pass per
    key.
    """
    given = dict.fromkeys(weights, 0)
    open_keys = [key for key in weights if room[key] > 0 and weights[key] > 0]
    left = min(total, sum(room[key] for key in open_keys))
    while left > 0:
        weight = sum(weights[key] for key in open_keys)
        quotas = {key: left * weights[key] / weight for key in open_keys}
        full = [key for key in open_keys if given[key] + quotas[key] >= room[key]]
        if full:
            for key in full:
                left -= room[key] - given[key]
                given[key] = room[key]
            open_keys = [key for key in open_keys if key not in set(full)]
            continue
        whole = {key: int(quotas[key]) for key in open_keys}
        by_rest = sorted(open_keys, key=lambda key: whole[key] - quotas[key])
        for key in by_rest[: left - sum(whole.values())]:
            whole[key] += 1
        for key in open_keys:
            given[key] += whole[key]
        left = 0
    return given


def _check_shares(shares: Mapping[int, float] | None, depth: int) -> dict[int, float]:
    if shares is None:
        return dict.fromkeys(range(1, depth + 1), 1.0)
    for distance, share in shares.items():
        if not 1 <= distance <= depth or share < 0:
            raise DataError(
                f"distance share {distance}={share:g}: distances go from 1 to {depth}, shares are not negative",
                hint="for two levels: --distance-shares 1=0.5,2=0.5",
            )
    if not sum(shares.values()) > 0:
        raise DataError("the distance shares add up to 0", hint="for two levels: --distance-shares 1=0.5,2=0.5")
    return {distance: float(shares.get(distance, 0.0)) for distance in range(1, depth + 1)}


def _usable_classes(images: Sequence[LabelledImage]) -> tuple[dict[Labels, list[LabelledImage]], list[dict[str, Any]]]:
    by_class: dict[Labels, list[LabelledImage]] = defaultdict(list)
    for image in images:
        by_class[image.labels].append(image)
    usable = {
        labels: sorted(by_class[labels], key=lambda image: image.media.sha256)
        for labels in sorted(by_class)
        if len(by_class[labels]) > 1
    }
    lonely = [labels for labels in sorted(by_class) if labels not in usable]
    return usable, [{"reason": "class with one image left out", "class": "/".join(labels)} for labels in lonely]


def _nodes(classes: Mapping[Labels, list[LabelledImage]], prefix: int) -> list[_Node]:
    """Return a node for every path of `prefix` names, coarse to fine, that has two children or more."""
    grouped: dict[Labels, list[Labels]] = defaultdict(list)
    for labels in classes:
        grouped[labels[:prefix]].append(labels)
    nodes = []
    for path, members in grouped.items():
        spans, start = [], 0
        for index in range(1, len(members) + 1):
            if index == len(members) or members[index][: prefix + 1] != members[start][: prefix + 1]:
                spans.append((start, index))
                start = index
        if len(spans) > 1:
            nodes.append(_Node(path, [classes[labels] for labels in members], spans))
    return nodes


def _report_lonely(classes: Mapping[Labels, Any], nodes: Mapping[int, list[_Node]], depth: int) -> list[dict[str, Any]]:
    """Return a report for each name without a sibling at a distance: its images are in no pair of that distance."""
    reports = []
    for distance in sorted(nodes):
        paired = {node.path for node in nodes[distance]}
        for path in sorted({labels[: depth - distance] for labels in classes} - paired):
            only = sorted({labels[: depth - distance + 1] for labels in classes if labels[: depth - distance] == path})
            reports.append({"reason": "no sibling", "class": "/".join(only[0]), "distance": distance})
    return reports


def _report_shares(
    half: int, shares: Mapping[int, float], room: Mapping[int, int], quota: Mapping[int, int]
) -> list[dict[str, Any]]:
    unlimited, reason = fill(half, shares, dict.fromkeys(shares, half)), "not enough pairs at this distance"
    return [
        {"reason": reason, "distance": d, "wanted": unlimited[d], "made": quota[d], "possible": room[d]}
        for d in sorted(shares)
        if quota[d] < unlimited[d]
    ]


def _same_pairs(classes: Mapping[Labels, list[LabelledImage]], total: int, rng: random.Random) -> list[Pair]:
    """Draw the same number of pairs from each class; a class with fewer pairs gives all of them."""
    room = {labels: len(members) * (len(members) - 1) // 2 for labels, members in classes.items()}
    order = list(classes)
    rng.shuffle(order)  # `fill` gives earlier classes one pair more: this must not depend on the alphabet
    quota = fill(total, dict.fromkeys(order, 1.0), room)
    pairs = []
    for labels, members in classes.items():
        for rank in rng.sample(range(room[labels]), quota[labels]):
            i, j = _unrank_two(rank)
            pairs.append(Pair(members[i], members[j], 0))
    return pairs


def _unrank_two(rank: int) -> tuple[int, int]:
    """Return the rank-th pair (i, j) with i < j in the order (0,1), (0,2), (1,2), (0,3), ..."""
    from math import isqrt

    j = (1 + isqrt(1 + 8 * rank)) // 2
    return rank - j * (j - 1) // 2, j


def _different_pairs(nodes: Sequence[_Node], total: int, distance: int, rng: random.Random) -> list[Pair]:
    """Draw different pairs; each node gets a number of pairs in proportion to its number of classes.

    A name then reveals as little as possible about whether a pair is of the same class.
    """
    keys = list(range(len(nodes)))
    rng.shuffle(keys)
    weights = {key: float(len(nodes[key].classes)) for key in keys}
    quota = fill(total, weights, {key: nodes[key].capacity for key in keys})
    pairs: list[Pair] = []
    for key, node in enumerate(nodes):
        pairs += _cross_pairs(node, quota[key], distance, rng)
    return pairs


def _cross_pairs(node: _Node, quota: int, distance: int, rng: random.Random) -> list[Pair]:
    """Draw `quota` different pairs across the node's children: first with equally likely classes, the rest by rank."""
    child_of = [span for span in node.child_spans for _ in range(*span)]
    num_classes = len(node.classes)
    pairs: dict[tuple[str, str], Pair] = {}
    for _ in range(4 * quota):
        if len(pairs) == quota:
            break
        a = rng.randrange(num_classes)
        start, end = child_of[a]
        b = rng.randrange(num_classes - (end - start))
        b = b if b < start else b + end - start
        pair = Pair(rng.choice(node.classes[a]), rng.choice(node.classes[b]), distance)
        pairs.setdefault(pair.key, pair)
    if len(pairs) < quota:
        for pair in _ranked_cross_pairs(node, quota, distance, rng):
            if len(pairs) == quota:
                break
            pairs.setdefault(pair.key, pair)
    return list(pairs.values())


def _ranked_cross_pairs(node: _Node, count: int, distance: int, rng: random.Random) -> list[Pair]:
    """Draw `count` distinct pairs, all equally likely. They suffice to fill up any smaller set of distinct pairs."""
    items = [image for members in node.classes for image in members]
    child_end, position = [], 0
    for start, end in node.child_spans:
        size = sum(len(members) for members in node.classes[start:end])
        position += size
        child_end += [position] * size
    partners = [len(items) - end for end in child_end]
    ends = list(accumulate(partners))
    pairs = []
    for rank in rng.sample(range(ends[-1]), count):
        i = bisect_right(ends, rank)
        offset = rank - (ends[i] - partners[i])
        pairs.append(Pair(items[i], items[child_end[i] + offset], distance))
    return pairs
