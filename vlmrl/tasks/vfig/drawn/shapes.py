"""Shapes of drawn diagrams: 12 flat ones and 6 that look solid. Each knows its outline and the place of its label."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from vlmrl.tasks.vfig.drawn.code import tag
from vlmrl.tasks.vfig.drawn.fills import Paint, darker, lighter
from vlmrl.tasks.vfig.drawn.plane import Box, Point, box_of, hull, number, numbers, turn

Outline = tuple[Point, ...]
"""Corners of a closed line, in order around it; a curve has many."""


class Form(NamedTuple):
    """Code of a shape's elements, its outline, and the box in which its label has room."""

    elements: tuple[str, ...]
    outline: Outline
    label: Box


class Polygon(NamedTuple):
    """Corners of a polygon as shares of its box, and the box of its label."""

    corners: Sequence[tuple[float, float]]
    label: tuple[float, float, float, float]


POLYGONS: Mapping[str, Polygon] = {
    "triangle": Polygon([(0.5, 0), (1, 1), (0, 1)], (0.25, 0.5, 0.75, 0.96)),
    "diamond": Polygon([(0.5, 0), (1, 0.5), (0.5, 1), (0, 0.5)], (0.2, 0.3, 0.8, 0.7)),
    "trapezoid": Polygon([(0.2, 0), (0.8, 0), (1, 1), (0, 1)], (0.15, 0.15, 0.85, 0.95)),
    "parallelogram": Polygon([(0.22, 0), (1, 0), (0.78, 1), (0, 1)], (0.2, 0.1, 0.8, 0.9)),
    "pentagon": Polygon([(0.5, 0), (1, 0.382), (0.809, 1), (0.191, 1), (0, 0.382)], (0.16, 0.3, 0.84, 0.86)),
    "hexagon": Polygon([(0.25, 0), (0.75, 0), (1, 0.5), (0.75, 1), (0.25, 1), (0, 0.5)], (0.15, 0.15, 0.85, 0.85)),
    "octagon": Polygon(
        [(0.293, 0), (0.707, 0), (1, 0.293), (1, 0.707), (0.707, 1), (0.293, 1), (0, 0.707), (0, 0.293)],
        (0.1, 0.15, 0.9, 0.85),
    ),
    "box": Polygon([(0, 0), (1, 0), (1, 1), (0, 1)], (0.06, 0.08, 0.94, 0.92)),
}
FRONTS = {
    "3d-cube": "box",
    "3d-prism": "triangle",
    "3d-diamond": "diamond",
    "3d-hexagon": "hexagon",
    "3d-trapezoid": "trapezoid",
}
"""Solid -> the polygon of its front."""
DEPTH = 0.18
"""Depth of a solid as a share of the shorter side of its box."""
CLOUD_CORNERS = 9
CLOUD_BULGE = 0.58
"""Radius of a cloud's arcs as a share of their chords; 0.5 gives half circles."""
STEPS = 72
"""Number of corners that stand for an ellipse in an outline."""


def within(box: Box, shares: tuple[float, float, float, float]) -> Box:
    """Return the part of a box that is given as shares of its width and height."""
    (x1, y1), (x2, y2) = box.at(*shares[:2]), box.at(*shares[2:])
    return Box(x1, y1, x2, y2)


def arc(centre: Point, rx: float, ry: float, start: float, end: float) -> list[Point]:
    """Return points of an ellipse's arc from one angle to another, in radians, clockwise on the screen."""
    steps = max(1, math.ceil(STEPS * abs(end - start) / (2 * math.pi)))
    angles = (start + (end - start) * i / steps for i in range(steps + 1))
    return [Point(centre.x + rx * math.cos(a), centre.y + ry * math.sin(a)) for a in angles]


def polygon_code(points: Iterable[Point], paint: Paint, fill: str = "") -> str:
    return tag("polygon", {"points": numbers(points), **paint.attributes(fill)})


def draw_polygon(name: str, box: Box, paint: Paint) -> Form:
    """Return one of `POLYGONS` that fills the box."""
    points = tuple(box.at(u, v) for u, v in POLYGONS[name].corners)
    return Form((polygon_code(points, paint),), points, within(box, POLYGONS[name].label))


def draw_rectangle(box: Box, paint: Paint, radius: float) -> Form:
    """Return a rectangle whose corners have this radius, in pixels."""
    sides: dict[str, str | float] = {"x": box.x1, "y": box.y1, "width": box.width, "height": box.height}
    rounding: dict[str, str | float] = {"rx": radius} if radius else {}
    code = tag("rect", {**sides, **rounding, **paint.attributes()})
    inner = box.grown(-radius)
    corners = [(inner.x2, inner.y1), (inner.x2, inner.y2), (inner.x1, inner.y2), (inner.x1, inner.y1)]
    quarter = math.pi / 2
    outline = [
        point
        for i, (x, y) in enumerate(corners)
        for point in (arc(Point(x, y), radius, radius, (i - 1) * quarter, i * quarter) if radius else [Point(x, y)])
    ]
    return Form((code,), tuple(outline), within(box, POLYGONS["box"].label))


def draw_ellipse(box: Box, paint: Paint) -> Form:
    """Return the ellipse that fills the box; a `circle` element if the box is a square."""
    (cx, cy), rx, ry = box.centre, box.width / 2, box.height / 2
    label = within(box, (0.13, 0.2, 0.87, 0.8))
    outline = tuple(arc(box.centre, rx, ry, 0, 2 * math.pi)[:-1])
    if rx == ry:
        return Form((tag("circle", {"cx": cx, "cy": cy, "r": rx, **paint.attributes()}),), outline, label)
    return Form((tag("ellipse", {"cx": cx, "cy": cy, "rx": rx, "ry": ry, **paint.attributes()}),), outline, label)


class Cloud(NamedTuple):
    """Cloud in the unit square: the ends of its arcs, the half axes of each arc, and the outline."""

    corners: list[Point]
    radii: list[Point]
    outline: list[Point]


def _unit_cloud() -> Cloud:
    """Return a ring of arcs that bulge outwards, stretched to fill the unit square."""
    ring = [
        Point(math.cos(2 * math.pi * i / CLOUD_CORNERS), 0.8 * math.sin(2 * math.pi * i / CLOUD_CORNERS))
        for i in range(CLOUD_CORNERS)
    ]
    radii, outline = [], []
    for a, b in zip(ring, [*ring[1:], ring[0]], strict=True):
        chord = math.dist(a, b)
        radius = CLOUD_BULGE * chord
        # The centre of the arc is on the inner side of the chord: to the right when going clockwise on the screen.
        depth = math.sqrt(radius**2 - chord**2 / 4) / chord
        centre = Point((a.x + b.x) / 2 - (b.y - a.y) * depth, (a.y + b.y) / 2 + (b.x - a.x) * depth)
        start = math.atan2(a.y - centre.y, a.x - centre.x)
        sweep = (math.atan2(b.y - centre.y, b.x - centre.x) - start) % (2 * math.pi)
        radii.append(radius)
        outline += arc(centre, radius, radius, start, start + sweep)[:-1]
    around = box_of(outline)

    def unit(point: Point) -> Point:
        return Point((point.x - around.x1) / around.width, (point.y - around.y1) / around.height)

    axes = [Point(radius / around.width, radius / around.height) for radius in radii]
    return Cloud([unit(p) for p in ring], axes, [unit(p) for p in outline])


CLOUD = _unit_cloud()


def draw_cloud(box: Box, paint: Paint) -> Form:
    """Return a cloud of relative arcs that fills the box."""
    corners = [box.at(u, v) for u, v in CLOUD.corners]
    arcs = [
        f"a{number(u * box.width)},{number(v * box.height)} 0 0 1 {number(b.x - a.x)},{number(b.y - a.y)}"
        for (u, v), a, b in zip(CLOUD.radii, corners, [*corners[1:], corners[0]], strict=True)
    ]
    code = tag("path", {"d": f"M{numbers(corners[:1])} {' '.join(arcs)} z", **paint.attributes()})
    outline = tuple(Point(box.x1 + u * box.width, box.y1 + v * box.height) for u, v in CLOUD.outline)
    return Form((code,), outline, within(box, (0.16, 0.22, 0.84, 0.78)))


def draw_cylinder(box: Box, paint: Paint) -> Form:
    """Return an upright cylinder: its body, and its top as an ellipse."""
    rx, ry = box.width / 2, float(max(2, round(min(0.14 * box.height, 0.2 * box.width))))
    middle, top, bottom = box.centre.x, box.y1 + ry, box.y2 - ry
    radii = f"A{number(rx)},{number(ry)} 0 0 0"
    left, right = number(box.x1), number(box.x2)
    path = (
        f"M{left},{number(top)} V{number(bottom)} {radii} {number(middle)},{number(box.y2)} "
        f"{radii} {right},{number(bottom)} V{number(top)} Z"
    )
    body = tag("path", {"d": path, **paint.attributes()})
    lid = {"cx": middle, "cy": top, "rx": rx, "ry": ry, **paint.attributes(lighter(paint.colours.fill, 0.35))}
    lower = arc(Point(middle, bottom), rx, ry, 0, math.pi)
    upper = arc(Point(middle, top), rx, ry, math.pi, 2 * math.pi)
    label = Box(box.x1 + 0.06 * box.width, top + ry, box.x2 - 0.06 * box.width, box.y2 - 0.4 * ry)
    return Form((body, tag("ellipse", lid)), (*lower, *upper), label)


def draw_solid(name: str, box: Box, paint: Paint) -> Form:
    """Return a solid: the front that `FRONTS` names, at the lower left, and its visible sides."""
    depth = max(3, round(DEPTH * min(box.width, box.height)))
    shift = Point(depth, -max(2, round(0.7 * depth)))
    front = Box(box.x1, box.y1 - shift.y, box.x2 - shift.x, box.y2)
    form = draw_polygon(FRONTS[name], front, paint)
    if name == "3d-cube":
        form = draw_rectangle(front, paint, 0)
    corners = draw_polygon(FRONTS[name], front, paint).outline
    sides = []
    for a, b in zip(corners, (*corners[1:], corners[0]), strict=True):
        # Corners go clockwise on the screen. A side is visible if the shift leads out of the front there.
        if turn(a, b, Point(a.x + shift.x, a.y + shift.y)) < 0:
            far = [Point(p.x + shift.x, p.y + shift.y) for p in (b, a)]
            is_top = abs(b.x - a.x) > 2 * abs(b.y - a.y)
            fill = lighter(paint.colours.fill, 0.35) if is_top else darker(paint.colours.fill, 0.18)
            sides.append(polygon_code([a, b, *far], paint, fill))
    outline = hull([*corners, *(Point(p.x + shift.x, p.y + shift.y) for p in corners)])
    return Form((*form.elements, *sides), outline, form.label)


class Kind(NamedTuple):
    """Kind of shape: its name in metadata, the proportions of its box, and how it is drawn.

    Args:
        type: type of an entity in metadata; some kinds share one.
        widest, tallest: largest and smallest width of its box per height; None = no limit.
    """

    type: str
    draw: Callable[[Box, Paint, float], Form]
    widest: float | None = None
    tallest: float | None = None


def _polygon(name: str) -> Callable[[Box, Paint, float], Form]:
    return lambda box, paint, radius: draw_polygon(name, box, paint)


def _solid(name: str) -> Callable[[Box, Paint, float], Form]:
    return lambda box, paint, radius: draw_solid(name, box, paint)


FLAT: Mapping[str, Kind] = {
    "circle": Kind("circle", lambda box, paint, radius: draw_ellipse(box, paint), 1, 1),
    "ellipse": Kind("ellipse", lambda box, paint, radius: draw_ellipse(box, paint), None, 1.25),
    "rectangle": Kind("rectangle", draw_rectangle, None, 1.25),
    "square": Kind("square", draw_rectangle, 1, 1),
    "cloud": Kind("cloud", lambda box, paint, radius: draw_cloud(box, paint), 2.2, 1.1),
    **{name: Kind("polygon", _polygon(name), 1.5, 0.9) for name in ("triangle", "pentagon", "octagon")},
    **{name: Kind("polygon", _polygon(name), 2, 1.1) for name in ("diamond", "trapezoid", "parallelogram", "hexagon")},
}
SOLID: Mapping[str, Kind] = {
    "3d-cylinder": Kind("3d-cylinder", lambda box, paint, radius: draw_cylinder(box, paint), 1.4, 0.7),
    **{name: Kind(name, _solid(name), 1.7, 1) for name in FRONTS},
}
KINDS: Mapping[str, Kind] = {**FLAT, **SOLID}
"""Name -> the 18 kinds of shapes."""
ROUNDABLE = ("rectangle", "square")
"""Kinds whose corners may be rounded."""


def fitted(box: Box, kind: Kind, share: float) -> Box:
    """Return the box of a shape in the middle of a cell, on whole pixels with even sides.

    Args:
        share: the part of the cell's width and height that it takes at most, in (0, 1].
    """
    cell = Box(math.ceil(box.x1), math.ceil(box.y1), math.floor(box.x2), math.floor(box.y2))
    width, height = cell.width * share, cell.height * share
    if kind.widest is not None:
        width = min(width, kind.widest * height)
    if kind.tallest is not None:
        height = min(height, width / kind.tallest)
    half_width, half_height = max(1, math.floor(width / 2)), max(1, math.floor(height / 2))
    if kind.widest == kind.tallest == 1:
        half_width = half_height = min(half_width, half_height)
    x, y = round(cell.centre.x), round(cell.centre.y)
    return Box(x - half_width, y - half_height, x + half_width, y + half_height)
