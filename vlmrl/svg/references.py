"""Elements that others show by reference: clip paths, masks, markers, gradients, patterns, and bitmaps in `data:` URIs.

Source: SVG 1.1 (second edition), section 11.6 and chapter 14; SVG 2 for `auto-start-reverse` and the paints of the
context.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image, UnidentifiedImageError

from vlmrl.svg.css import Place
from vlmrl.svg.geometry import Box, Command, Lengths, bounds, fitted, moved, rectangle, vertices
from vlmrl.svg.parse import POINT, Node, Work
from vlmrl.svg.scene import ClipPart, Colour, Gradient, Group, Item, Mask, Shape, Source, Spread, Tile
from vlmrl.svg.values import (
    Matrix,
    read_colour,
    read_number,
    read_numbers,
    read_reference,
    read_share,
    read_transform,
    read_view_box,
)
from vlmrl.untrusted import CodeRefused

MOST_LINKS = 10
"""Longest chain of gradients or patterns that refer to each other."""
SPREADS: Mapping[str, Spread] = {"pad": "pad", "reflect": "reflect", "repeat": "repeat"}
PATTERN = ("pattern",)
GRADIENTS = ("linearGradient", "radialGradient")


def linked(node: Node, ids: Mapping[str, Node], tags: Sequence[str]) -> list[Node]:
    """Return the element and those that its `href` leads to, as far as they are of the same sort. A cycle ends it."""
    chain = [node]
    while len(chain) < MOST_LINKS:
        following = ids.get(chain[-1].attributes.get("href", "").strip().removeprefix("#"))
        if following is None or following.tag not in tags or any(following is other for other in chain):
            break
        chain.append(following)
    return chain


def _merged(chain: Sequence[Node]) -> dict[str, str]:
    """Return the attributes of a chain: those of the first element that has one."""
    attributes: dict[str, str] = {}
    for node in reversed(chain):
        attributes |= node.attributes
    return attributes


def parts_of(node: Node, ids: Mapping[str, Node]) -> int:
    """Return the number of elements that are looked at for a gradient or a pattern."""
    chain = linked(node, ids, GRADIENTS if node.tag in GRADIENTS else PATTERN)
    return sum(1 + len(link.children) for link in chain)


def gradient(node: Node, ids: Mapping[str, Node], box: Box, lengths: Lengths, alpha: float) -> Source | None:
    """Return a gradient for a shape; a colour where it is the same everywhere; None where nothing is painted.

    Args:
        box: bounds of the shape in its user space.
        alpha: opacity of the fill or the stroke, in [0, 1].
    """
    chain = linked(node, ids, GRADIENTS)
    stops = next((own for link in chain if (own := _stops(link, alpha))), ())
    if not stops:
        return None
    attributes, last = _merged(chain), stops[-1][1]
    if len(stops) == 1:
        return last
    matrix = read_transform(attributes.get("gradientTransform", "")) or Matrix()
    if attributes.get("gradientUnits", "").strip() != "userSpaceOnUse":
        if box.width <= 0 or box.height <= 0:
            return None
        matrix = Matrix(box.width, 0, 0, box.height, box.x, box.y).times(matrix)
        lengths = Lengths(1.0, 1.0, lengths.em)
    if abs(matrix.determinant) < 1e-12:
        return last
    spread = SPREADS.get(attributes.get("spreadMethod", "").strip(), "pad")
    values: dict[str, str] = {"x1": "0%", "y1": "0%", "x2": "100%", "y2": "0%", "cx": "50%", "cy": "50%", "r": "50%"}
    values |= attributes
    if node.tag == "linearGradient":
        x1, y1, x2, y2 = (lengths.read(values, name) for name in ("x1", "y1", "x2", "y2"))
        if math.hypot(x2 - x1, y2 - y1) < 1e-9:
            return last
        return Gradient(False, (x1, y1, x2, y2), matrix, stops, spread)
    cx, cy, r = (lengths.read(values, name) for name in ("cx", "cy", "r"))
    if r <= 0:
        return last
    fx, fy = lengths.read(values, "fx", cx), lengths.read(values, "fy", cy)
    distance = math.hypot(fx - cx, fy - cy)
    if distance > 0.99 * r:  # cairo draws a cone if the focus is outside
        fx, fy = cx + (fx - cx) * 0.99 * r / distance, cy + (fy - cy) * 0.99 * r / distance
    return Gradient(True, (fx, fy, 0.0, cx, cy, r), matrix, stops, spread)


def _stops(node: Node, alpha: float) -> tuple[tuple[float, Colour], ...]:
    stops: list[tuple[float, Colour]] = []
    for child in node.children:
        if child.tag != "stop":
            continue
        text = child.attributes.get("stop-color", "black")
        if text.strip().lower() == "currentcolor":
            text = child.attributes.get("color", node.attributes.get("color", "black"))
        red, green, blue, own = read_colour(text) or (0.0, 0.0, 0.0, 1.0)
        opacity = read_share(child.attributes.get("stop-opacity", "1"))
        own *= alpha * (1.0 if opacity is None else opacity)
        offset = read_share(child.attributes.get("offset", "0")) or 0.0
        stops.append((max(offset, stops[-1][0]) if stops else offset, (red, green, blue, own)))
    return tuple(stops)


Content = Callable[[Node, Matrix, Box], tuple[Item, ...]]
"""Maker of the content of an element: (element, map of its content, viewport for lengths) -> items."""


def pattern(
    node: Node, ids: Mapping[str, Node], box: Box, lengths: Lengths, alpha: float, content: Content
) -> Tile | None:
    """Return a pattern for a shape; None where it paints nothing.

    Args:
        box, alpha: see `gradient`.
    """
    chain = linked(node, ids, PATTERN)
    attributes = _merged(chain)
    matrix = read_transform(attributes.get("patternTransform", "")) or Matrix()
    tile = _region(attributes, "patternUnits", box, lengths)
    if tile.width <= 0 or tile.height <= 0 or abs(matrix.determinant) < 1e-12:
        return None
    source = next((link for link in chain if link.children), None)
    if source is None:
        return None
    view = read_view_box(attributes.get("viewBox", ""))
    if view is not None:
        aspect = attributes.get("preserveAspectRatio", "")
        inner = Matrix(e=tile.x, f=tile.y).times(fitted(Box(*view), tile.width, tile.height, aspect))
        viewport = Box(*view)
    elif attributes.get("patternContentUnits", "").strip() == "objectBoundingBox":
        inner, viewport = Matrix(box.width, 0, 0, box.height, tile.x, tile.y), Box(0, 0, 1, 1)
    else:  # as browsers do it, the content begins where the tile does
        inner, viewport = Matrix(e=tile.x, f=tile.y), Box(0, 0, lengths.width, lengths.height)
    if abs(inner.determinant) < 1e-12:
        return None
    items = content(source, inner, viewport)
    return Tile(items, tile, matrix, alpha) if items else None


SIZES = ("x", "y", "width", "height")


def faded(source: Source | None, alpha: float) -> Source | None:
    """Return a source with another opacity in addition."""
    if source is None or alpha >= 1.0:
        return source
    if isinstance(source, Gradient):
        return replace(source, stops=tuple((at, (r, g, b, a * alpha)) for at, (r, g, b, a) in source.stops))
    if isinstance(source, Tile):
        return replace(source, alpha=source.alpha * alpha)
    red, green, blue, own = source
    return red, green, blue, own * alpha


def opacity_of(text: str) -> float:
    """Return an opacity in [0, 1]; 1 for what is no number."""
    value = read_share(text)
    return 1.0 if value is None else value


def number_of(text: str, default: float) -> float:
    """Return a number, or the default for what is none."""
    value = read_number(text)
    return default if value is None else value


class Walk(Protocol):
    """Walk over a document."""

    @property
    def ids(self) -> Mapping[str, Node]:
        """Elements by their `id`."""
        ...

    @property
    def work(self) -> Work:
        """Counter of the work."""
        ...

    def count(self, node: Node) -> None:
        """Count an element that is drawn. Raises: CodeRefused (`limit`)."""
        ...

    def children(self, node: Node, place: Place, items: list[Item]) -> None:
        """Add what the children of an element paint."""
        ...

    def defined(self, node: Node, place: Place) -> Place:
        """Return the place within an element that is shown by reference: it inherits from where it is defined."""
        ...


def clip_of(node: Node, place: Place, inner: Sequence[Item], walk: Walk) -> tuple[ClipPart, ...] | None:
    """Return the clip path of an element; () if nothing shows, None if it has none.

    Args:
        inner: what the element paints.
    """
    target = _target(node, "clip-path", "clipPath", walk)
    if target is None:
        return None
    if target.number in place.uses:
        return ()
    lengths, matrix = place.lengths, place.matrix
    if target.attributes.get("clipPathUnits", "").strip() == "objectBoundingBox":
        box = bounds_in(inner, place.matrix, walk.work)
        if box is None or box.width <= 0 or box.height <= 0:
            return ()
        matrix = matrix.times(Matrix(box.width, 0, 0, box.height, box.x, box.y))
        lengths = lengths._replace(width=1.0, height=1.0)
    matrix = matrix.times(read_transform(target.attributes.get("transform", "")) or Matrix())
    if abs(matrix.determinant) < 1e-12:
        return ()
    inside = walk.defined(target, place)._replace(
        matrix=matrix, lengths=lengths, uses=(*place.uses, target.number), depth=place.depth + 1, clip=True
    )
    items: list[Item] = []
    walk.children(target, inside, items)
    return tuple(ClipPart(shape.commands, shape.matrix, shape.even_odd) for shape in shapes_of(items))


def mask_of(node: Node, place: Place, inner: Sequence[Item], walk: Walk) -> Mask | None:
    """Return the mask of an element; None if it has none.

    Args:
        inner: what the element paints.
    """
    target = _target(node, "mask", "mask", walk)
    if target is None or target.number in place.uses:
        return None
    attributes = {"x": "-10%", "y": "-10%", "width": "120%", "height": "120%", **target.attributes}
    box = bounds_in(inner, place.matrix, walk.work) or Box(0, 0, 0, 0)
    matrix, lengths = place.matrix, place.lengths
    frame = _region(attributes, "maskUnits", box, lengths)
    if attributes.get("maskContentUnits", "").strip() == "objectBoundingBox":
        matrix = matrix.times(Matrix(box.width, 0, 0, box.height, box.x, box.y))
        lengths = lengths._replace(width=1.0, height=1.0)
    items: list[Item] = []
    if abs(matrix.determinant) >= 1e-12:
        inside = walk.defined(target, place)._replace(
            matrix=matrix, lengths=lengths, uses=(*place.uses, target.number), depth=place.depth + 1
        )
        walk.children(target, inside, items)
    alpha_only = attributes.get("mask-type", "").strip() == "alpha"
    return Mask(tuple(items), tuple(rectangle(frame)), place.matrix, alpha_only)


def _target(node: Node, name: str, tag: str, walk: Walk) -> Node | None:
    """Return the element that an attribute refers to; None for none of that sort."""
    reference = read_reference(node.attributes.get(name, ""))
    target = walk.ids.get(reference[0]) if reference is not None else None
    return target if target is not None and target.tag == tag else None


def _region(attributes: Mapping[str, str], units: str, box: Box, lengths: Lengths) -> Box:
    """Return the region that x, y, width and height give: lengths of user space, or shares of a box."""
    if attributes.get(units, "").strip() == "userSpaceOnUse":
        return Box(*(lengths.read(attributes, name) for name in SIZES))
    x, y, width, height = (Lengths(1.0, 1.0, lengths.em).read(attributes, name) for name in SIZES)
    return Box(box.x + x * box.width, box.y + y * box.height, width * box.width, height * box.height)


def shapes_of(items: Sequence[Item]) -> Iterator[Shape]:
    """Yield the shapes in items, those in groups included."""
    waiting = list(reversed(items))
    while waiting:
        item = waiting.pop()
        if isinstance(item, Group):
            waiting.extend(reversed(item.items))
        elif isinstance(item, Shape):
            yield item


def bounds_in(items: Sequence[Item], matrix: Matrix, work: Work) -> Box | None:
    """Return the bounds of items without their strokes; None if they have none.

    Args:
        matrix: map from the user space of the result to the scene.
    """
    inverse = matrix.inverted()
    total: Box | None = None
    for shape in shapes_of(items):
        work.spend(POINT * (1 + len(shape.commands)))
        box = bounds(moved(shape.commands, inverse.times(shape.matrix)))
        if box is not None:
            total = box if total is None else total.joined(box)
    return total


MOST_REFERENCES = 20
"""Largest number of references that lead to each other."""


class Markers(NamedTuple):
    """Marker elements of a line; None = it has none there."""

    start: Node | None
    middle: Node | None
    end: Node | None

    @property
    def heads(self) -> tuple[bool, bool]:
        """Return whether the begin and the end have one."""
        return self.start is not None, self.end is not None


def markers_of(place: Place, walk: Walk) -> Markers:
    """Return the markers of a line."""
    return Markers(*(_marker(place.get(f"marker-{side}"), place, walk) for side in ("start", "mid", "end")))


def _marker(text: str, place: Place, walk: Walk) -> Node | None:
    reference = read_reference(text)
    node = walk.ids.get(reference[0]) if reference is not None else None
    usable = node is not None and node.tag == "marker" and node.number not in place.uses
    return node if usable and len(place.uses) < MOST_REFERENCES else None


class Line(NamedTuple):
    """Line that has markers.

    Args:
        width: width of its stroke; 1 without one.
        paints: its fill and its stroke.
    """

    commands: Sequence[Command]
    width: float
    paints: tuple[Source | None, Source | None]


def add_markers(markers: Markers, line: Line, place: Place, walk: Walk, items: list[Item]) -> None:
    """Add the markers of a line: at its begin, at the vertices between, at its end."""
    points = vertices(line.commands)
    for index, point in enumerate(points):
        node, directions = markers.middle, (point.before, point.after)
        if index == 0:
            node, directions = markers.start, (point.after,)
        elif index == len(points) - 1:
            node, directions = markers.end, (point.before,)
        if node is not None:
            angles = [direction for direction in directions if direction is not None]
            angle = math.atan2(sum(map(math.sin, angles)), sum(map(math.cos, angles)))  # 0 without any
            _add(node, Matrix(e=point.x, f=point.y), angle, index == 0, line, place, walk, items)


def _add(
    node: Node, point: Matrix, angle: float, is_first: bool, line: Line, place: Place, walk: Walk, items: list[Item]
) -> None:
    walk.count(node)
    attributes = {"markerWidth": "3", "markerHeight": "3", **node.attributes}
    lengths = place.lengths
    size = lengths.read(attributes, "markerWidth"), lengths.read(attributes, "markerHeight")
    unit = 1.0 if attributes.get("markerUnits", "").strip() == "userSpaceOnUse" else line.width
    if min(size) <= 0 or unit <= 0:
        return
    orient = attributes.get("orient", "0").strip()
    if orient == "auto-start-reverse":
        angle += math.pi if is_first else 0.0
    elif orient != "auto":
        numbers = read_numbers(orient, 1)
        angle = math.radians(numbers[0]) if numbers else 0.0
    cos, sin = math.cos(angle) * unit, math.sin(angle) * unit
    view = read_view_box(attributes.get("viewBox", ""))
    box = Box(*view) if view else Box(0, 0, *size)
    fit = fitted(box, *size, attributes.get("preserveAspectRatio", "")) if view else Matrix()
    x, y = fit.apply(lengths.read(attributes, "refX"), lengths.read(attributes, "refY"))
    outer = place.matrix.times(point).times(Matrix(cos, sin, -sin, cos)).times(Matrix(e=-x, f=-y))
    inner = walk.defined(node, place)._replace(
        matrix=outer.times(fit),
        lengths=Lengths(box.width, box.height, 16.0),
        uses=(*place.uses, node.number),
        depth=place.depth + 1,
        context=line.paints,
        marker=True,
    )
    content: list[Item] = []
    walk.children(node, inner, content)
    if content and attributes.get("overflow", "hidden").strip() not in ("visible", "auto"):
        frame = ClipPart(tuple(rectangle(Box(0, 0, *size))), outer, False)
        items.append(Group(tuple(content), clip=(frame,)))
    else:
        items.extend(content)


DATA = re.compile(r"data:image/(png|jpe?g|gif|webp)((?:;[\w.=-]+)*);base64,", re.IGNORECASE)
FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""Formats that Pillow may read. Others run programs, such as EPS."""
MOST_PIXELS = 4_194_304


def read_bitmap(href: str) -> np.ndarray:
    """Return the picture of a data URI as (height, width, 4) uint8 RGBA.

    Raises: CodeRefused (`forbidden` for another kind of picture, `limit` for a picture that is too large, `drawing` for
        one that cannot be read).
    """
    match = DATA.match(href)
    if match is None:
        raise CodeRefused("forbidden", "it embeds a picture that is not PNG, JPEG, GIF or WebP in base64")
    try:
        content = base64.b64decode("".join(href[match.end() :].split()), validate=True)
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise CodeRefused("limit", f"it embeds a picture of more than {MOST_PIXELS:,} pixels")
            return np.asarray(image.convert("RGBA"))
    except (binascii.Error, UnidentifiedImageError, OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        raise CodeRefused("drawing", "a picture that it embeds cannot be read") from None
