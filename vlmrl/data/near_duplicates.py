"""Search for images that look alike, with a perceptual hash and without a comparison of all pairs.

The hash is a difference hash: each bit states whether a cell is brighter than its right neighbour. It is computed at
two sizes: 64 bits to find candidates, 256 bits to confirm them. It is robust to a change of file format, size and
quality, but not to crops and mirroring.

Source: the dHash of Neal Krawetz ("Kind of Like That", 2013); the search is multi-index hashing (Norouzi et al.,
arXiv:1307.2982): hashes within 3 bits agree in at least one of 4 parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

COARSE_BITS, FINE_BITS = 3, 20
"""Maximum number of bits in which two near duplicates differ: of the 64 coarse bits, and of the 256 fine bits."""
PARTS = 4
HASH_BYTES = 40
MAX_NEIGHBOURS = 4096
"""Maximum number of hashes with which a hash is compared, of all hashes that agree with it in one part."""
CONTRAST = 24
"""Minimum difference between the lightest and the darkest cell, of 255. The hash of a flatter image is useless."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """Result of a search for near duplicates.

    Args:
        near: for each image, the groups of the other images that look like it, as a bit mask; 0 = no image does.
        examples: positions (i, j) of images that look alike and are in different groups.
        skipped: number of images that were not searched, as they are too flat to distinguish.
    """

    near: list[int]
    examples: list[tuple[int, int]]
    skipped: int


def look_hash(image: PILImage) -> str:
    """Return the hash of an RGB image, 80 hex digits: 8 bytes coarse, 32 bytes fine; all zeros for a flat image."""
    import numpy as np
    from PIL import Image

    grey = image.convert("L")
    bits = []
    for size in (8, 16):
        # [size, size + 1]: one column more than bits, as each cell is compared with its right neighbour
        cells = np.asarray(grey.resize((size + 1, size), Image.Resampling.BOX)).astype(np.int16)
        if size == 16 and int(cells.max()) - int(cells.min()) < CONTRAST:
            return "0" * (2 * HASH_BYTES)
        bits.append((cells[:, :-1] > cells[:, 1:]).ravel())
    return np.packbits(np.concatenate(bits)).tobytes().hex()  # [64 + 256] bits -> 40 bytes


def find_near_copies(hashes: Sequence[str], groups: Sequence[int], shown: int = 20) -> Likeness:
    """Find images whose hashes differ in at most `COARSE_BITS` coarse and `FINE_BITS` fine bits.

    Memory does not grow with the number of pairs that look alike: among the frames of a film, nearly all pairs do.

    Args:
        hashes: results of `look_hash`.
        groups: for each image, the groups that it is in, as a bit mask, 0 to 2^62. A group is a split, for example.
        shown: maximum number of examples.
    """
    import numpy as np

    if not hashes:
        return Likeness([], [], 0)
    table = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8).reshape(len(hashes), HASH_BYTES)
    rows = np.flatnonzero(table.any(axis=1))
    unique, first, inverse = np.unique(table[rows], axis=0, return_index=True, return_inverse=True)
    # Below: N images, R that are not flat, U distinct hashes. inverse: [R], positions in `unique`. first: [U], image
    # number of the first image with the hash. masks: [N].
    inverse, first, masks = inverse.reshape(-1), rows[first], np.asarray(groups, dtype=np.int64)
    equal = ((i, j) for i, j in zip(first[inverse].tolist(), rows.tolist(), strict=True) if groups[i] != groups[j])
    examples = set(islice(equal, shown))
    own = np.zeros(len(unique), dtype=np.int64)  # groups of the images that have the hash
    np.bitwise_or.at(own, inverse, masks[rows])  # [R] -> [U]
    near = np.zeros(len(unique), dtype=np.int64)  # groups of the images whose hash is close, but not equal
    for a, b in _close_rows(unique, lambda a, b: (own[b] & ~near[a]) | (own[a] & ~near[b])):
        np.bitwise_or.at(near, a, own[b])
        np.bitwise_or.at(near, b, own[a])
        if len(examples) < shown:
            apart = np.flatnonzero(masks[first[a]] != masks[first[b]])[:shown]
            pairs = zip(first[a[apart]].tolist(), first[b[apart]].tolist(), strict=True)
            examples |= {(min(pair), max(pair)) for pair in pairs}
    near_images = np.zeros(len(hashes), dtype=np.int64)
    near_images[rows] = near[inverse]  # [U] -> [R], written into [N]
    # Images with an equal hash look alike, too: add each group that has another image with the same hash.
    for bit in range(int(own.max(initial=0)).bit_length()):
        member = masks[rows] >> bit & 1
        equals = np.bincount(inverse, weights=member, minlength=len(unique))[inverse] - member
        near_images[rows] |= (equals > 0).astype(np.int64) << bit
    return Likeness(near_images.tolist(), sorted(examples)[:shown], len(hashes) - len(rows))


def _close_rows(table: Any, gain: Callable[[Any, Any], Any]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of distinct hashes within both limits, as two arrays of row numbers. A pair may be repeated.

    Rows that agree in a part are neighbours when they are sorted by it. All rows are compared with their next
    neighbour at once, then with the neighbour after that, until no two rows that agree are that far apart.

    Args:
        table: [U, 40] bytes, one distinct hash per row.
        gain: (row numbers, row numbers) -> for each pair, a number that is not 0 if the pair adds a group to a result;
            other pairs are not yielded.
    """
    import numpy as np

    words = np.ascontiguousarray(table).view(np.uint64)  # [U, 40] bytes -> [U, 5]: one coarse word, four fine ones
    parts = np.ascontiguousarray(table[:, :8]).view(f"u{8 // PARTS}")  # [U, 8] bytes -> [U, PARTS]
    for part in range(PARTS):
        order = np.argsort(parts[:, part], kind="stable")
        keys = parts[order, part]
        starts = np.arange(len(keys))
        for distance in range(1, MAX_NEIGHBOURS + 1):
            starts = starts[: np.searchsorted(starts, len(keys) - distance)]
            # The keys are sorted: a row that differs from this neighbour differs from all later ones.
            starts = starts[keys[starts] == keys[starts + distance]]
            if not len(starts):
                break
            a, b = order[starts], order[starts + distance]
            useful = np.flatnonzero(gain(a, b))
            a, b = a[useful], b[useful]
            close = np.bitwise_count(words[a, 0] ^ words[b, 0]) <= COARSE_BITS
            a, b = a[close], b[close]
            fine = np.bitwise_count(words[a, 1:] ^ words[b, 1:]).sum(axis=1, dtype=np.uint16)
            yield a[fine <= FINE_BITS], b[fine <= FINE_BITS]
