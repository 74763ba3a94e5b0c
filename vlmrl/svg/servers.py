"""Gradients and patterns as sources of fills and strokes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vlmrl.svg.geometry import Box, Lengths, fitted
from vlmrl.svg.parse import Node
from vlmrl.svg.scene import Colour, Gradient, Item, Source, Spread, Tile
from vlmrl.svg.values import Matrix, read_colour, read_number, read_share, read_transform, read_view_box

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
    relative = attributes.get("patternUnits", "").strip() != "userSpaceOnUse"
    tile = Box(*((Lengths(1.0, 1.0, lengths.em) if relative else lengths).read(attributes, n) for n in SIZES))
    if relative:
        tile = Box(
            box.x + tile.x * box.width, box.y + tile.y * box.height, tile.width * box.width, tile.height * box.height
        )
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
