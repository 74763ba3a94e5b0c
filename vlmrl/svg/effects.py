"""Clip paths and masks of elements.

Source: SVG 1.1 (second edition), chapter 14.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from vlmrl.svg.geometry import Box, Lengths, bounds, moved, rectangle
from vlmrl.svg.limits import POINT, Work
from vlmrl.svg.parse import Node
from vlmrl.svg.scene import ClipPart, Group, Item, Mask, Shape
from vlmrl.svg.styles import Place
from vlmrl.svg.values import Matrix, read_reference, read_transform
from vlmrl.svg.walk import Walk

SIZES = ("x", "y", "width", "height")


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
