"""Labelled shapes of a diagram: random kinds, stacks, rounded corners, and words where they have room."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from vlmrl.tasks.vfig.drawn.arrows import Site
from vlmrl.tasks.vfig.drawn.code import escaped, tag, translated
from vlmrl.tasks.vfig.drawn.fills import DASHES, FILLS, Colours, Paint, palette
from vlmrl.tasks.vfig.drawn.plane import Box, Point
from vlmrl.tasks.vfig.drawn.shapes import FLAT, KINDS, ROUNDABLE, Form, fitted
from vlmrl.tasks.vfig.drawn.words import WORDS

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
        site: for its arrows.
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


def random_body(kind: str, cell: Box, share: float, rng: random.Random) -> Body:
    """Return a shape for a cell, with copies behind it or not, and with rounded corners or not.

    Args:
        share: the part of the cell's sides that it takes at most.
    """
    extent = fitted(cell, KINDS[kind], share)
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
    return tag("text", {**place, "font-family": label.font, "font-size": size, "fill": ink}, escaped(label.word))


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


def draw_shapes(cells: Sequence[Box], paints: Sequence[Paint], rng: random.Random) -> list[Drawn]:
    """Return the shapes of a diagram, one in each cell. Short words go to shapes with little room for a label."""
    shares = {kind: rng.uniform(0.8, 1) for kind in sorted(KINDS)}
    kinds = random_kinds(len(cells), rng)
    bodies = [random_body(kind, cell, shares[kind], rng) for kind, cell in zip(kinds, cells, strict=True)]
    forms = [KINDS[body.kind].draw(body.front, paint, body.radius) for body, paint in zip(bodies, paints, strict=True)]
    font, largest = rng.choice(FONTS), rng.randint(12, TEXT_SIZES[1])
    words = sorted(rng.sample(WORDS, len(cells)), key=len)
    by_room = sorted(range(len(cells)), key=lambda i: forms[i].label.width)
    labels = {i: Label(word, font, largest) for i, word in zip(by_room, words, strict=True)}
    return [draw_shape(i, bodies[i], forms[i], paints[i], labels[i]) for i in range(len(cells))]
