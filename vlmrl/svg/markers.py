"""Markers: arrow heads and other signs at the vertices of a line.

Source: SVG 1.1 (second edition), section 11.6, and SVG 2 for `auto-start-reverse` and the paints of the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from vlmrl.svg.geometry import Box, Lengths, fitted, rectangle, vertices
from vlmrl.svg.parse import Node
from vlmrl.svg.paths import Command
from vlmrl.svg.scene import ClipPart, Group, Item, Source
from vlmrl.svg.styles import Place
from vlmrl.svg.values import Matrix, read_numbers, read_reference, read_view_box
from vlmrl.svg.walk import Walk

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
            angle = _mean_angle([direction for direction in directions if direction is not None])
            _add(node, Matrix(e=point.x, f=point.y), angle, index == 0, line, place, walk, items)


def _add(
    node: Node,
    point: Matrix,
    angle: float,
    is_first: bool,
    line: Line,
    place: Place,
    walk: Walk,
    items: list[Item],
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


def _mean_angle(angles: Sequence[float]) -> float:
    if not angles:
        return 0.0
    return math.atan2(sum(map(math.sin, angles)), sum(map(math.cos, angles)))
