"""Drawing of a sketch: lines, marks and labels in black on white, as a textbook prints them.

No label touches a line, another label or the edge of the page. Names and unknowns are in italics, numbers upright, in
Pillow's own font, so that a figure does not depend on the fonts of the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vlmrl.errors import DataError
from vlmrl.tasks.geometry.drawn.problem import (
    SHADE,
    AngleLabel,
    Arc,
    Point,
    Sketch,
    between,
    direction,
    distance,
    towards,
)

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage


GAP = 0.18
"""Least distance of a label to any line or other label, besides the width of a line; in heights of the font."""
TURNS = (0, 12, -12, 25, -25, 40, -40, 58, -58, 80, -80, 105, -105, 130, -130)
"""Directions that are tried for a point's name, in degrees from the one away from the figure."""


class NoRoomError(DataError):
    """Error: a label has no free place; the problem is drawn again with other numbers."""


@dataclass(frozen=True)
class PlacedLabel:
    """Text with the rectangle that its ink fills, in pixels; y goes down."""

    text: str
    left: float
    top: float
    width: float
    height: float


class Ink:
    """Ink on a page: points along every line, and the rectangles of labels."""

    def __init__(self, width: float, height: float, gap: float) -> None:
        self.width, self.height, self.gap = width, height, gap
        self._lines: list[Any] = []
        self._points: Any = None
        self._taken: list[PlacedLabel] = []

    def add_path(self, points: Sequence[Point]) -> None:
        """Add a path of straight lines, in pixels."""
        import numpy as np

        for a, b in pairwise(points):
            count = max(2, int(math.dist(a, b)) + 2)
            self._lines.append(np.linspace(a, b, count))
        self._points = None

    def is_free(self, label: PlacedLabel) -> bool:
        """Return whether a label and the gap around it are on the page and touch nothing."""
        import numpy as np

        if self._points is None:
            self._points = np.concatenate(self._lines) if self._lines else np.zeros((0, 2))
        left, top = label.left - self.gap, label.top - self.gap
        right, bottom = label.left + label.width + self.gap, label.top + label.height + self.gap
        if left < 0 or top < 0 or right > self.width or bottom > self.height:
            return False
        x, y = self._points[:, 0], self._points[:, 1]
        if bool(((x > left) & (x < right) & (y > top) & (y < bottom)).any()):
            return False
        return not any(
            left < other.left + other.width + self.gap
            and right > other.left - self.gap
            and top < other.top + other.height + self.gap
            and bottom > other.top - self.gap
            for other in self._taken
        )

    def take(self, label: PlacedLabel) -> None:
        self._taken.append(label)


def place(text: str, size: tuple[float, float], centres: Iterable[Point], ink: Ink) -> PlacedLabel:
    """Return the label at the first centre that is free, and take that place. Raises: NoRoomError."""
    width, height = size
    for x, y in centres:
        label = PlacedLabel(text, x - width / 2, y - height / 2, width, height)
        if ink.is_free(label):
            ink.take(label)
            return label
    raise NoRoomError(f"the label {text} has no free place in the figure")


def point_centres(at: Point, away: Point | None, size: tuple[float, float], em: float) -> Iterator[Point]:
    """Yield centres for the name of a point, the nearest to the point and to the direction away from the figure first.

    Args:
        at, away: in pixels.
        size: of the text, in pixels.
        em: height of the font, in pixels.
    """
    start = math.atan2(at[1] - away[1], at[0] - away[0]) if away and away != at else -math.pi / 2
    for extra in (0.28, 0.45, 0.65):
        for turn in TURNS:
            yield _beside(at, start + math.radians(turn), size, extra * em)


def length_centres(a: Point, b: Point, away: Point | None, size: tuple[float, float], em: float) -> Iterator[Point]:
    """Yield centres for the length of a line, in pixels: beside its middle, outside of the figure first."""
    normal = math.atan2(b[1] - a[1], b[0] - a[0]) + math.pi / 2
    middle = ((a[0] + b[0]) / 2, (a[1] + b[1]) / 2)
    if away is not None and math.cos(normal) * (middle[0] - away[0]) + math.sin(normal) * (middle[1] - away[1]) < 0:
        normal += math.pi
    for side in (normal, normal + math.pi):
        for extra in (0.34, 0.5):
            for share in (0.5, 0.44, 0.56, 0.38, 0.62):
                at = (a[0] + share * (b[0] - a[0]), a[1] + share * (b[1] - a[1]))
                yield _beside(at, side, size, extra * em)


def angle_centres(label: AngleLabel, at: Point, arc: float, size: tuple[float, float], em: float) -> Iterator[Point]:
    """Yield centres for the size of an angle, in pixels: behind its arc, near the middle of the angle.

    Args:
        arc: radius of the arc, in pixels.
    """
    middle = label.start + label.size / 2
    for step in range(12):
        for turn in (0, 0.12, -0.12, 0.24, -0.24):
            towards = -math.radians(middle + turn * label.size)
            yield _beside(at, towards, size, arc + (0.2 + 0.22 * step) * em)


def _beside(at: Point, angle: float, size: tuple[float, float], gap: float) -> Point:
    """Return the centre of a rectangle of this size whose edge is `gap` away from a point, in a direction."""
    cos, sin = math.cos(angle), math.sin(angle)
    reach = min(
        size[0] / 2 / abs(cos) if abs(cos) > 1e-9 else math.inf, size[1] / 2 / abs(sin) if abs(sin) > 1e-9 else math.inf
    )
    return at[0] + cos * (gap + reach), at[1] + sin * (gap + reach)


RUNS = re.compile(r"[A-Za-z]+|[^A-Za-z]+")
SLANT = 0.2
"""Slant of letters: names of points and unknowns are italic in mathematics."""


@lru_cache(maxsize=4096)
def text_ink(text: str, em: int) -> PILImage:
    """Return the ink of a text, cut to its edges: 255 where it is black.

    Args:
        text: letters are italic.
        em: height of the font, in pixels.
    """
    from PIL import Image

    pieces = [_run_ink(run, em) for run in RUNS.findall(text)]
    image = Image.new("L", (sum(piece.width for piece in pieces), max(piece.height for piece in pieces)), 0)
    x = 0
    for piece in pieces:
        image.paste(255, (x, 0), piece)
        x += piece.width
    return image.crop(image.getbbox())


def _font(em: int) -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(em)


def _run_ink(run: str, em: int) -> PILImage:
    """Return the ink of letters, slanted, or of other signs, upright; 1.4 em high, on one base line."""
    from PIL import Image, ImageDraw

    font = _font(em)
    width = math.ceil(font.getlength(run)) + 1
    height = round(1.4 * em)
    slack = round(SLANT * height) if run[0].isalpha() else 0
    image = Image.new("L", (width + slack, height), 0)
    ImageDraw.Draw(image).text((0, 1.1 * em), run, fill=255, font=font, anchor="ls")
    if not slack:
        return image
    shift = SLANT * 1.1 * em
    image = image.transform(image.size, Image.Transform.AFFINE, (1, SLANT, -shift, 0, 1, 0), Image.Resampling.BICUBIC)
    return image.crop((0, 0, width + round(0.06 * em), height))


FINER = 4
"""Figures are drawn so many times larger, and then made smaller: smooth lines."""


@dataclass(frozen=True)
class PageStyle:
    """Sizes of a page, in pixels."""

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
