"""Simple figures as very short SVG code in one canonical form, for models that work on single characters.

Each shape stands in the middle of a cell, alone. The same figure is always the same text: shapes go from top left to
bottom right, attributes have a fixed order, and all numbers are multiples of `GRID`. There are no labels, borders or
definitions beside the head of an arrow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

from vlmrl.errors import DataError
from vlmrl.tasks.vfig.drawn.code import NAMESPACE, tag
from vlmrl.tasks.vfig.drawn.plane import Box, Point, moved, numbers

GRID = 2
"""All coordinates and sizes are multiples of it, in pixels."""
CELL = 16
"""Side of a cell in pixels. Canvases are whole cells."""
HALVES = (4, 6)
"""Half widths and half heights of shapes in pixels."""
FORMS = ("circle", "rect", "ellipse", "triangle")
COLOURS = ("red", "orange", "green", "cyan", "blue", "purple")
SHORTEST = 12
"""Shortest arrow in pixels."""
CLEAR_ENDS, CLEARANCE = 2, 1
"""An arrow keeps this distance from all shapes, except for this length at its ends, both in pixels."""
HEAD = tag(
    "marker",
    {"id": "a", "refX": 3, "refY": 1.5, "orient": "auto"},
    tag("path", {"d": "M0 0L3 1.5 0 3"}),
)
"""Code of the head of an arrow; its tip is at the end of the line."""
LINE: Mapping[str, str | float] = {"stroke": "black", "stroke-width": 2, "marker-end": "url(#a)"}
MOST_TRIES = 400
"""Largest number of random figures of which none can be used."""


class SimpleShape(NamedTuple):
    """Shape of a simple figure: top, left, right, bottom in pixels, its form from `FORMS`, its colour."""

    y1: int
    x1: int
    x2: int
    y2: int
    form: str
    colour: str

    @property
    def box(self) -> Box:
        return Box(self.x1, self.y1, self.x2, self.y2)

    @property
    def corners(self) -> list[Point]:
        """The corners of a triangle in this box: its top, and its lower right and left."""
        return [Point(self.box.centre.x, self.y1), Point(self.x2, self.y2), Point(self.x1, self.y2)]

    @property
    def type(self) -> str:
        """Type of the shape in metadata."""
        if self.form == "rect":
            return "square" if self.box.width == self.box.height else "rectangle"
        return "polygon" if self.form == "triangle" else self.form

    def anchors(self) -> list[Point]:
        """Return the points of the outline where arrows may end."""
        x, y = self.box.centre
        if self.form == "triangle":
            return [*self.corners, Point(x, self.y2)]
        return [Point(x, self.y1), Point(self.x2, y), Point(x, self.y2), Point(self.x1, y)]

    def code(self) -> str:
        (cx, cy), width, height = self.box.centre, self.box.width, self.box.height
        if self.form == "circle":
            return tag("circle", {"cx": cx, "cy": cy, "r": width / 2, "fill": self.colour})
        if self.form == "ellipse":
            return tag("ellipse", {"cx": cx, "cy": cy, "rx": width / 2, "ry": height / 2, "fill": self.colour})
        if self.form == "rect":
            sides = {"x": self.x1, "y": self.y1, "width": width, "height": height}
            return tag("rect", {**sides, "fill": self.colour})
        return tag("polygon", {"points": numbers(self.corners), "fill": self.colour})


class SimpleArrow(NamedTuple):
    """Arrow of a simple figure: indices of the two shapes, and its ends."""

    source: int
    target: int
    start: Point
    end: Point

    def code(self) -> str:
        ends = {"x1": self.start.x, "y1": self.start.y, "x2": self.end.x, "y2": self.end.y}
        return tag("line", {**ends, **LINE})


def random_shape(left: int, top: int, rng: random.Random) -> SimpleShape:
    """Return a shape in the middle of the cell with this corner."""
    form, colour = rng.choice(FORMS), rng.choice(COLOURS)
    across, down = rng.choice(HALVES), rng.choice(HALVES)
    if form == "circle":
        down = across
    elif form == "ellipse":
        down = sum(HALVES) - across
    x, y = left + CELL // 2, top + CELL // 2
    return SimpleShape(y - down, x - across, x + across, y + down, form, colour)


def random_shapes(count: int, canvas: tuple[int, int], rng: random.Random) -> list[SimpleShape]:
    """Return shapes in order, in cells of their own. `count` is at most the number of cells."""
    cells = list(product(range(0, canvas[1], CELL), range(0, canvas[0], CELL)))
    return [random_shape(left, top, rng) for top, left in sorted(rng.sample(cells, count))]


def passes(start: Point, end: Point, box: Box) -> bool:
    """Return whether a line passes through a box or along it, tested at every pixel between its ends."""
    near = box.grown(CLEARANCE)
    steps = range(CLEAR_ENDS, math.floor(math.dist(start, end)) - CLEAR_ENDS + 1)
    return any(near.contains(moved(start, end, step)) for step in steps)


def random_arrow(shapes: Sequence[SimpleShape], rng: random.Random) -> SimpleArrow | None:
    """Return the shortest arrow between two random shapes that passes through none; None if there is none."""
    pairs = list(combinations(range(len(shapes)), 2))
    for a, b in rng.sample(pairs, len(pairs)):
        source, target = rng.sample([a, b], 2)
        ends = [
            (math.dist(start, end), start, end)
            for start, end in product(shapes[source].anchors(), shapes[target].anchors())
            if math.dist(start, end) >= SHORTEST and not any(passes(start, end, s.box) for s in shapes)
        ]
        if ends:
            return SimpleArrow(source, target, *min(ends)[1:])
    return None


def draw_simple(canvas: tuple[int, int], count: int, has_arrow: bool, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return the SVG code and the entities of a simple figure.

    Args:
        canvas: width and height in pixels, multiples of `CELL`.
        count: number of shapes.
        has_arrow: whether an arrow joins two of them; needs two shapes.
    Raises: DataError if the shapes do not fit.
    """
    message = f"{count} simple shapes do not fit on {canvas[0]} x {canvas[1]} pixels"
    if count > (canvas[0] // CELL) * (canvas[1] // CELL):
        raise DataError(message, hint="choose larger canvases, or fewer shapes")
    for _ in range(MOST_TRIES):
        shapes = random_shapes(count, canvas, rng)
        arrow = random_arrow(shapes, rng) if has_arrow else None
        if arrow or not has_arrow:
            break
    else:
        raise DataError(f"{message} with an arrow", hint="choose larger canvases, or fewer shapes")
    code = [shape.code() for shape in shapes]
    entities = {f"shape_{i}": shape_entity(f"shape_{i}", shape) for i, shape in enumerate(shapes)}
    if arrow:
        code = [HEAD, *code, arrow.code()]
        entities["arrow_0"] = arrow_entity(arrow)
    return tag("svg", {"xmlns": NAMESPACE, "viewBox": f"0 0 {canvas[0]} {canvas[1]}"}, *code), entities


def shape_entity(identity: str, shape: SimpleShape) -> dict[str, Any]:
    """Return the metadata of a shape."""
    return {
        "id": identity,
        "type": shape.type,
        "bounds": [shape.x1, shape.y1, shape.x2, shape.y2],
        "label": "",
        "font": "",
        "fillStyle": "solid",
        "fillColor": shape.colour,
        "strokeColor": "none",
        "strokeWidth": 0,
        "borderStyle": "solid",
        "stacked": 1,
        "shape": shape.type if shape.form == "rect" else shape.form,
        "rounded": False,
    }


def arrow_entity(arrow: SimpleArrow) -> dict[str, Any]:
    """Return the metadata of the arrow."""
    return {
        "id": "arrow_0",
        "type": "arrow",
        "from": f"shape_{arrow.source}",
        "to": f"shape_{arrow.target}",
        "color": LINE["stroke"],
        "width": LINE["stroke-width"],
        "style": "straight",
        "dash": "solid",
    }
