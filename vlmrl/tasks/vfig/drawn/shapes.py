"""Shapes of drawn diagrams, 12 flat ones and 6 that look solid: outlines, labels, fills, borders, words, SVG code.

Points and boxes are in pixels, y downwards. Attributes of an element have a fixed order.
"""

from __future__ import annotations

import colorsys
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import quoteattr


class Point(NamedTuple):
    """Place in the plane, in pixels unless it is said otherwise."""

    x: float
    y: float


class Box(NamedTuple):
    """Box with sides parallel to the axes: left, top, right, bottom."""

    x1: float
    y1: float
    x2: float
    y2: float

    @property
    def width(self) -> float:
        return self.x2 - self.x1

    @property
    def height(self) -> float:
        return self.y2 - self.y1

    @property
    def centre(self) -> Point:
        return Point((self.x1 + self.x2) / 2, (self.y1 + self.y2) / 2)

    def grown(self, margin: float) -> Box:
        """Return the box with a margin on every side; a negative margin shrinks it."""
        return Box(self.x1 - margin, self.y1 - margin, self.x2 + margin, self.y2 + margin)

    def overlaps(self, other: Box) -> bool:
        """Return whether the boxes share an area; boxes that only touch do not."""
        return self.x1 < other.x2 and other.x1 < self.x2 and self.y1 < other.y2 and other.y1 < self.y2

    def contains(self, point: Point) -> bool:
        return self.x1 < point.x < self.x2 and self.y1 < point.y < self.y2

    def at(self, u: float, v: float) -> Point:
        """Return the point with these shares of width and height, to a tenth of a pixel."""
        return Point(round(self.x1 + u * self.width, 1), round(self.y1 + v * self.height, 1))


def box_of(points: Iterable[Point]) -> Box:
    """Return the smallest box around the points. Raises: ValueError without a point."""
    xs, ys = zip(*points, strict=True)
    return Box(min(xs), min(ys), max(xs), max(ys))


def hull(points: Iterable[Point]) -> tuple[Point, ...]:
    """Return the corners of the convex hull in order around it.

    Source: Andrew's monotone chain (1979).
    """
    ordered = sorted(set(points))

    def chain(sequence: Sequence[Point]) -> list[Point]:
        corners: list[Point] = []
        for point in sequence:
            while len(corners) > 1 and turn(corners[-2], corners[-1], point) <= 0:
                corners.pop()
            corners.append(point)
        return corners[:-1]

    return tuple(chain(ordered) + chain(ordered[::-1])) if len(ordered) > 1 else tuple(ordered)


def turn(a: Point, b: Point, c: Point) -> float:
    """Return twice the signed area of the triangle a, b, c, in square pixels."""
    return (b.x - a.x) * (c.y - a.y) - (b.y - a.y) * (c.x - a.x)


def segments_cross(a: Point, b: Point, c: Point, d: Point) -> bool:
    """Return whether the segments a-b and c-d cross at a point inside both."""
    return turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0


def leave(start: Point, towards: Point, outline: Sequence[Point]) -> Point:
    """Return where the ray from `start` through `towards` leaves the closed outline; `start` if it meets none of it."""
    dx, dy = towards.x - start.x, towards.y - start.y
    farthest = 0.0
    for a, b in zip(outline, (*outline[1:], outline[0]), strict=True):
        ex, ey = b.x - a.x, b.y - a.y
        determinant = dx * ey - dy * ex
        if determinant == 0:
            continue
        along_ray = ((a.x - start.x) * ey - (a.y - start.y) * ex) / determinant
        along_edge = ((a.x - start.x) * dy - (a.y - start.y) * dx) / determinant
        if 0 <= along_edge <= 1:
            farthest = max(farthest, along_ray)
    return Point(start.x + farthest * dx, start.y + farthest * dy)


def moved(start: Point, towards: Point, distance: float) -> Point:
    """Return the point at this distance in pixels from `start` towards another point."""
    length = math.dist(start, towards)
    if length == 0:
        return start
    return Point(
        start.x + (towards.x - start.x) * distance / length, start.y + (towards.y - start.y) * distance / length
    )


def number(value: float) -> str:
    """Return a number with at most one decimal, as SVG code writes it. Example: 3.04 -> 3; -0.02 -> 0; 2.55 -> 2.5."""
    text = f"{value:.1f}"
    return "0" if text == "-0.0" else text.removesuffix(".0")


def numbers(points: Iterable[Point]) -> str:
    """Return points as SVG code writes them. Example: `1,2 3.5,4`."""
    return " ".join(f"{number(x)},{number(y)}" for x, y in points)


NAMESPACE = "http://www.w3.org/2000/svg"


def tag(name: str, attributes: Mapping[str, str | float], *content: str) -> str:
    """Return the code of an element.

    Args:
        attributes: in the order in which they are written; numbers get at most one decimal.
        content: code of the children, or text without markup.
    """
    texts = {key: value if isinstance(value, str) else number(value) for key, value in attributes.items()}
    start = " ".join([name, *(f"{key}={quoteattr(text)}" for key, text in texts.items())])
    return f"<{start}>{''.join(content)}</{name}>" if content else f"<{start}/>"


def translated(elements: Iterable[str], by: Point) -> str:
    """Return the code of a group that draws elements at another place."""
    return tag("g", {"transform": f"translate({number(by.x)},{number(by.y)})"}, *elements)


def reference(identity: str) -> str:
    """Return a reference to the element with this id, as the value of an attribute."""
    return f"url(#{identity})"


_TEXT = """
    Map Key Sum Log Fit Mix Add Cut Set Run Top Hub Net Bus Node Pool Sort Join Copy Load Save Read Send Test
    Task Step Data Base Loop Root Leaf Edge Item List Mask Math Menu Mesh Page Path Peak Rule Scan Seed Sink
    Unit User View Input Model Layer Block Stage State Event Store Cache Queue Stack Index Graph Token Batch
    Query Value Score Merge Split Parse Train Infer Check Align Clean Crawl Track Watch Write Frame Image
    Label Pixel Prior Source Target Filter Weight Output Client Server Worker Router Sensor Signal Buffer
    Kernel Vector Matrix Select Reduce Expand Update Verify Report Policy Reward Teacher Student Planner
    Monitor Gateway Encoder Decoder Sampler Adapter Combine Predict Compare Archive Project Ranking Feature
"""
WORDS = tuple(_TEXT.split())
"""Words of 3 to 8 letters. None is part of another, so that a match of parts of labels confuses no two of them."""


DASHES: Mapping[str, tuple[float, ...]] = {
    "solid": (),
    "dashed": (4, 2.5),
    "dotted": (1, 1.5),
    "dash-dot": (5, 2, 1, 2),
}
"""Border style -> lengths of strokes and gaps by turns, in widths of the border."""
TILE = 8.0
"""Width and height of the tile that a pattern repeats, in pixels."""
LIGHT_INK, DARK_INK = "#ffffff", "#1f1f1f"


def mixed(colour: str, other: str, share: float) -> str:
    """Return a mixture of two colours `#rrggbb`; `share` in [0, 1] is that of the second."""
    pairs = ((int(colour[i : i + 2], 16), int(other[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def lighter(colour: str, share: float) -> str:
    return mixed(colour, "#ffffff", share)


def darker(colour: str, share: float) -> str:
    return mixed(colour, "#000000", share)


def luma(colour: str) -> float:
    """Return the brightness of a colour `#rrggbb`, in [0, 1].

    Source: ITU-R BT.601.
    """
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 0.299 * r + 0.587 * g + 0.114 * b


class Colours(NamedTuple):
    """Colours of a shape as `#rrggbb`: its fill, its second fill in gradients and patterns, its border, its label."""

    fill: str
    second: str
    stroke: str
    ink: str


def of_hue(hue: float, saturation: float, lightness: float) -> str:
    """Return a colour `#rrggbb` from hue, saturation and lightness in [0, 1]."""
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue % 1, lightness, saturation))


def colours_of(fill: str, stroke: str) -> Colours:
    """Return the colours of a shape with this fill and border, chosen so that the label is legible on the fill."""
    if luma(fill) > 0.55:
        return Colours(fill, darker(fill, 0.16), stroke, DARK_INK)
    return Colours(fill, lighter(fill, 0.16), stroke, LIGHT_INK)


def palette(rng: random.Random) -> list[Colours]:
    """Return 2 to 4 colour schemes of a diagram: pale, strong, or grey with dark borders."""
    first, count = rng.random(), rng.randint(2, 4)
    hues = [first + i / count + rng.uniform(-0.06, 0.06) for i in range(count)]
    kind = rng.choice(["pale", "pale", "strong", "grey"])
    schemes = []
    for i, hue in enumerate(hues):
        saturation = rng.uniform(0.5, 0.95)
        if kind == "pale":
            scheme = of_hue(hue, saturation, rng.uniform(0.82, 0.9)), of_hue(hue, saturation, 0.32)
        elif kind == "strong":
            scheme = of_hue(hue, 0.7 * saturation, rng.uniform(0.3, 0.62)), of_hue(hue, 0.6, 0.18)
        else:
            scheme = of_hue(hue, 0.1, 1 - 0.08 * i), "#222222"
        schemes.append(colours_of(*scheme))
    return schemes


@dataclass(frozen=True)
class Paint:
    """Looks of a shape.

    Args:
        style: fill style, from `FILLS`.
        border: border style, from `DASHES`.
        width: width of the border in pixels.
        identity: id of its gradient or pattern.
    """

    colours: Colours
    style: str
    border: str
    width: float
    identity: str

    def attributes(self, fill: str = "") -> dict[str, str | float]:
        """Return the presentation attributes of an element of the shape; of its front unless it has another fill."""
        front = self.colours.fill if self.style == "solid" else reference(self.identity)
        dashes = " ".join(f"{length * self.width:g}" for length in DASHES[self.border])
        attributes: dict[str, str | float] = {
            "fill": fill or front,
            "stroke": self.colours.stroke,
            "stroke-width": self.width,
        }
        return {**attributes, "stroke-dasharray": dashes} if dashes else attributes

    def definition(self) -> str:
        """Return the code of the gradient or pattern; empty for a solid fill."""
        draw = FILLS[self.style]
        return draw(self) if draw else ""


def _gradient(paint: Paint, name: str, place: Mapping[str, str | float]) -> str:
    colours = enumerate((paint.colours.fill, paint.colours.second))
    stops = (tag("stop", {"offset": i, "stop-color": colour}) for i, colour in colours)
    return tag(name, {"id": paint.identity, **place}, *stops)


def _pattern(paint: Paint, *marks: str) -> str:
    size: dict[str, str | float] = {"width": TILE, "height": TILE}
    ground = tag("rect", {**size, "fill": paint.colours.fill})
    return tag("pattern", {"id": paint.identity, **size, "patternUnits": "userSpaceOnUse"}, ground, *marks)


def _stroke(paint: Paint, x1: float, y1: float, x2: float, y2: float) -> str:
    return tag("line", {"x1": x1, "y1": y1, "x2": x2, "y2": y2, "stroke": paint.colours.second})


FILLS: Mapping[str, Callable[[Paint], str] | None] = {
    "solid": None,
    "gradient-linear": lambda paint: _gradient(paint, "linearGradient", {"x1": 0, "y1": 0, "x2": 0, "y2": 1}),
    "gradient-radial": lambda paint: _gradient(paint, "radialGradient", {"cx": "0.5", "cy": "0.5", "r": "0.7"}),
    "dots": lambda paint: _pattern(
        paint, tag("circle", {"cx": TILE / 2, "cy": TILE / 2, "r": 1.5, "fill": paint.colours.second})
    ),
    "hatching": lambda paint: _pattern(paint, _stroke(paint, 0, TILE, TILE, 0)),
    "crosshatch": lambda paint: _pattern(paint, _stroke(paint, 0, TILE, TILE, 0), _stroke(paint, 0, 0, TILE, TILE)),
    "horizontal-lines": lambda paint: _pattern(paint, _stroke(paint, 0, TILE / 2, TILE, TILE / 2)),
}
"""Fill style -> code of its definition."""


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


def _named(draw: Callable[[str, Box, Paint], Form], name: str) -> Callable[[Box, Paint, float], Form]:
    return lambda box, paint, radius: draw(name, box, paint)


FLAT: Mapping[str, Kind] = {
    "circle": Kind("circle", lambda box, paint, radius: draw_ellipse(box, paint), 1, 1),
    "ellipse": Kind("ellipse", lambda box, paint, radius: draw_ellipse(box, paint), None, 1.25),
    "rectangle": Kind("rectangle", draw_rectangle, None, 1.25),
    "square": Kind("square", draw_rectangle, 1, 1),
    "cloud": Kind("cloud", lambda box, paint, radius: draw_cloud(box, paint), 2.2, 1.1),
    **{name: Kind("polygon", _named(draw_polygon, name), 1.5, 0.9) for name in ("triangle", "pentagon", "octagon")},
    **{
        name: Kind("polygon", _named(draw_polygon, name), 2, 1.1)
        for name in ("diamond", "trapezoid", "parallelogram", "hexagon")
    },
}
SOLID: Mapping[str, Kind] = {
    "3d-cylinder": Kind("3d-cylinder", lambda box, paint, radius: draw_cylinder(box, paint), 1.4, 0.7),
    **{name: Kind(name, _named(draw_solid, name), 1.7, 1) for name in FRONTS},
}
KINDS: Mapping[str, Kind] = {**FLAT, **SOLID}
"""Name -> the 18 kinds of shapes."""
ROUNDABLE = ("rectangle", "square")
"""Kinds whose corners may be rounded."""


def fitted(box: Box, kind: Kind, share: float) -> Box:
    """Return the box of a shape in the middle of a slot, on whole pixels with even sides.

    Args:
        share: the part of the slot's width and height that it takes at most, in (0, 1].
    """
    slot = Box(math.ceil(box.x1), math.ceil(box.y1), math.floor(box.x2), math.floor(box.y2))
    width, height = slot.width * share, slot.height * share
    if kind.widest is not None:
        width = min(width, kind.widest * height)
    if kind.tallest is not None:
        height = min(height, width / kind.tallest)
    half_width, half_height = max(1, math.floor(width / 2)), max(1, math.floor(height / 2))
    if kind.widest == kind.tallest == 1:
        half_width = half_height = min(half_width, half_height)
    x, y = round(slot.centre.x), round(slot.centre.y)
    return Box(x - half_width, y - half_height, x + half_width, y + half_height)
