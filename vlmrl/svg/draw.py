"""Drawing of SVG text with cairo, in this process. Hostile text belongs into a worker: see renderer.py."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np

from vlmrl.redaction.redact import excerpt
from vlmrl.svg.build import Images, build_scene
from vlmrl.svg.css import BLENDS
from vlmrl.svg.geometry import Box, Command, fitted, length_of, rectangle
from vlmrl.svg.parse import ELEMENT, SvgLimits, Work, parse_svg
from vlmrl.svg.scene import Bitmap, ClipPart, Gradient, Group, Item, Mask, Scene, Shape, Source, Stroke, Tile
from vlmrl.svg.values import Matrix
from vlmrl.untrusted import CodeRefused

cairo: Any = import_module("cairocffi")  # its own types are wrong: they take integers alone
FARTHEST = 2_000_000.0
"""Largest coordinate in pixels. cairo's own end at 2**23."""
MOST_DASHES = 50_000
"""Largest number of dashes of one line. A line with more is drawn as a solid one."""
MOST_TILE_PIXELS = 4_194_304
MOST_LAYERS = 32
"""Largest number of layers at a time, for groups with an opacity or a mask. Each has the size of the picture."""
MOST_LAYER_PIXELS = 67_108_864
"""Largest number of pixels of all layers at a time."""
CAPS = {"round": cairo.LINE_CAP_ROUND, "square": cairo.LINE_CAP_SQUARE}
JOINS = {"round": cairo.LINE_JOIN_ROUND, "bevel": cairo.LINE_JOIN_BEVEL}
EXTENDS = {"pad": cairo.EXTEND_PAD, "reflect": cairo.EXTEND_REFLECT, "repeat": cairo.EXTEND_REPEAT}
PLAIN, SHADED, MASKED = 0.005, 0.1, 0.15
"""Steps of work of a pixel: of a colour or a layer, of a gradient, a pattern or a picture, and of a mask."""
CURVE, DASH = 30, 20
"""Steps of work of a curve, and of a dash."""
CACHED = 5_000
"""Number of lines beside each other that a processor's cache holds. With more, each of them takes more time."""


def paint(scene: Scene, width: int, height: int, work: Work | None = None) -> np.ndarray:
    """Return the picture of a scene on white: (height, width, 3) uint8 RGB.

    The scene is scaled to the size as its `preserveAspectRatio` says: the whole of it shows, in the middle.

    Raises: CodeRefused (`limit`, `drawing`).
    """
    painter = Painter(width, height, view_of(scene, width, height), work)
    painter.background(1.0, 1.0, 1.0)
    painter.draw(scene.items)
    return painter.rgb()


def view_of(scene: Scene, width: float, height: float) -> Matrix:
    """Return the map from the space of a scene to a picture of that size."""
    return fitted(scene.box, width, height, scene.aspect)


class Painter:
    """Surface with a map from the space of a scene to its pixels.

    Args:
        layers: number of layers around it.
    """

    def __init__(self, width: int, height: int, view: Matrix, work: Work | None = None, layers: int = 0) -> None:
        self.width, self.height, self.view, self.layers = width, height, view, layers
        self.work = work or Work()
        self.work.spend(PLAIN * width * height)
        try:
            self.surface = cairo.ImageSurface(cairo.FORMAT_ARGB32, width, height)
            self.context = cairo.Context(self.surface)
        except (MemoryError, cairo.CairoError):
            raise CodeRefused("limit", "drawing needs too much memory") from None
        self.context.set_tolerance(0.1)

    def background(self, red: float, green: float, blue: float) -> None:
        """Fill the surface."""
        self.context.set_source_rgb(red, green, blue)
        self.context.paint()

    def bgra(self) -> np.ndarray:
        """Return the surface's own pixels, (height, width, 4) uint8: blue, green, red, alpha; premultiplied."""
        self.surface.flush()
        rows = np.frombuffer(self.surface.get_data(), np.uint8).reshape(self.height, -1)
        return rows[:, : self.width * 4].reshape(self.height, self.width, 4)

    def rgb(self) -> np.ndarray:
        """Return a copy of the pixels, (height, width, 3) uint8, of a surface whose background is opaque."""
        return np.ascontiguousarray(self.bgra()[:, :, 2::-1])

    def draw(self, items: Sequence[Item]) -> None:
        """Draw items in order.

        Raises: CodeRefused (`limit`, `drawing`).
        """
        try:
            for item in items:
                if isinstance(item, Shape):
                    self._shape(item)
                elif isinstance(item, Group):
                    self._group(item)
                else:
                    self._bitmap(item)
        except MemoryError:
            raise CodeRefused("limit", "drawing needs too much memory") from None
        except cairo.CairoError as error:
            raise CodeRefused("drawing", f"cairo cannot draw it: {excerpt(str(error), 100)}") from None

    def draw_leaf(self, leaf: Shape | Bitmap, groups: Sequence[Group]) -> None:
        """Draw one leaf of a scene alone, within the groups around it.

        Raises: as `draw`.
        """
        item: Item = leaf
        for group in reversed(groups):
            item = Group((item,), group.opacity, group.clip, group.mask, group.blend)
        self.draw((item,))

    def _group(self, group: Group) -> None:
        context = self.context
        context.save()
        is_cut = group.clip is None or self._cut(group.clip)
        left, top, right, bottom = context.clip_extents()
        if right > left and bottom > top:
            if is_cut and group.opacity >= 1 and group.mask is None and not group.blend:
                self.draw(group.items)
            else:
                self._layer(group, () if is_cut else group.clip or (), (right - left) * (bottom - top))
        context.restore()

    def _layer(self, group: Group, clip: Sequence[ClipPart], pixels: float) -> None:
        """Draw a group on a layer of its own, and put that down. `clip`: parts by which it is not cut yet."""
        if self.layers >= MOST_LAYERS or pixels * (self.layers + 1) > MOST_LAYER_PIXELS:
            raise CodeRefused("limit", "too many groups with an opacity, a mask or a clip path are nested")
        self.work.spend(ELEMENT + PLAIN * pixels)
        context = self.context
        context.push_group()
        self.layers += 1
        self.draw(group.items)
        if clip:
            context.set_source(self._stencil(clip))
            context.set_operator(cairo.OPERATOR_DEST_IN)
            context.paint()
        self.layers -= 1
        context.pop_group_to_source()
        context.set_operator(getattr(cairo, f"OPERATOR_{BLENDS.get(group.blend, 'OVER')}"))
        if group.mask is None:
            context.paint_with_alpha(group.opacity)
        else:
            context.mask_surface(self._mask(group.mask, group.opacity), 0, 0)

    def _mask(self, mask: Mask, opacity: float) -> Any:
        """Return a mask as a surface of alpha."""
        self.work.spend(MASKED * self.width * self.height)
        inner = Painter(self.width, self.height, self.view, self.work, self.layers + 1)
        inner.draw((Group(mask.items, clip=(ClipPart(mask.box, mask.matrix, False),)),))
        pixels = inner.bgra()
        if mask.alpha_only:
            shares = pixels[:, :, 3].astype(np.float64)
        else:
            blue, green, red = (pixels[:, :, k].astype(np.float64) for k in range(3))
            shares = 0.0721 * blue + 0.7154 * green + 0.2125 * red
        stride = cairo.ImageSurface.format_stride_for_width(cairo.FORMAT_A8, self.width)
        rows = np.zeros((self.height, stride), np.uint8)
        rows[:, : self.width] = np.rint(shares * opacity).clip(0, 255)
        data = memoryview(bytearray(rows.tobytes()))
        return cairo.ImageSurface.create_for_data(data, cairo.FORMAT_A8, self.width, self.height, stride)

    def _cut(self, parts: Sequence[ClipPart]) -> bool:
        """Cut what follows at the bounds of a clip path. Return whether no more shows of it: it is an upright box.

        cairo cuts every line with every line of a clip path, for each shape. So other parts become a stencil.
        """
        context = self.context
        context.new_path()
        for part in parts:
            self._path(part.commands, self.view.times(part.matrix))
        is_box = len(parts) == 1 and _is_upright_box(parts[0].commands, self.view.times(parts[0].matrix))
        if not is_box:
            left, top, right, bottom = context.path_extents()
            left, top = math.floor(left), math.floor(top)
            context.new_path()
            context.rectangle(left, top, math.ceil(right) - left, math.ceil(bottom) - top)
        context.clip()
        return is_box

    def _stencil(self, parts: Sequence[ClipPart]) -> Any:
        """Return the parts of a clip path as a source that is opaque where they show."""
        context = self.context
        context.push_group_with_content(cairo.CONTENT_ALPHA)
        for part in parts:
            self._shape(Shape(part.commands, part.matrix, (0.0, 0.0, 0.0, 1.0), None, "", 0, even_odd=part.even_odd))
        return context.pop_group()

    def _path(self, commands: Sequence[Command], m: Matrix) -> float:
        """Add an outline, in pixels, to the path. Return the number of rows of the picture that its lines cross."""
        context, (a, b, c, d, e, f), height = self.context, m, self.height
        x0 = y0 = row = crossed = 0.0
        curves = sum(command.letter in "CQ" for command in commands)

        def point(x: float, y: float) -> tuple[float, float]:
            nonlocal row, crossed
            px, py = a * x + c * y + e, b * x + d * y + f
            before, row = row, min(height, max(0.0, py))
            crossed += abs(row - before)
            return min(FARTHEST, max(-FARTHEST, px)), min(FARTHEST, max(-FARTHEST, py))

        for letter, n in commands:
            if letter == "L":
                x0, y0 = point(n[0], n[1])
                context.line_to(x0, y0)
            elif letter == "M":
                x0, y0 = point(n[0], n[1])
                context.move_to(x0, y0)
            elif letter == "Z":
                context.close_path()
                x0, y0 = context.get_current_point()
            elif letter == "C":
                p, q, r = point(n[0], n[1]), point(n[2], n[3]), point(n[4], n[5])
                context.curve_to(*p, *q, *r)
                x0, y0 = r
            else:
                (px, py), (x, y) = point(n[0], n[1]), point(n[2], n[3])
                first = (x0 + 2 * (px - x0) / 3, y0 + 2 * (py - y0) / 3)
                context.curve_to(*first, x + 2 * (px - x) / 3, y + 2 * (py - y) / 3, x, y)
                x0, y0 = x, y
        self.work.spend(ELEMENT + CURVE * len(commands))
        return crossed * (2 if curves else 1) + len(commands)

    def _shape(self, shape: Shape) -> None:
        m = self.view.times(shape.matrix)
        if not _is_usable(m):
            return
        context = self.context
        context.set_antialias(cairo.ANTIALIAS_NONE if shape.crisp else cairo.ANTIALIAS_DEFAULT)
        context.new_path()
        lines = self._path(shape.commands, m)
        if shape.stroke is not None and shape.stroke_first:
            self._stroke(shape.stroke, shape.commands, m, lines)
        if shape.fill is not None and self._set_source(shape.fill, m):
            self._spend(lines, shape.fill)
            context.set_fill_rule(cairo.FILL_RULE_EVEN_ODD if shape.even_odd else cairo.FILL_RULE_WINDING)
            context.fill_preserve()
        if shape.stroke is not None and not shape.stroke_first:
            self._stroke(shape.stroke, shape.commands, m, lines)
        context.new_path()

    def _spend(self, lines: float, source: Source, reach: float = 0.0) -> None:
        """Count the work of filling the path; see `fill_steps`."""
        shade = PLAIN if isinstance(source, tuple) else SHADED
        self.work.spend(fill_steps(lines, self.context.path_extents(), (self.width, self.height), shade, reach))

    def _stroke(self, stroke: Stroke, commands: Sequence[Command], m: Matrix, lines: float) -> None:
        context, scale = self.context, math.sqrt(abs(m.determinant))
        if not self._set_source(stroke.source, m):
            return
        period, dashes = sum(stroke.dashes), 0.0
        if period * scale >= 0.1:
            dashes = length_of(commands) / period * len(stroke.dashes) / 2
        is_solid = not 0 < dashes <= MOST_DASHES
        pen = min(stroke.width * scale, self.height)
        pieces = len(commands) + (0 if is_solid else dashes)
        self.work.spend(DASH * pieces)
        self._spend(2 * lines + 2 * pen * pieces, stroke.source, stroke.width * scale)
        context.set_matrix(_cairo(m))  # the pen has the shape that the map gives it
        context.set_line_width(min(stroke.width, 2 * FARTHEST / scale))
        context.set_line_cap(CAPS.get(stroke.cap, cairo.LINE_CAP_BUTT))
        context.set_line_join(JOINS.get(stroke.join, cairo.LINE_JOIN_MITER))
        context.set_miter_limit(stroke.miter)
        if is_solid:
            context.set_dash(())
        else:
            context.set_dash(stroke.dashes, math.fmod(stroke.offset, period))
        context.stroke_preserve()
        context.identity_matrix()

    def _set_source(self, source: Source, m: Matrix) -> bool:
        """Set the source of a fill or a stroke. Return False if it paints nothing.

        Args:
            m: map from the user space of the shape to pixels.
        """
        if isinstance(source, tuple):
            self.context.set_source_rgba(*source)
            return True
        if isinstance(source, Gradient):
            kind = cairo.RadialGradient if source.radial else cairo.LinearGradient
            pattern = kind(*source.coords)
            for offset, colour in source.stops:
                pattern.add_color_stop_rgba(offset, *colour)
            pattern.set_extend(EXTENDS[source.spread])
            matrix = source.matrix
        else:
            pattern, matrix = self._tile(source, m)
        if not _is_usable(m.times(matrix)):
            return False
        pattern.set_matrix(_cairo(m.times(matrix).inverted()))
        self.context.set_source(pattern)
        return True

    def _tile(self, tile: Tile, m: Matrix) -> tuple[Any, Matrix]:
        """Return the picture of a tile, and the map from its pixels to the user space of the shape."""
        whole, box = m.times(tile.matrix), tile.box
        columns = math.ceil(min(1e9, box.width * math.hypot(whole.a, whole.b)))
        rows = math.ceil(min(1e9, box.height * math.hypot(whole.c, whole.d)))
        columns, rows = max(1, columns), max(1, rows)
        if columns * rows > max(MOST_TILE_PIXELS, self.width * self.height) or self.layers >= MOST_LAYERS:
            raise CodeRefused("limit", f"a pattern has a tile of {columns:,} x {rows:,} pixels")
        scaled = Matrix(columns / box.width, 0, 0, rows / box.height)
        inner = Painter(columns, rows, scaled.times(Matrix(e=-box.x, f=-box.y)), self.work, self.layers + 1)
        if tile.alpha < 1:
            inner.draw((Group(tile.items, tile.alpha),))
        else:
            inner.draw(tile.items)
        pattern = cairo.SurfacePattern(inner.surface)
        pattern.set_extend(cairo.EXTEND_REPEAT)
        to_tile = Matrix(box.width / columns, 0, 0, box.height / rows, box.x, box.y)
        return pattern, tile.matrix.times(to_tile)

    def _bitmap(self, item: Bitmap) -> None:
        m = self.view.times(item.matrix)
        if not _is_usable(m) or max(map(abs, m)) > FARTHEST:
            return
        rows, columns = item.pixels.shape[:2]
        self.work.spend(SHADED * (3 * rows * columns + self.width * self.height))
        pixels = item.pixels.astype(np.uint16)
        alpha = pixels[:, :, 3:]
        shaded = np.concatenate((pixels[:, :, 2::-1] * alpha // 255, alpha), axis=2).astype(np.uint8)
        data = memoryview(bytearray(shaded.tobytes()))
        surface = cairo.ImageSurface.create_for_data(data, cairo.FORMAT_ARGB32, columns, rows, columns * 4)
        pattern = cairo.SurfacePattern(surface)
        pattern.set_extend(cairo.EXTEND_PAD)  # edges are not mixed with what is around
        pattern.set_matrix(_cairo(m.inverted()))
        self.context.save()
        self._path(rectangle(Box(0, 0, columns, rows)), m)
        self.context.clip()
        self.context.set_source(pattern)
        self.context.paint_with_alpha(item.alpha)
        self.context.restore()


def fill_steps(
    lines: float, box: tuple[float, float, float, float], size: tuple[int, int], shade: float, reach: float
) -> float:
    """Return the steps of work of filling a path.

    Args:
        lines: number of rows that its lines cross.
        box: its left, top, right and bottom, in pixels.
        size: width and height of the picture.
        shade: steps of a pixel.
        reach: distance to which it is painted around, for a stroke.
    """
    left, top, right, bottom = box
    rows = min(bottom + reach, size[1]) - max(top - reach, 0)
    columns = min(right + reach, size[0]) - max(left - reach, 0)
    if rows < 0 or columns < 0:
        return 0.0
    return lines * (1 + lines / max(1, rows) / CACHED) + shade * rows * columns


def _is_upright_box(commands: Sequence[Command], m: Matrix) -> bool:
    """Return whether an outline is a rectangle whose sides are rows and columns of pixels."""
    if "".join(command.letter for command in commands).removesuffix("Z") != "MLLL":
        return False
    points = [m.apply(*command.numbers) for command in commands[:4]]
    (ax, ay), (bx, by), (cx, cy), (dx, dy) = ((round(x, 6), round(y, 6)) for x, y in points)
    return (ay, bx, cy, dx) == (by, cx, dy, ax) or (ax, by, cx, dy) == (bx, cy, dx, ay)


def _cairo(m: Matrix) -> Any:
    return cairo.Matrix(*m)


def _is_usable(m: Matrix) -> bool:
    """Return whether cairo can invert a map."""
    return all(map(math.isfinite, m)) and 1e-12 < abs(m.determinant) < 1e15


Drawer = Literal["vlmrl", "cairosvg"]
"""Painter: vlmrl's own painter, or cairosvg, for the sake of a published reward."""
FONT_SAMPLE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text y="9">a\u2713</text></svg>'
"""SVG text whose drawing loads the fonts: one letter is not in the first of them."""


@dataclass(frozen=True)
class DrawJob:
    """SVG text to draw.

    Args:
        size: width and height of the picture in pixels; None = what the document declares, scaled down to the limit.
    """

    svg: str
    size: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Drawing:
    """Picture of an SVG text.

    Args:
        pixels: (height, width, 3) uint8 RGB, on white.
        digest: sha256 of size and pixels, 64 hexadecimal digits. Equal texts have equal pictures on every machine that
            has the same versions of cairo and of vlmrl's fonts.
    """

    pixels: np.ndarray
    digest: str
    seconds: float

    @property
    def is_blank(self) -> bool:
        """Return whether all pixels are equal."""
        return bool((self.pixels == self.pixels[0, 0]).all())


def draw_svg(job: DrawJob, limits: SvgLimits | None = None, *, images: Images = "refuse") -> Drawing:
    """Return the picture of an SVG text.

    Raises: CodeRefused for text that is no SVG, is forbidden, or is beyond a limit of content. Time and memory have
        limits in a worker alone.
    """
    limits, begin = limits or SvgLimits(), time.perf_counter()
    if job.size is not None:
        _check_size(job.size, limits)
    scene = build_scene(parse_svg(job.svg, limits), limits, images=images, size=job.size)
    pixels = paint(scene, *(job.size or own_size(scene, limits)), Work(limits.steps))
    return Drawing(pixels, pixels_digest(pixels), time.perf_counter() - begin)


def _check_size(size: tuple[int, int], limits: SvgLimits) -> None:
    if min(size) < 1 or size[0] * size[1] > limits.pixels:
        raise CodeRefused("limit", f"a picture of {size[0]:,} x {size[1]:,} pixels is beyond {limits.pixels:,} pixels")


def own_size(scene: Scene, limits: SvgLimits) -> tuple[int, int]:
    """Return the size that a document declares, in whole pixels, scaled down to the limit."""
    scale = min(1.0, math.sqrt(limits.pixels / max(1.0, scene.width * scene.height)))
    width, height = (max(1, math.floor(side * scale + 0.5)) for side in (scene.width, scene.height))
    if width * height > limits.pixels:  # rounded up
        width, height = min(width, limits.pixels), max(1, min(height, limits.pixels // min(width, limits.pixels)))
    return width, height


def pixels_digest(pixels: np.ndarray) -> str:
    """Return the sha256 of size and pixels of a picture, (height, width, 3) uint8."""
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
