"""Counted work of cairosvg: of its own functions, and of what it lets cairo draw.

cairosvg has no hooks, and its surfaces make others (patterns, masks). So the interpreter reports each function that it
calls; those that do much at once are counted by their arguments.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, NamedTuple

import cairosvg.bounding_box
import cairosvg.colors
import cairosvg.css
import cairosvg.helpers
import cairosvg.parser
import cairosvg.path
import cairosvg.surface
import cairosvg.text
from cairocffi import Context, Gradient, ImageSurface, SolidPattern, constants

from vlmrl.svg.draw import CURVE, DASH, MASKED, PLAIN, SHADED, fill_steps
from vlmrl.svg.parse import ELEMENT, GLYPH, LETTER, POINT, STOP, Work

CALL, CSS, FACE, FONT, SURFACE = 10, 16, 50_000, 1_000, 20_000
"""Steps of work of a function, of a character of CSS, of a new font, of a font at another size, and of the surface of a
pattern or a mask."""
TRIED, COPIED, CROSSED = 0.02, 0.002, 8
"""Steps of work of two characters of a text that patterns search from each of its places, of a character that is
copied, and of two lines of which one is cut with the other."""
WRITTEN = 0.5
"""Steps of work of a pixel of the PNG file."""
Cost = Callable[[Mapping[str, Any]], object]


class _Outline(NamedTuple):
    """Path of a context: its straight pieces, the rows that they cross, its length in pixels, its curves."""

    pieces: float
    lines: float
    length: float
    is_upright: bool


@contextmanager
def counted(work: Work, width: int, height: int) -> Iterator[None]:
    """Count what cairosvg does in this thread for a picture of that size.

    Raises: CodeRefused (`limit`), out of the function that was one too many.
    """
    before = sys.getprofile()
    sys.setprofile(_Counter(work, width, height))
    try:
        yield
    finally:
        sys.setprofile(before)


class _Counter:
    """Function that the interpreter calls with each call. `clips`: context -> lines of its clip paths, one per save."""

    def __init__(self, work: Work, width: int, height: int) -> None:
        self.spend, self.width, self.height = work.spend, width, height
        self.area, self.tile, self.followed = width * height, 0.0, 0.0
        self.clips: dict[int, list[float]] = {}
        self.faces: set[tuple[object, ...]] = set()
        self.spend(WRITTEN * self.area)
        parse, helpers, text = cairosvg.parser, cairosvg.helpers, cairosvg.text
        costs: dict[Any, Cost] = {
            parse.Node.__init__: self.node,
            parse.handle_white_spaces: lambda v: self.spend(len(v["string"] or "") / 2),
            cairosvg.css.parse_declarations: lambda v: self.spend(CSS * len(v["input"])),
            helpers.normalize: lambda v: self.spend(2 * len(v["string"])),
            helpers.point: lambda v: self.spend(2 * POINT + COPIED * len(v["string"])),
            helpers.paint: lambda v: self.search(v["value"]),
            helpers.clip_rect: lambda v: self.search(v["string"]),
            helpers.transform: lambda v: self.search(v["transform_string"]),
            helpers.pop_rotation: lambda v: self.spend(COPIED * len(v["node"].text) * len(v["rotate"])),
            cairosvg.colors.color: lambda v: self.search(v["string"]),
            text.text: self.text,
            text.point_following_path: lambda v: self.spend(len(v["path"])),
            cairosvg.surface.Surface._create_surface: self.surface,
            Gradient.add_color_stop_rgba: lambda v: self.spend(STOP),
            Context.__init__: lambda v: self.clips.update({id(v["self"]): [0.0]}),
            Context.save: lambda v: self.clips[id(v["self"])].append(self.clips[id(v["self"])][-1]),
            Context.restore: lambda v: self.clips[id(v["self"])].pop(),
            Context.clip: self.clip,
            Context.arc: self.arc,
            Context.arc_negative: self.arc,
            Context.copy_path: self.copy,
            Context.copy_path_flat: self.copy,
            Context.append_path: lambda v: self.spend(POINT * len(v["path"])),
            Context.select_font_face: self.face,
            Context.text_extents: lambda v: self.spend(GLYPH * (1 + len(v["text"]))),
            Context.text_path: self.glyph,
            Context.show_text: self.glyph,
            Context.fill: self.fill,
            Context.fill_preserve: self.fill,
            Context.stroke: self.stroke,
            Context.push_group: lambda v: self.spend(ELEMENT + PLAIN * self.area),
            Context.paint_with_alpha: lambda v: self.spend(SHADED * self.area),
            Context.mask_surface: lambda v: self.spend(MASKED * self.area),
        }
        self.costs: dict[CodeType, Cost] = {function.__code__: cost for function, cost in costs.items()}

    def __call__(self, frame: FrameType, kind: str, arg: Any) -> None:
        if kind == "call":
            cost = self.costs.get(frame.f_code)
            if not frame.f_code.co_name.endswith("comp>"):  # later interpreters do not report those
                self.spend(CALL)
            if cost is not None:
                cost(frame.f_locals)
        elif kind == "c_call" and type(text := getattr(arg, "__self__", None)) is str:
            self.spend(CALL + COPIED * len(text))

    def search(self, text: str | None) -> None:
        self.spend(TRIED * len(text or "") ** 2)

    def node(self, values: Mapping[str, Any]) -> None:
        style = values["element"].etree_element.get("style", "")
        self.spend(ELEMENT + CSS * len(style) + len(values["parent"] or ()))

    def surface(self, values: Mapping[str, Any]) -> None:
        self.tile = max(self.tile, values["width"] * values["height"])
        self.spend(SURFACE)

    def text(self, values: Mapping[str, Any]) -> None:
        node = values["node"]
        places = sum(len(node.get(name, "")) for name in ("x", "y", "dx", "dy", "rotate"))
        size = values["surface"].font_size * _scale(values["surface"].context)
        self.spend(FONT + len(node.text) * COPIED * places + LETTER * places + max(0.0, size))

    def face(self, values: Mapping[str, Any]) -> None:
        face = values["family"], values["slant"], values["weight"]
        if face not in self.faces:
            self.faces.add(face)
            self.spend(FACE)

    def glyph(self, values: Mapping[str, Any]) -> None:
        a, b, c, d = values["self"].get_matrix().as_tuple()[:4]
        m = values["self"].get_font_matrix().as_tuple()
        size = math.sqrt(abs((a * d - b * c) * (m[0] * m[3] - m[1] * m[2])))
        self.spend((GLYPH + CURVE * min(size, self.height) + PLAIN * min(size**2, self.area)) * len(values["text"]))

    def arc(self, values: Mapping[str, Any]) -> None:
        size = abs(values["radius"]) * _scale(values["self"])
        self.spend(CURVE * (1 + (size / values["self"].get_tolerance()) ** (1 / 6)))

    def copy(self, values: Mapping[str, Any]) -> None:
        self.spend(POINT * self.outline(values["self"]).pieces)

    def outline(self, context: Context) -> _Outline:
        """Return what the path of a context is made of."""
        xx, yx, xy, yy, x0, y0 = context.get_matrix().as_tuple()
        tolerance = context.get_tolerance()
        is_vector = not isinstance(context.get_target(), ImageSurface)  # it may be shown at any size
        pieces = lines = length = 0.0
        x = y = row = 0.0
        columns, rows = set[float](), set[float]()
        path = context.copy_path()
        for kind, numbers in path:
            is_curve, size = kind == constants.PATH_CURVE_TO, 0.0
            for i in range(0, len(numbers), 2):
                px, py = xx * numbers[i] + xy * numbers[i + 1] + x0, yx * numbers[i] + yy * numbers[i + 1] + y0
                now = min(self.height, max(0.0, py))
                if kind != constants.PATH_MOVE_TO:
                    lines += self.height if is_vector else abs(now - row) * (2 if is_curve else 1)
                    size += math.hypot(px - x, py - y)
                x, y, row = px, py, now
                if len(path) < 9:
                    columns.add(round(x, 3))
                    rows.add(round(y, 3))
            length += size
            if is_curve:
                shown = size + (self.width + self.height if is_vector else 0)
                pieces += math.sqrt(shown / tolerance) / 2
            pieces += 1
        self.spend(POINT * len(path))
        return _Outline(pieces, lines + pieces, length, len(path) < 9 and max(len(columns), len(rows)) <= 2)

    def paints(self, context: Context, outline: _Outline, reach: float) -> None:
        """Count the pixels within an outline, and its lines, which cairo cuts with those of the clip path."""
        is_plain = isinstance(context.get_source(), SolidPattern)
        left, top, right, bottom = context.path_extents()
        xs, ys = zip(*(context.user_to_device(x, y) for x in (left, right) for y in (top, bottom)), strict=True)
        box = (min(xs), min(ys), max(xs), max(ys))
        if not isinstance(context.get_target(), ImageSurface):
            box = (0, 0, self.width, self.height)
        self.spend(fill_steps(outline.lines, box, (self.width, self.height), PLAIN if is_plain else SHADED, reach))
        if not is_plain:
            self.spend(PLAIN * self.tile * _scale(context) ** 2)
        self.spend(CROSSED * outline.pieces * self.clips[id(context)][-1])

    def fill(self, values: Mapping[str, Any]) -> None:
        outline = self.outline(values["self"])
        self.spend(CURVE * outline.pieces)
        self.paints(values["self"], outline, 0.0)

    def stroke(self, values: Mapping[str, Any]) -> None:
        context = values["self"]
        scale, width, (dashes, _) = _scale(context), context.get_line_width(), context.get_dash()
        outline, period = self.outline(context), sum(dashes) * scale
        pieces = outline.pieces
        if period >= 0.1:  # else cairo draws a solid line
            pieces += outline.length / period * (len(dashes) + 1)
        pen = min(width * scale, 1e9)
        corners = 0.0
        if context.get_line_join() == constants.LINE_JOIN_ROUND or context.get_line_cap() == constants.LINE_CAP_ROUND:
            corners = math.sqrt(pen / context.get_tolerance())
        self.spend((DASH + corners) * pieces)
        lines = 2 * outline.lines + 2 * min(pen, self.height) * pieces
        self.paints(context, outline._replace(pieces=4 * pieces, lines=lines), pen)

    def clip(self, values: Mapping[str, Any]) -> None:
        lines, outline = self.clips[id(values["self"])], self.outline(values["self"])
        if not outline.is_upright:
            self.spend(CURVE * outline.pieces + CROSSED * outline.pieces * lines[-1] + outline.lines)
            lines[-1] += outline.pieces


def _scale(context: Context) -> float:
    """Return how many pixels a unit of the user space has."""
    xx, yx, xy, yy = context.get_matrix().as_tuple()[:4]
    return math.sqrt(abs(xx * yy - xy * yx))
