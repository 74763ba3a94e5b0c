"""Elements of a drawing as a reward compares them: shapes, lines with their arrow heads, texts; what of them is seen.

The truth and the response are read by the same code, from what can be seen. All positions are in pixels of one picture.
An element that is transparent, has the colour of what is below it, lies outside of the picture or behind another one
changes or shows nothing. Rewards count what can be seen, so that hidden content earns nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from scipy.ndimage import find_objects

from vlmrl.svg.draw import Painter
from vlmrl.svg.geometry import Box, bounds, fitted, moved, polyline
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

    Raises: CodeRefused as `paint`.
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


Kind = Literal["shape", "line", "text"]
Point = tuple[float, float]
GRID = 12
"""Side of the raster on which the forms of shapes are compared."""
LEAST_PIXELS = 3
"""Number of pixels that an element must show. Edges of hidden elements show a few."""
LEAST_SHARE = 0.02
"""Share of the pixels that an element changed which must still show."""
HEAD_REACH = 2.5
"""Largest distance of a head's middle from the end of its line, in diagonals of the head."""
HEAD_SIZE = 0.35
"""Largest diagonal of a separate head, in lengths of its line."""
THIN = 0.02
"""Largest width of a filled shape that counts as a line, in its length."""
EDGE, END = 1.0, 0.03
"""Distance from the pixels that show up to which a shape counts as seen, in pixels, and a line, in diagonals of the
picture: its head covers its end."""


@dataclass(frozen=True, eq=False)
class Element:
    """One element.

    Args:
        box: bounds in pixels of what can be seen of it.
        colour: what it looks like on average: red, green, blue in [0, 1].
        form: for a shape, which cells of a GRID x GRID raster over its box are inside: (GRID * GRID,) bool.
        points: for a line, its begin, middle and end.
        heads: for a line, whether the begin and the end have a head.
        text: for a text, its characters.
        pixels: number of its pixels that show.
        ink: the same, each counted as far as the element changed it.
        number: position of its element in the document.
    """

    kind: Kind
    box: Box
    colour: tuple[float, float, float]
    form: np.ndarray = field(default_factory=lambda: np.ones(GRID * GRID, bool))
    points: tuple[Point, Point, Point] = ((0.0, 0.0), (0.0, 0.0), (0.0, 0.0))
    heads: tuple[bool, bool] = (False, False)
    text: str = ""
    pixels: int = 0
    ink: float = 0.0
    number: int = 0


def elements_of(view: View) -> list[Element]:
    """Return the elements of a view, without its background and without what hardly shows."""
    height, width = view.picture.shape[:2]
    frame = Box(0, 0, width, height)
    elements: list[Element] = []
    for one in view.seen:
        if one.pixels < LEAST_PIXELS or one.pixels < LEAST_SHARE * one.drawn:
            continue
        if isinstance(one.leaf, Shape) and one.leaf.marker:
            continue  # the line that it stands on says that it has one
        element = _element(one, frame)
        if element is not None:
            elements.append(element)
    return _with_heads(_joined_texts(elements))


def _element(one: Seen, frame: Box) -> Element | None:
    leaf = one.leaf
    if one.background:
        return None  # the pictures are compared apart
    make = partial(Element, colour=one.colour, pixels=one.pixels, ink=one.ink, number=leaf.number)
    if isinstance(leaf, Bitmap):
        rows, columns = leaf.pixels.shape[:2]
        corners = [one.to_picture.times(leaf.matrix).apply(x, y) for x in (0, columns) for y in (0, rows)]
        xs, ys = zip(*corners, strict=True)
        box = Box(min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)).common(_grown(one.box, EDGE))
        return make("shape", box) if box is not None else None
    commands = moved(leaf.commands, one.to_picture.times(leaf.matrix))
    whole = bounds(commands)
    if whole is None:
        return None
    # What is cut, covered or outside of the picture is no part of the element.
    box = whole.common(_grown(one.box, EDGE)) or one.box
    if leaf.text:
        text = " ".join(leaf.text.split())
        return make("text", box, text=text) if text else None
    lines = polyline(commands)
    path = max(lines, key=len)
    reach = _grown(one.box, END * math.hypot(frame.width, frame.height))
    if leaf.fill is None and len(lines) == 1 and path[0] != path[-1]:
        return make("line", box, points=_within(_ends(path), reach), heads=leaf.heads)
    if len(lines) == 1 and (bar := _bar(path, leaf)) is not None:
        return make("line", box, points=_within(bar, reach))
    return make("shape", box, form=raster(lines, box, even_odd=leaf.even_odd))


def _grown(box: Box, reach: float) -> Box:
    return Box(box.x - reach, box.y - reach, box.width + 2 * reach, box.height + 2 * reach)


def _within(points: tuple[Point, Point, Point], box: Box) -> tuple[Point, Point, Point]:
    """Return the points with those outside of a box moved to its edge."""
    begin, middle, end = ((min(max(x, box.x), box.right), min(max(y, box.y), box.bottom)) for x, y in points)
    return begin, middle, end


def _ends(path: Sequence[Point]) -> tuple[Point, Point, Point]:
    """Return the begin, the middle and the end of a line, by its length."""
    lengths = [math.dist(a, b) for a, b in pairwise(path)]
    half = sum(lengths) / 2
    for (a, b), length in zip(pairwise(path), lengths, strict=True):
        if half <= length:
            share = half / length if length else 0.0
            return path[0], (a[0] + (b[0] - a[0]) * share, a[1] + (b[1] - a[1]) * share), path[-1]
        half -= length
    return path[0], path[-1], path[-1]


def _bar(path: Sequence[Point], leaf: Shape) -> tuple[Point, Point, Point] | None:
    """Return the ends of a filled rectangle that is as thin as a line; None for anything else."""
    corners = list(dict.fromkeys((round(x, 6), round(y, 6)) for x, y in path))
    if leaf.fill is None or len(corners) != 4:
        return None
    a, b, c, d = corners
    if math.dist(a, b) < math.dist(b, c):
        a, b, c, d = b, c, d, a
    length, width = math.dist(a, b), math.dist(b, c)
    if width > THIN * length or abs(math.dist(a, c) - math.dist(b, d)) > 0.05 * length:
        return None
    begin, end = ((a[0] + d[0]) / 2, (a[1] + d[1]) / 2), ((b[0] + c[0]) / 2, (b[1] + c[1]) / 2)
    return begin, ((begin[0] + end[0]) / 2, (begin[1] + end[1]) / 2), end


def raster(lines: Sequence[Sequence[Point]], box: Box, *, even_odd: bool = False) -> np.ndarray:
    """Return which cells of a raster over a box have their middle inside an outline: (GRID * GRID,) bool.

    Args:
        lines: points of the subpaths, each closed to its begin.
    """
    steps = (np.arange(GRID) + 0.5) / GRID
    px = (box.x + steps * box.width)[None, :, None]
    py = (box.y + steps * box.height)[:, None, None]
    winding = np.zeros((GRID, GRID), int)
    for points in lines:
        at = np.asarray(points, float)
        x1, y1 = at[:, 0], at[:, 1]
        x2, y2 = np.roll(x1, -1), np.roll(y1, -1)
        up, down = (y1 <= py) & (y2 > py), (y1 > py) & (y2 <= py)  # (GRID, 1, edges)
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = x1 + (py - y1) * (x2 - x1) / (y2 - y1)
        right = crossing > px  # (GRID, GRID, edges)
        winding += (up & right).sum(axis=2) - (down & right).sum(axis=2)
    inside = winding % 2 == 1 if even_odd else winding != 0
    return inside.ravel()


def _joined_texts(elements: Sequence[Element]) -> list[Element]:
    """Return the elements with the runs of one `text` element that stand on one line as one text."""
    joined: list[Element] = []
    for element in elements:
        last = joined[-1] if joined else None
        if last is None or element.kind != "text" or last.kind != "text" or last.number != element.number:
            joined.append(element)
            continue
        shared = min(last.box.bottom, element.box.bottom) - max(last.box.y, element.box.y)
        if shared < 0.3 * min(last.box.height, element.box.height):
            joined.append(element)
            continue
        pixels = last.pixels + element.pixels
        share = element.pixels / pixels
        red, green, blue = (a + (b - a) * share for a, b in zip(last.colour, element.colour, strict=True))
        text = f"{last.text} {element.text}"
        joined[-1] = replace(
            last,
            box=last.box.joined(element.box),
            colour=(red, green, blue),
            text=text,
            pixels=pixels,
            ink=last.ink + element.ink,
        )
    return joined


def _with_heads(elements: Sequence[Element]) -> list[Element]:
    """Return the elements with arrow heads that are shapes of their own as heads of their lines."""
    lines = [i for i, element in enumerate(elements) if element.kind == "line"]
    heads: dict[int, list[bool]] = {i: list(elements[i].heads) for i in lines}
    dropped: set[int] = set()
    for index, element in enumerate(elements):
        if element.kind != "shape" or not 0 < element.form.mean() < 0.8:
            continue  # a triangle fills half of its box
        size = math.hypot(element.box.width, element.box.height)
        best: tuple[float, int, int] | None = None
        for i in lines:
            begin, middle, end = elements[i].points
            length = math.dist(begin, middle) + math.dist(middle, end)
            if size > HEAD_SIZE * length:
                continue
            for side, point in ((0, begin), (1, end)):
                distance = math.dist(point, element.box.center)
                closer = best is None or distance < best[0]
                if not heads[i][side] and distance <= HEAD_REACH * size / 2 and closer:
                    best = (distance, i, side)
        if best is not None:
            heads[best[1]][best[2]] = True
            dropped.add(index)
    return [
        replace(element, heads=(heads[i][0], heads[i][1])) if i in heads else element
        for i, element in enumerate(elements)
        if i not in dropped
    ]
