"""Drawn diagrams of labelled shapes and arrows: SVG code, and metadata that states what is in it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from vlmrl.errors import DataError
from vlmrl.tasks.vfig.drawn.arrows import Arrow, ArrowLook, arrow_code, connect, head_code
from vlmrl.tasks.vfig.drawn.code import NAMESPACE, tag
from vlmrl.tasks.vfig.drawn.labelled import draw_shapes, random_paints
from vlmrl.tasks.vfig.drawn.layouts import arrange
from vlmrl.tasks.vfig.drawn.plane import Box
from vlmrl.tasks.vfig.drawn.simple import CELL, draw_simple
from vlmrl.tasks.vfig.drawn.words import WORDS

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
            raise DataError(f"an arrow_chance of {self.arrow_chance} is no probability", hint="choose 0 to 1")
        unit = CELL if self.simple else 1
        for size in self.sizes:
            if len(size) != 2 or any(not SIDES[0] <= side <= SIDES[1] or side % unit for side in size):
                hint = f"a width and a height from {SIDES[0]} to {SIDES[1]} pixels"
                hint += f", multiples of {CELL}" if self.simple else ""
                raise DataError(f"{size} is no size of a canvas", hint=hint)

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
        svg: its code.
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
    shapes = draw_shapes(placed.cells, paints, rng)
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


def arrow_entity(identity: str, arrow: Arrow, look: ArrowLook) -> dict[str, Any]:
    """Return the metadata of an arrow."""
    return {
        "id": identity,
        "type": "arrow",
        "from": f"shape_{arrow.source}",
        "to": f"shape_{arrow.target}",
        "color": look.colour,
        "width": look.width,
        "style": "curved" if arrow.is_curved else "straight",
        "dash": look.dash,
    }
