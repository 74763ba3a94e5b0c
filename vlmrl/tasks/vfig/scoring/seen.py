"""Visibility of the elements of a drawing: what each one changes in the picture, and what still shows at the end.

An element that is transparent, has the colour of what is below it, lies outside of the picture or behind another one
changes or shows nothing. Rewards count what can be seen, so that hidden content earns nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.ndimage import find_objects

from vlmrl.svg.draw import Painter
from vlmrl.svg.geometry import Box, bounds, fitted, moved
from vlmrl.svg.scene import Bitmap, Group, Scene, Shape
from vlmrl.svg.values import Matrix

LEAST_CHANGE = 12
"""Smallest change of a channel, of 255, that counts as a change of a pixel."""
FULL_CHANGE = 64
"""Change of a channel, of 255, from which a pixel counts whole. Pale fills of diagrams change a page by 30 or more."""
MOST_LEAVES = 2_000
"""Largest number of elements that are looked at one by one. Those above them are drawn, and counted, together."""
COVER, COVERED = 0.98, 0.96
"""Share of the picture that a background covers in both directions, and share of its pixels. A ring, a star or a grid
of the picture's size covers too few pixels, and is a shape."""
NOBODY = -1


@dataclass(frozen=True, eq=False)
class Seen:
    """Element of a drawing that shows.

    Args:
        leaf: the element. Its `matrix` leads to the scene.
        to_picture: map from the scene to the picture.
        pixels: number of its pixels that show at the end.
        drawn: number of pixels that it changed when it was drawn, >= pixels.
        colour: mean of its pixels that show: red, green, blue in [0, 1].
        ink: number of these pixels, each one counted as far as the element changed it: what hardly shows hardly counts.
        box: bounds of its pixels that show.
        background: whether it covers the picture, and so is its page.
    """

    leaf: Shape | Bitmap
    to_picture: Matrix
    pixels: int
    drawn: int
    colour: tuple[float, float, float]
    ink: float
    box: Box
    background: bool


@dataclass(frozen=True, eq=False)
class View:
    """Picture of a drawing with its elements.

    Args:
        picture: (height, width, 3) uint8 RGB.
        page: the picture before the first element that is not a background, of the same shape.
        seen: the elements that show, in the order in which they are drawn.
        more: number of elements beyond MOST_LEAVES.
    """

    picture: np.ndarray
    page: np.ndarray
    seen: tuple[Seen, ...]
    more: int


def look(scene: Scene, width: int, height: int) -> View:
    """Return the picture of a scene, of that size, and the elements that show in it.

    Raises: SvgRefused as `paint`.
    """
    to_picture = fitted(scene.box, width, height, scene.aspect)
    painter = Painter(width, height, to_picture)
    painter.background(1.0, 1.0, 1.0)
    owner = np.full((height, width), NOBODY, np.int32)
    strength = np.zeros((height, width))  # of the owner's change, in [0, 1]
    drawn: list[int] = []
    leaves: list[Shape | Bitmap] = []
    before, more = painter.bgra().copy(), 0
    page: np.ndarray | None = None
    backgrounds: set[int] = set()
    for leaf, groups in scene.leaves():
        background = len(leaves) < MOST_LEAVES and _is_background(leaf, groups, painter)
        if page is None and not background:
            page = painter.rgb()
        painter.draw_leaf(leaf, groups)
        if len(leaves) >= MOST_LEAVES:
            more += 1
            continue
        if background:
            backgrounds.add(len(leaves))
        after = painter.bgra()
        rows = np.flatnonzero((after.view(np.uint32) != before.view(np.uint32)).any(axis=(1, 2)))
        count = 0
        if len(rows):
            band = slice(rows[0], rows[-1] + 1)
            size = np.abs(after[band, :, :3].astype(np.int16) - before[band, :, :3]).max(axis=2)
            change = size >= LEAST_CHANGE
            count = int(change.sum())
            owner[band][change] = len(leaves)
            strength[band][change] = np.minimum(1.0, size[change] / FULL_CHANGE)
            before[band] = after[band]
        leaves.append(leaf)
        drawn.append(count)
    picture = painter.rgb()
    if more:  # pixels that the others changed show nothing of the elements below
        change = np.abs(painter.bgra()[:, :, :3].astype(np.int16) - before[:, :, :3]).max(axis=2) >= LEAST_CHANGE
        owner[change] = NOBODY
    places = owner.ravel() + 1
    counts = np.bincount(places, minlength=len(leaves) + 1)[1:]
    inks = np.bincount(places, strength.ravel(), minlength=len(leaves) + 1)[1:]
    sums = [np.bincount(places, picture[:, :, k].ravel(), minlength=len(leaves) + 1)[1:] for k in range(3)]
    areas = find_objects(owner + 1, len(leaves)) if leaves else []
    seen = []
    for index, leaf in enumerate(leaves):
        pixels = int(counts[index])
        if pixels:
            red, green, blue = (float(total[index]) / (255 * pixels) for total in sums)
            rows, columns = areas[index]
            box = Box(columns.start, rows.start, columns.stop - columns.start, rows.stop - rows.start)
            colour, ink = (red, green, blue), float(inks[index])
            seen.append(Seen(leaf, to_picture, pixels, drawn[index], colour, ink, box, index in backgrounds))
    return View(picture, picture if page is None else page, tuple(seen), more)


def _is_background(leaf: Shape | Bitmap, groups: Sequence[Group], painter: Painter) -> bool:
    """Return whether a filled shape covers a picture, whose page it is then. What cuts it counts."""
    if isinstance(leaf, Bitmap) or leaf.text or leaf.fill is None:
        return False
    width, height = painter.width, painter.height
    box = bounds(moved(leaf.commands, painter.view.times(leaf.matrix)))
    seen = box.common(Box(0, 0, width, height)) if box is not None else None
    if seen is None or seen.width < COVER * width or seen.height < COVER * height:
        return False
    alone = Painter(width, height, painter.view, painter.work)
    alone.draw_leaf(leaf, groups)
    return float((alone.bgra()[:, :, 3] > 0).mean()) >= COVERED
