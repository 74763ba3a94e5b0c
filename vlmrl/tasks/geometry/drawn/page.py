"""Drawing of a sketch: lines, marks and labels in black on white, as a textbook prints them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vlmrl.tasks.geometry.drawn.labels import (
    GAP,
    Ink,
    NoRoomError,
    PlacedLabel,
    angle_centres,
    length_centres,
    place,
    point_centres,
)
from vlmrl.tasks.geometry.drawn.lettering import text_ink
from vlmrl.tasks.geometry.drawn.sketch import SHADE, Arc, Point, Sketch, between, direction, distance, towards

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

FINER = 4
"""Figures are drawn so many times larger, and then made smaller: smooth lines."""


@dataclass(frozen=True)
class PageStyle:
    """Sizes of a page, in pixels.

    Args:
        width, height: of the image.
    """

    width: int = 448
    height: int = 336

    @property
    def em(self) -> float:
        """Height of the font."""
        return max(11.0, self.width * 0.046)

    @property
    def line(self) -> float:
        """Width of a line."""
        return max(1.0, self.width * 0.0038)

    @property
    def margin(self) -> float:
        """Room around the lines, for labels."""
        return 1.75 * self.em


@dataclass
class Strokes:
    """Everything of a figure but its labels, in pixels; y goes down."""

    paths: list[list[Point]] = field(default_factory=list)
    dashed: list[list[Point]] = field(default_factory=list)
    filled: list[list[Point]] = field(default_factory=list)
    holes: list[list[Point]] = field(default_factory=list)
    dots: list[Point] = field(default_factory=list)
    shade: int = SHADE


@dataclass(frozen=True)
class Page:
    """Figure with its labels in place.

    Args:
        strokes: everything but the labels.
        labels: in the order of the sketch.
    """

    style: PageStyle
    strokes: Strokes
    labels: Sequence[PlacedLabel]

    def draw(self, *, lines: bool = True, labels: bool = True) -> PILImage:
        """Return the image, 8 bits of grey. `lines`, `labels`: whether these are drawn."""
        from PIL import Image, ImageDraw

        style = self.style
        image = Image.new("L", (style.width * FINER, style.height * FINER), 255)
        pen = ImageDraw.Draw(image)
        if lines:
            _draw_strokes(pen, self.strokes, style)
        if labels:
            for label in self.labels:
                ink = text_ink(label.text, round(style.em * FINER))
                at = (round(label.left * FINER), round(label.top * FINER))
                image.paste(0, at, ink)
        return image.resize((style.width, style.height), Image.Resampling.BOX)


def lay_out(sketch: Sketch, style: PageStyle) -> Page:
    """Return the page of a sketch, its labels on free places. Raises: NoRoomError for a label without one."""
    pixels = _scale(sketch, style)
    unit = distance(pixels((0.0, 0.0)), pixels((1.0, 0.0)))
    strokes = _strokes(sketch, style, pixels, unit)
    ink = Ink(style.width, style.height, GAP * style.em + style.line)
    for path in [
        *strokes.paths,
        *strokes.dashed,
        *([*outline, outline[0]] for outline in strokes.filled + strokes.holes),
    ]:
        ink.add_path(path)
    for x, y in strokes.dots:
        reach = 1.4 * style.line
        ink.add_path([(x - reach, y - reach), (x + reach, y + reach)])
        ink.add_path([(x - reach, y + reach), (x + reach, y - reach)])
    return Page(style, strokes, list(_labels(sketch, style, pixels, ink)))


def _scale(sketch: Sketch, style: PageStyle) -> Callable[[Point], Point]:
    """Return the function from the sketch's coordinates to pixels: as large as fits, in the middle.

    Raises: NoRoomError for a figure that is too flat to be printed well.
    """
    points = list(_extremes(sketch))
    low = (min(x for x, _ in points), min(y for _, y in points))
    high = (max(x for x, _ in points), max(y for _, y in points))
    margin = style.margin if sketch.names or sketch.lengths or sketch.angles else 0.5 * style.em
    room = (style.width - 2 * margin, style.height - 2 * margin)
    wide, tall = high[0] - low[0], high[1] - low[1]
    scale = min(room[0] / max(wide, 1e-9), room[1] / max(tall, 1e-9))
    if scale * tall < 0.42 * room[1] or scale * wide < 0.3 * room[0]:
        raise NoRoomError("the figure is too flat")
    left, top = (style.width - scale * wide) / 2, (style.height - scale * tall) / 2
    return lambda point: (left + scale * (point[0] - low[0]), top + scale * (high[1] - point[1]))


def _extremes(sketch: Sketch) -> Iterator[Point]:
    for a, b in [*sketch.lines, *sketch.dashed]:
        yield from (a, b)
    for (x, y), radius in [*sketch.circles, *sketch.holes]:
        yield from ((x - radius, y - radius), (x + radius, y + radius))
    for centre, radius, start, size in sketch.sectors:
        yield from (towards(centre, start + size * i / 24, radius) for i in range(25))
    for outline in sketch.filled:
        yield from outline


def _strokes(sketch: Sketch, style: PageStyle, pixels: Callable[[Point], Point], unit: float) -> Strokes:
    strokes = Strokes(
        paths=[[pixels(a), pixels(b)] for a, b in sketch.lines],
        dashed=[[pixels(a), pixels(b)] for a, b in sketch.dashed],
        filled=[[pixels(point) for point in outline] for outline in sketch.filled],
        holes=[_arc(pixels(centre), radius * unit, 0, 360) for centre, radius in sketch.holes],
        dots=[pixels(point) for point in sketch.dots],
        shade=sketch.shade,
    )
    strokes.paths += [_arc(pixels(centre), radius * unit, 0, 360) for centre, radius in sketch.circles]
    strokes.paths += [_arc(pixels(centre), r * unit, start, size) for centre, r, start, size in sketch.sectors]
    strokes.paths += [_arc(pixels(arc.at), arc_radius(arc, style), arc.start, arc.size) for arc in sketch.arcs]
    strokes.paths += [_right_angle(pixels(at), pixels(a), pixels(b), 0.55 * style.em) for at, a, b in sketch.squares]
    for a, b, count in sketch.ticks:
        strokes.paths += _ticks(pixels(a), pixels(b), count, style.em)
    for a, b, count in sketch.arrows:
        strokes.paths += _arrow_heads(pixels(a), pixels(b), count, style.em)
    return strokes


def arc_radius(arc: Arc, style: PageStyle) -> float:
    """Return the radius of the mark of an angle in pixels; narrow angles have larger ones."""
    return 0.5 * style.em * arc.radius * (1.0 if arc.size >= 50 else 1.35 if arc.size >= 30 else 1.8)


def _arc(centre: Point, radius: float, start: float, size: float) -> list[Point]:
    steps = max(8, int(radius * math.radians(size) / 2))
    angles = [-math.radians(start + size * i / steps) for i in range(steps + 1)]
    return [(centre[0] + radius * math.cos(angle), centre[1] + radius * math.sin(angle)) for angle in angles]


def _right_angle(at: Point, a: Point, b: Point, side: float) -> list[Point]:
    first, second = between(at, a, side / distance(at, a)), between(at, b, side / distance(at, b))
    return [first, (first[0] + second[0] - at[0], first[1] + second[1] - at[1]), second]


def _ticks(a: Point, b: Point, count: int, em: float) -> list[list[Point]]:
    along, across, middle = direction(a, b), direction(a, b) + 90, between(a, b)
    paths = []
    for number in range(count):
        at = towards(middle, along, (number - (count - 1) / 2) * 0.24 * em)
        paths.append([towards(at, across, 0.3 * em), towards(at, across, -0.3 * em)])
    return paths


def _arrow_heads(a: Point, b: Point, count: int, em: float) -> list[list[Point]]:
    along, middle = direction(a, b), between(a, b, 0.62)
    paths = []
    for number in range(count):
        tip = towards(middle, along, number * 0.3 * em)
        paths.append([towards(tip, along + 150, 0.42 * em), tip, towards(tip, along - 150, 0.42 * em)])
    return paths


def _labels(sketch: Sketch, style: PageStyle, pixels: Callable[[Point], Point], ink: Ink) -> Iterator[PlacedLabel]:
    """Yield the labels in place: angles first, which have the least freedom, then lengths, then names."""
    em = style.em
    for angle in sorted(sketch.angles, key=lambda one: one.size):
        mark = next(arc for arc in sketch.arcs if (arc.at, arc.start) == (angle.at, angle.start))
        centres = angle_centres(angle, pixels(angle.at), arc_radius(mark, style), _size(angle.text, em), em)
        yield place(angle.text, _size(angle.text, em), centres, ink)
    for line in sketch.lengths:
        away = pixels(line.away) if line.away else None
        centres = length_centres(pixels(line.a), pixels(line.b), away, _size(line.text, em), em)
        yield place(line.text, _size(line.text, em), centres, ink)
    for name in sketch.names:
        away = pixels(name.away) if name.away else None
        centres = point_centres(pixels(name.at), away, _size(name.text, em), em)
        yield place(name.text, _size(name.text, em), centres, ink)


def _size(text: str, em: float) -> tuple[float, float]:
    ink = text_ink(text, round(em * FINER))
    return ink.width / FINER, ink.height / FINER


def _draw_strokes(pen: Any, strokes: Strokes, style: PageStyle) -> None:
    width = max(1, round(style.line * FINER))
    for outline in strokes.filled:
        pen.polygon([_fine(point) for point in outline], fill=strokes.shade)
    for hole in strokes.holes:
        pen.polygon([_fine(point) for point in hole], fill=255)
    for path in [*strokes.filled, *strokes.holes]:
        _stroke(pen, [*path, path[0]], width)
    for path in strokes.paths:
        _stroke(pen, path, width)
    for path in strokes.dashed:
        for a, b in _dashes(path, 0.42 * style.em):
            _stroke(pen, [a, b], width)
    for point in strokes.dots:
        _disc(pen, _fine(point), 1.6 * width)


def _stroke(pen: Any, path: Sequence[Point], width: int) -> None:
    """Draw a path with round ends."""
    fine = [_fine(point) for point in path]
    pen.line(fine, fill=0, width=width, joint="curve")
    for end in (fine[0], fine[-1]):
        _disc(pen, end, width / 2)


def _disc(pen: Any, at: Point, radius: float) -> None:
    pen.ellipse([at[0] - radius, at[1] - radius, at[0] + radius, at[1] + radius], fill=0)


def _dashes(path: Sequence[Point], length: float) -> Iterator[tuple[Point, Point]]:
    """Yield dashes and leave gaps of the same length; the line begins and ends with a dash."""
    a, b = path
    count = max(1, round((distance(a, b) / length - 1) / 2)) * 2 + 1
    for number in range(0, count, 2):
        yield between(a, b, number / count), between(a, b, (number + 1) / count)


def _fine(point: Point) -> Point:
    return point[0] * FINER, point[1] * FINER
