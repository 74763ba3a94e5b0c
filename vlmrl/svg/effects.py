"""Clip paths and masks of elements.

Source: SVG 1.1 (second edition), chapter 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from vlmrl.svg.geometry import Box, Lengths, bounds, moved, polyline, rectangle
from vlmrl.svg.parse import Node
from vlmrl.svg.paths import Command
from vlmrl.svg.scene import ClipPart, Group, Item, Mask, Shape
from vlmrl.svg.styles import Place
from vlmrl.svg.values import Matrix, read_reference, read_transform
from vlmrl.svg.walk import Walk

SIZES = ("x", "y", "width", "height")
CURVE_PIECES = 24
"""Lines for a curve of an outline that is turned round."""


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
        box = bounds_in(inner, place.matrix)
        if box is None or box.width <= 0 or box.height <= 0:
            return ()
        matrix = matrix.times(Matrix(box.width, 0, 0, box.height, box.x, box.y))
        lengths = lengths._replace(width=1.0, height=1.0)
    matrix = matrix.times(read_transform(target.attributes.get("transform", "")) or Matrix())
    if abs(matrix.determinant) < 1e-12:
        return ()
    inside = place._replace(
        matrix=matrix, lengths=lengths, uses=(*place.uses, target.number), style={}, depth=place.depth + 1
    )
    items: list[Item] = []
    walk.children(target, inside, items)
    rules = {n.number: n.attributes.get("clip-rule", "").strip() for n in target.walk()}
    general = rules[target.number]
    parts = []
    for shape in shapes_of(items):
        rule = rules.get(shape.number, "") or general
        parts.append(ClipPart(shape.commands, shape.matrix, rule == "evenodd"))
    return tuple(map(_turned, parts)) if len(parts) > 1 else tuple(parts)


def _turned(part: ClipPart) -> ClipPart:
    """Return a part whose outline goes clockwise, so that the parts of a clip path add up where they overlap."""
    lines = polyline(moved(part.commands, part.matrix), CURVE_PIECES)
    area = sum(x1 * y2 - x2 * y1 for line in lines for (x1, y1), (x2, y2) in pairwise([*line, line[0]]))
    if area >= 0:
        return part
    commands: list[Command] = []
    for line in lines:
        first, *others = reversed(line)
        commands += [Command("M", first), *(Command("L", point) for point in others), Command("Z", ())]
    return ClipPart(tuple(commands), Matrix(), part.even_odd)


def mask_of(node: Node, place: Place, inner: Sequence[Item], walk: Walk) -> Mask | None:
    """Return the mask of an element; None if it has none.

    Args:
        inner: what the element paints.
    """
    target = _target(node, "mask", "mask", walk)
    if target is None or target.number in place.uses:
        return None
    attributes = {"x": "-10%", "y": "-10%", "width": "120%", "height": "120%", **target.attributes}
    box = bounds_in(inner, place.matrix) or Box(0, 0, 0, 0)
    matrix, lengths = place.matrix, place.lengths
    if attributes.get("maskUnits", "").strip() == "userSpaceOnUse":
        frame = _frame(attributes, lengths)
    else:
        share = _frame(attributes, Lengths(1.0, 1.0, lengths.em))
        x, y = box.x + share.x * box.width, box.y + share.y * box.height
        frame = Box(x, y, share.width * box.width, share.height * box.height)
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


def _frame(attributes: Mapping[str, str], lengths: Lengths) -> Box:
    return Box(*(lengths.read(attributes, name) for name in SIZES))


def shapes_of(items: Sequence[Item]) -> Iterator[Shape]:
    """Yield the shapes in items, those in groups included."""
    waiting = list(reversed(items))
    while waiting:
        item = waiting.pop()
        if isinstance(item, Group):
            waiting.extend(reversed(item.items))
        elif isinstance(item, Shape):
            yield item


def bounds_in(items: Sequence[Item], matrix: Matrix) -> Box | None:
    """Return the bounds of items without their strokes; None if they have none.

    Args:
        matrix: map from the user space of the result to the scene.
    """
    inverse = matrix.inverted()
    total: Box | None = None
    for shape in shapes_of(items):
        box = bounds(moved(shape.commands, inverse.times(shape.matrix)))
        if box is not None:
            total = box if total is None else total.joined(box)
    return total
