"""Drawn diagrams of labelled shapes and arrows: SVG code, and metadata that states what is in it; simple figures.

Shapes of a diagram are random kinds, stacks, rounded corners, with words where they have room. A simple figure is very
short code in one canonical form, for models that work on single characters: each shape stands alone in the middle of a
slot, shapes go from top left to bottom right, and all numbers are multiples of `GRID`. There are no labels, borders or
definitions beside the head of an arrow.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from vlmrl.errors import DataError
from vlmrl.tasks.vfig.drawn.layouts import Arrow, ArrowLook, Site, arrange, arrow_code, connect, head_code
from vlmrl.tasks.vfig.drawn.shapes import (
    DASHES,
    FILLS,
    FLAT,
    KINDS,
    NAMESPACE,
    ROUNDABLE,
    WORDS,
    Box,
    Colours,
    Form,
    Paint,
    Point,
    fitted,
    moved,
    numbers,
    palette,
    tag,
    translated,
)

STACKED_CHANCE = 0.15
"""Probability that a flat shape has copies behind it. The depth of the other shapes already looks like a stack."""
MOST_IN_STACK = 4
"""Largest number of shapes in a stack, with the front one."""
STACK_STEP = 0.07
"""Distance of a copy from the next as a share of the shorter side of their box."""
ROUNDED_CHANCE = 0.6
"""Probability that a rectangle or square has rounded corners."""
ROUNDINGS = (0.12, 0.25)
"""Smallest and largest radius of rounded corners, as shares of the shorter side."""
FONTS = ("Arial", "Helvetica", "Verdana", "Tahoma", "Trebuchet MS", "Times New Roman", "Georgia", "Courier New")
TEXT_SIZES = (7, 18)
"""Smallest and largest size of a font, in pixels."""
LETTER = 0.66
"""Width of a letter per font size, an upper bound of the mean of words in these fonts and their substitutes."""
BASELINE = 0.35
"""Distance of a text's baseline from the middle of its letters, per font size."""


class Body(NamedTuple):
    """Shape before it is painted.

    Args:
        kind: its name in `KINDS`.
        extent: the box of the shape and its copies.
        front: the box of the shape itself.
        steps: where the copies behind it are, from the shape; the farthest is the last.
        radius: of its corners, in pixels.
    """

    kind: str
    extent: Box
    front: Box
    steps: tuple[Point, ...]
    radius: int


class Drawn(NamedTuple):
    """Shape of a diagram.

    Args:
        code: of the shape and its label.
        entity: its metadata.
    """

    code: str
    site: Site
    entity: dict[str, Any]


class Label(NamedTuple):
    """Word, its font, and the largest size of the font in pixels."""

    word: str
    font: str
    largest: int


def random_kinds(count: int, rng: random.Random) -> list[str]:
    """Return the kind of each shape: 2 or 3 different ones in a diagram that has as many shapes."""
    kinds = rng.sample(sorted(KINDS), rng.randint(2, 3))
    chosen = [*kinds[:count], *(rng.choice(kinds) for _ in range(count - len(kinds)))]
    rng.shuffle(chosen)
    return chosen


def random_paints(count: int, rng: random.Random) -> list[Paint]:
    """Return the looks of each shape, with colours of one palette."""
    colours: list[Colours] = palette(rng)
    styles, borders = sorted(FILLS), sorted(DASHES)
    return [
        Paint(rng.choice(colours), rng.choice(styles), rng.choice(borders), rng.choice((1, 1.5, 2, 3)), f"fill_{i}")
        for i in range(count)
    ]


def random_body(kind: str, slot: Box, share: float, rng: random.Random) -> Body:
    """Return a shape for a slot, with copies behind it or not, and with rounded corners or not.

    Args:
        share: the part of the slot's sides that it takes at most.
    """
    extent = fitted(slot, KINDS[kind], share)
    copies = rng.randint(1, MOST_IN_STACK - 1) if kind in FLAT and rng.random() < STACKED_CHANCE else 0
    step = max(2, round(STACK_STEP * min(extent.width, extent.height)))
    front = Box(extent.x1, extent.y1 + copies * step, extent.x2 - copies * step, extent.y2)
    radius = 0
    if kind in ROUNDABLE and rng.random() < ROUNDED_CHANCE:
        radius = max(1, round(rng.uniform(*ROUNDINGS) * min(front.width, front.height)))
    return Body(kind, extent, front, tuple(Point(i * step, -i * step) for i in range(1, copies + 1)), radius)


def label_code(label: Label, room: Box, ink: str) -> str:
    """Return the code of a label in the middle of its room, in a size that fits."""
    fitting = min(room.width / (LETTER * len(label.word)), 0.8 * room.height)
    size = max(TEXT_SIZES[0], min(label.largest, math.floor(fitting)))
    x, y = room.centre
    place: dict[str, str | float] = {"x": x, "y": y + BASELINE * size, "text-anchor": "middle"}
    return tag("text", {**place, "font-family": label.font, "font-size": size, "fill": ink}, escape(label.word))


def draw_shape(index: int, body: Body, form: Form, paint: Paint, label: Label) -> Drawn:
    """Return a shape with its label. A shape of several elements is a group that holds its label, too."""
    identity = f"shape_{index}"
    text = label_code(label, form.label, paint.colours.ink)
    copies = [translated(form.elements, step) for step in reversed(body.steps)]
    if copies or len(form.elements) > 1:
        code = tag("g", {"id": identity}, "\n", "\n".join([*copies, *form.elements, text]), "\n")
    else:
        name, rest = "".join(form.elements).split(" ", 1)
        code = f'{name} id="{identity}" {rest}\n{text}'
    places = [Point(0, 0), *body.steps]
    outlines = tuple(tuple(Point(x + step.x, y + step.y) for x, y in form.outline) for step in places)
    entity = {
        "id": identity,
        "type": KINDS[body.kind].type,
        "bounds": [int(side) for side in body.front],
        "label": label.word,
        "font": label.font,
        "fillStyle": paint.style,
        "fillColor": paint.colours.fill,
        "strokeColor": paint.colours.stroke,
        "strokeWidth": paint.width,
        "borderStyle": paint.border,
        "stacked": len(places),
        "shape": body.kind,
        "rounded": body.radius > 0,
    }
    return Drawn(code, Site(body.front.centre, outlines, body.extent), entity)


def draw_shapes(slots: Sequence[Box], paints: Sequence[Paint], rng: random.Random) -> list[Drawn]:
    """Return the shapes of a diagram, one in each slot. Short words go to shapes with little room for a label."""
    shares = {kind: rng.uniform(0.8, 1) for kind in sorted(KINDS)}
    kinds = random_kinds(len(slots), rng)
    bodies = [random_body(kind, slot, shares[kind], rng) for kind, slot in zip(kinds, slots, strict=True)]
    forms = [KINDS[body.kind].draw(body.front, paint, body.radius) for body, paint in zip(bodies, paints, strict=True)]
    font, largest = rng.choice(FONTS), rng.randint(12, TEXT_SIZES[1])
    words = sorted(rng.sample(WORDS, len(slots)), key=len)
    by_room = sorted(range(len(slots)), key=lambda i: forms[i].label.width)
    labels = {i: Label(word, font, largest) for i, word in zip(by_room, words, strict=True)}
    return [draw_shape(i, bodies[i], forms[i], paints[i], labels[i]) for i in range(len(slots))]


GRID = 2
"""All coordinates and sizes are multiples of it, in pixels."""
SLOT = 16
"""Side of a slot in pixels. Canvases are whole slots."""
HALVES = (4, 6)
"""Half widths and half heights of shapes in pixels."""
FORMS = ("circle", "rect", "ellipse", "triangle")
COLOURS = ("red", "orange", "green", "cyan", "blue", "purple")
SHORTEST = 12
"""Shortest arrow in pixels."""
CLEAR_ENDS, CLEARANCE = 2, 1
"""An arrow keeps this distance from all shapes, except for this length at its ends, both in pixels."""
HEAD = tag("marker", {"id": "a", "refX": 3, "refY": 1.5, "orient": "auto"}, tag("path", {"d": "M0 0L3 1.5 0 3"}))
"""Code of the head of an arrow; its tip is at the end of the line."""
LOOK = ArrowLook("black", 2, "solid", "a")
LINE: Mapping[str, str | float] = {"stroke": LOOK.colour, "stroke-width": LOOK.width, "marker-end": "url(#a)"}
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
    """Return a shape in the middle of the slot with this corner."""
    form, colour = rng.choice(FORMS), rng.choice(COLOURS)
    across, down = rng.choice(HALVES), rng.choice(HALVES)
    if form == "circle":
        down = across
    elif form == "ellipse":
        down = sum(HALVES) - across
    x, y = left + SLOT // 2, top + SLOT // 2
    return SimpleShape(y - down, x - across, x + across, y + down, form, colour)


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
        canvas: width and height in pixels, multiples of `SLOT`.
        has_arrow: whether an arrow joins two of them; needs two shapes.
    Raises: DataError if the shapes do not fit.
    """
    message = f"{count} simple shapes do not fit on {canvas[0]} x {canvas[1]} pixels"
    slots = list(product(range(0, canvas[1], SLOT), range(0, canvas[0], SLOT)))
    if count > len(slots):
        raise DataError(message, hint="choose larger canvases, or fewer shapes")
    for _ in range(MOST_TRIES):
        shapes = [random_shape(left, top, rng) for top, left in sorted(rng.sample(slots, count))]
        arrow = random_arrow(shapes, rng) if has_arrow else None
        if arrow or not has_arrow:
            break
    else:
        raise DataError(f"{message} with an arrow", hint="choose larger canvases, or fewer shapes")
    code = [shape.code() for shape in shapes]
    entities = {f"shape_{i}": shape_entity(f"shape_{i}", shape) for i, shape in enumerate(shapes)}
    if arrow:
        code = [HEAD, *code, arrow.code()]
        entities["arrow_0"] = arrow_entity("arrow_0", arrow, LOOK)
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


SIZES = ((640, 480), (800, 600), (600, 600), (900, 500), (560, 700))
SIMPLE_SIZES = ((64, 64),)
SIDES = (32, 4096)
"""Smallest and largest width or height of a canvas, in pixels."""
MARGIN = 0.05
"""Distance of shapes from the edge of the canvas, as a share of its shorter side."""
ARROW_MARGIN = 3.0
"""Distance of arrows from the edge of the canvas, in pixels."""
ARROW_COLOURS = ("#222222", "#555555", "#1f4e9c", "#a33327", "#2e6b3a")
ARROW_WIDTHS = (1.5, 2, 2.5)
ARROW_DASHES = ("solid", "solid", "solid", "dashed", "dotted")


@dataclass(frozen=True)
class DrawnSettings:
    """Settings of drawn figures.

    Args:
        simple: whether to draw simple figures (see `simple.py`): few flat shapes, at most one arrow, very short code.
        sizes: widths and heights of canvases in pixels, of which each figure takes one; empty = the usual ones. Those
            of simple figures are multiples of 16.
        fewest, most: smallest and largest number of shapes; None = 3 to 12, or 1 to 3 of simple figures.
        arrow_chance: probability that a simple figure of several shapes has an arrow.
    Raises: DataError for impossible settings.
    """

    simple: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    fewest: int | None = None
    most: int | None = None
    arrow_chance: float = 0.5

    def __post_init__(self) -> None:
        fewest, most = self.range
        if not 1 <= fewest <= most <= len(WORDS):
            hint = f"1 <= fewest <= most <= {len(WORDS)}"
            raise DataError(f"figures of {fewest} to {most} shapes cannot be drawn", hint=hint)
        if not 0 <= self.arrow_chance <= 1:
            raise DataError(f"an arrow_chance of {self.arrow_chance} is not a probability", hint="choose 0 to 1")
        unit = SLOT if self.simple else 1
        for size in self.sizes:
            if len(size) != 2 or any(not SIDES[0] <= side <= SIDES[1] or side % unit for side in size):
                hint = f"a width and a height from {SIDES[0]} to {SIDES[1]} pixels"
                hint += f", multiples of {SLOT}" if self.simple else ""
                raise DataError(f"{size} is not a size of a canvas", hint=hint)

    @property
    def range(self) -> tuple[int, int]:
        """Smallest and largest number of shapes. A usual bound gives way to one that is set."""
        usual_fewest, usual_most = (1, 3) if self.simple else (3, 12)
        fewest = self.fewest if self.fewest is not None else min(usual_fewest, self.most or usual_fewest)
        return fewest, self.most if self.most is not None else max(usual_most, fewest)


@dataclass(frozen=True)
class DrawnFigure:
    """Drawn figure.

    Args:
        metadata: `entities`: id -> shape or arrow; `layouts`: names of its layouts, none for simple figures.
        width, height: size of the canvas in pixels.
    """

    svg: str
    metadata: dict[str, Any]
    width: int
    height: int


def draw_figure(rng: random.Random, settings: DrawnSettings) -> DrawnFigure:
    """Draw a random figure; the same random numbers give the same figure.

    Raises: DataError if the shapes do not fit on the canvas.
    """
    width, height = rng.choice(settings.sizes or (SIMPLE_SIZES if settings.simple else SIZES))
    count = rng.randint(*settings.range)
    if settings.simple:
        has_arrow = rng.random() < settings.arrow_chance and count > 1
        svg, entities = draw_simple((width, height), count, has_arrow, rng)
        return DrawnFigure(svg, {"entities": entities, "layouts": []}, width, height)
    canvas = Box(0, 0, width, height)
    placed = arrange(count, canvas.grown(-MARGIN * min(width, height)), rng)
    paints = random_paints(count, rng)
    shapes = draw_shapes(placed.slots, paints, rng)
    arrows = connect([shape.site for shape in shapes], canvas.grown(-ARROW_MARGIN), rng)
    looks = arrow_looks(len(arrows), rng)
    heads = {look.head: look.colour for look in looks}
    definitions = [code for paint in paints if (code := paint.definition())]
    definitions += [head_code(identity, colour) for identity, colour in heads.items()]
    entities = {shape.entity["id"]: shape.entity for shape in shapes}
    lines = [tag("defs", {}, "\n", "\n".join(definitions), "\n")] if definitions else []
    lines += [shape.code for shape in shapes]
    for i, (arrow, look) in enumerate(zip(arrows, looks, strict=True)):
        lines.append(arrow_code(f"arrow_{i}", arrow, look))
        entities[f"arrow_{i}"] = arrow_entity(f"arrow_{i}", arrow, look)
    root: dict[str, str | float] = {"xmlns": NAMESPACE, "width": width, "height": height}
    svg = tag("svg", {**root, "viewBox": f"0 0 {width} {height}"}, "\n", "\n".join(lines), "\n")
    return DrawnFigure(svg, {"entities": entities, "layouts": list(placed.layouts)}, width, height)


def arrow_looks(count: int, rng: random.Random) -> list[ArrowLook]:
    """Return the looks of each arrow: one width, 1 or 2 colours, and one style of line or a random one each."""
    width = rng.choice(ARROW_WIDTHS)
    colours = rng.sample(ARROW_COLOURS, rng.choice((1, 1, 2)))
    dashes = ARROW_DASHES if rng.random() < 0.3 else (rng.choice(ARROW_DASHES),)
    chosen = [rng.randrange(len(colours)) for _ in range(count)]
    return [ArrowLook(colours[i], width, rng.choice(dashes), f"head_{i}") for i in chosen]


def arrow_entity(identity: str, arrow: Arrow | SimpleArrow, look: ArrowLook) -> dict[str, Any]:
    """Return the metadata of an arrow."""
    return {
        "id": identity,
        "type": "arrow",
        "from": f"shape_{arrow.source}",
        "to": f"shape_{arrow.target}",
        "color": look.colour,
        "width": look.width,
        "style": "curved" if isinstance(arrow, Arrow) and arrow.is_curved else "straight",
        "dash": look.dash,
    }
