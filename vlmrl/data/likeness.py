"""Images that look alike: a perceptual hash, and a search for near duplicates that never compares all pairs.

The hash is a difference hash (is a cell brighter than its right neighbour?) at two sizes: 64 bits to find candidates,
256 bits to confirm them. It survives another file format, size and quality; it does not see crops and mirrored copies.
Source: the dHash of Neal Krawetz ("Kind of Like That", 2013); the search is multi-index hashing (Norouzi et al.,
arXiv:1307.2982): hashes within 3 bits agree in at least one of 4 parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

COARSE_BITS, FINE_BITS = 3, 20
"""Largest number of bits in which near duplicates differ: of 64, and of 256."""
PARTS = 4
HASH_BYTES = 40
MAX_BUCKET = 4096
"""Hashes that agree in one part and are compared with each other; of larger crowds only neighbours in order are."""
CONTRAST = 24
"""Lightest minus darkest cell, of 255, below which an image is too flat to be told from others by its hash."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """Near duplicates: pairs (i, j) of positions, i < j, sorted; `skipped` = how many images could not be told apart
    (flat ones) and were not searched.
    """

    pairs: list[tuple[int, int]]
    skipped: int


def look_hash(image: PILImage) -> str:
    """The hash of an RGB image, 80 hex digits: 8 bytes coarse, 32 bytes fine; all zeros for a flat image."""
    import numpy as np
    from PIL import Image

    grey = image.convert("L")
    bits = []
    for size in (8, 16):
        cells = np.asarray(grey.resize((size + 1, size), Image.Resampling.BOX)).astype(np.int16)
        if size == 16 and int(cells.max()) - int(cells.min()) < CONTRAST:
            return "0" * (2 * HASH_BYTES)
        bits.append((cells[:, :-1] > cells[:, 1:]).ravel())
    return np.packbits(np.concatenate(bits)).tobytes().hex()


def near_duplicates(hashes: Sequence[str]) -> Likeness:
    """All pairs of images whose hashes differ in at most `COARSE_BITS` of the coarse and `FINE_BITS` of the fine bits.

    Args: hashes: as `look_hash` makes them.
    Work: images with equal hashes are joined first; the others are compared within buckets of equal parts.
    """
    import numpy as np

    if not hashes:
        return Likeness([], 0)
    table = np.frombuffer(bytes.fromhex("".join(hashes)), np.uint8).reshape(len(hashes), HASH_BYTES)
    flat = ~table.any(axis=1)
    rows = np.flatnonzero(~flat)
    unique, first, inverse = np.unique(table[rows], axis=0, return_index=True, return_inverse=True)
    inverse = inverse.reshape(-1)
    found: set[tuple[int, int]] = set()
    for i, j in zip(rows.tolist(), rows[first[inverse]].tolist(), strict=True):
        if i != j:
            found.add((min(i, j), max(i, j)))
    representative = rows[first]
    for a, b in _close_rows(unique):
        i, j = int(representative[a]), int(representative[b])
        found.add((min(i, j), max(i, j)))
    return Likeness(sorted(found), int(flat.sum()))


def _close_rows(table: Any) -> list[tuple[int, int]]:
    """Pairs of rows of distinct hashes within both limits."""
    import numpy as np

    width = 8 // PARTS
    bits_of_byte = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1, dtype=np.uint16)
    close: set[tuple[int, int]] = set()
    for part in range(PARTS):
        keys = table[:, part * width : (part + 1) * width].copy().view(f"u{width}").ravel()
        order = np.argsort(keys, kind="stable")
        edges = np.flatnonzero(np.diff(keys[order])) + 1
        for members in np.split(order, edges):
            if len(members) > 1:
                close |= _close_members(table, np.sort(members), bits_of_byte)
    return sorted(close)


def _close_members(table: Any, members: Any, bits_of_byte: Any) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    crowd = len(members) > MAX_BUCKET
    for position, row in enumerate(members[:-1]):
        others = members[position + 1 : position + 1 + MAX_BUCKET] if crowd else members[position + 1 :]
        differing = bits_of_byte[table[others] ^ table[row]]
        coarse, fine = differing[:, :8].sum(axis=1), differing[:, 8:].sum(axis=1)
        near = others[(coarse <= COARSE_BITS) & (fine <= FINE_BITS)]
        found.update((int(row), int(other)) for other in near)
    return found
