"""Outlines of SVG's shapes as commands of paths, their bounds, and the map of a viewport.

Data of paths are read up to the first fault, as SVG has it, and become absolute commands.

Source: SVG 1.1 (second edition), sections 7.8, 7.10, 8.3 and 9, and appendix F.6 for arcs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from vlmrl.svg.values import GAP, LARGEST, NUMBER, Matrix, numbers_text, read_length, read_numbers

ARGUMENTS = {"M": 2, "L": 2, "H": 1, "V": 1, "C": 6, "S": 4, "Q": 4, "T": 2, "A": 7, "Z": 0}
"""Command -> number of its arguments."""
COMMAND = re.compile(r"[\s,]*([MmLlHhVvCcSsQqTtAaZz])")
FLAG = re.compile(r"[01]")


class Command(NamedTuple):
    """Command of a path with absolute coordinates: M, L, C, Q or Z.

    Args:
        numbers: x and y of each control point, the last one is the end. () for Z.
    """

    letter: str
    numbers: tuple[float, ...]


def read_path(text: str) -> list[Command]:
    """Return the commands of the `d` attribute, up to the first fault. H, V, S, T and A become L, C and Q."""
    pen, place, letter = _Pen(), 0, ""
    while True:
        match = COMMAND.match(text, place)
        if match is not None:
            letter, place = match[1], match.end()
        elif letter in ("", "Z", "z"):
            return pen.commands
        if not pen.commands and letter not in "Mm":
            return pen.commands
        read = _read_arguments(text, place, letter)
        if read is None:
            return pen.commands
        arguments, place = read
        if not pen.draw(letter, arguments):
            return pen.commands
        if letter in "Mm":
            letter = "L" if letter == "M" else "l"  # further pairs of a moveto are lines


def path_text(commands: list[Command]) -> str:
    """Return commands as the text of a `d` attribute."""
    return " ".join(f"{letter}{numbers_text(numbers)}" for letter, numbers in commands)


def _read_arguments(text: str, place: int, letter: str) -> tuple[list[float], int] | None:
    """Return the arguments of one command and the place behind them; None if they are wrong or incomplete."""
    numbers: list[float] = []
    for index in range(ARGUMENTS[letter.upper()]):
        place = GAP.match(text, place).end()  # pyright: ignore[reportOptionalMemberAccess]
        match = (FLAG if letter in "Aa" and index in (3, 4) else NUMBER).match(text, place)
        if match is None:
            return None
        numbers.append(min(LARGEST, max(-LARGEST, float(match[0]))))
        place = match.end()
    return numbers, place


class _Pen:
    """State of a path that is being read: the current point, the begin of the subpath, and the last control point."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.x = self.y = self.start_x = self.start_y = 0.0
        self.control: tuple[str, float, float] = ("", 0.0, 0.0)

    def draw(self, letter: str, n: list[float]) -> bool:
        """Add a command. Return False, and add nothing, if it leaves the range of coordinates."""
        kind, dx, dy = letter.upper(), *((self.x, self.y) if letter.islower() else (0.0, 0.0))
        if kind == "Z":
            self.commands.append(Command("Z", ()))
            self.x, self.y, self.control = self.start_x, self.start_y, ("", 0.0, 0.0)
            return True
        if kind == "A":
            return self._arc(n, n[5] + dx, n[6] + dy)
        if kind == "H":
            points = [n[0] + dx, self.y]
        elif kind == "V":
            points = [self.x, n[0] + dy]
        else:
            points = [value + (dx, dy)[i % 2] for i, value in enumerate(n)]
        if kind in "ST":
            points = [*self._reflected("C" if kind == "S" else "Q"), *points]
        name = {"H": "L", "V": "L", "S": "C", "T": "Q"}.get(kind, kind)
        return self._add(name, points)

    def _reflected(self, kind: str) -> tuple[float, float]:
        before, x, y = self.control
        return (2 * self.x - x, 2 * self.y - y) if before == kind else (self.x, self.y)

    def _add(self, name: str, points: list[float]) -> bool:
        if any(abs(value) > LARGEST for value in points):
            return False
        self.commands.append(Command(name, tuple(points)))
        self.control = (name, points[-4], points[-3]) if name in "CQ" else ("", 0.0, 0.0)
        self.x, self.y = points[-2], points[-1]
        if name == "M":
            self.start_x, self.start_y = self.x, self.y
        return True

    def _arc(self, n: list[float], x: float, y: float) -> bool:
        """Add an elliptical arc as cubic curves of at most a quarter turn."""
        rx, ry = abs(n[0]), abs(n[1])
        if rx == 0 or ry == 0:
            return self._add("L", [x, y])
        if (x, y) == (self.x, self.y):
            return True
        angle = math.radians(n[2])
        cos, sin = math.cos(angle), math.sin(angle)
        half_x, half_y = (self.x - x) / 2, (self.y - y) / 2
        px, py = cos * half_x + sin * half_y, cos * half_y - sin * half_x
        grown = math.hypot(px / rx, py / ry)
        if grown > 1:  # the ellipse is too small to reach both points
            rx, ry = rx * grown, ry * grown
        rest = max(0.0, 1 / ((px / rx) ** 2 + (py / ry) ** 2) - 1)
        root = math.sqrt(rest) * (-1 if n[3] == n[4] else 1)
        ux, uy = root * rx * py / ry, -root * ry * px / rx
        cx, cy = cos * ux - sin * uy + (self.x + x) / 2, sin * ux + cos * uy + (self.y + y) / 2
        begin = math.atan2((py - uy) / ry, (px - ux) / rx)
        turn = math.atan2((-py - uy) / ry, (-px - ux) / rx) - begin
        if n[4] and turn < 0:
            turn += 2 * math.pi
        elif not n[4] and turn > 0:
            turn -= 2 * math.pi
        pieces = max(1, math.ceil(abs(turn) / (math.pi / 2) - 1e-9))
        step = turn / pieces
        bend = 4 / 3 * math.tan(step / 4)

        def at(u: float, v: float) -> tuple[float, float]:
            return cos * rx * u - sin * ry * v + cx, sin * rx * u + cos * ry * v + cy

        for i in range(pieces):
            a, b = begin + i * step, begin + (i + 1) * step
            first = at(math.cos(a) - bend * math.sin(a), math.sin(a) + bend * math.cos(a))
            second = at(math.cos(b) + bend * math.sin(b), math.sin(b) - bend * math.cos(b))
            end = (x, y) if i == pieces - 1 else at(math.cos(b), math.sin(b))
            if not self._add("C", [*first, *second, *end]):
                return False
        self.control = ("", 0.0, 0.0)
        return True


ROUND = 4 / 3 * (math.sqrt(2) - 1)
"""Distance of the control points of a quarter circle from its ends, in radii."""
SHAPES = ("rect", "circle", "ellipse", "line", "polyline", "polygon", "path")
"""Elements that have an outline."""


class Box(NamedTuple):
    """Rectangle: left, top, and sizes >= 0."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Largest x."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Largest y."""
        return self.y + self.height

    @property
    def center(self) -> tuple[float, float]:
        """Middle point."""
        return self.x + self.width / 2, self.y + self.height / 2

    def joined(self, other: Box) -> Box:
        """Return the smallest rectangle around both."""
        x, y = min(self.x, other.x), min(self.y, other.y)
        return Box(x, y, max(self.right, other.right) - x, max(self.bottom, other.bottom) - y)

    def common(self, other: Box) -> Box | None:
        """Return what both share; None if they do not touch."""
        x, y = max(self.x, other.x), max(self.y, other.y)
        right, bottom = min(self.right, other.right), min(self.bottom, other.bottom)
        return Box(x, y, right - x, bottom - y) if right >= x and bottom >= y else None


class Lengths(NamedTuple):
    """Sizes that relative lengths refer to: those of the viewport, and that of the font, in user units."""

    width: float
    height: float
    em: float

    def read(self, attributes: Mapping[str, str], name: str, default: float = 0.0) -> float:
        """Return the length of an attribute: `%` of the width, of the height, or of the diagonal, by its name."""
        text = attributes.get(name)
        if text is None:
            return default
        if name in ACROSS:
            whole = self.width
        elif name in ALONG:
            whole = self.height
        else:
            whole = self.diagonal
        value = read_length(text, whole=whole, em=self.em)
        return default if value is None else value

    @property
    def diagonal(self) -> float:
        """Length that `%` of a radius or a stroke width refers to."""
        return math.hypot(self.width, self.height) / math.sqrt(2)


ACROSS = frozenset(("x", "width", "cx", "rx", "x1", "x2", "dx", "fx", "refX", "markerWidth"))
"""Attributes whose `%` is a share of the viewport's width."""
ALONG = frozenset(("y", "height", "cy", "ry", "y1", "y2", "dy", "fy", "refY", "markerHeight"))
"""Attributes whose `%` is a share of the viewport's height."""


def outline(tag: str, attributes: Mapping[str, str], lengths: Lengths) -> list[Command]:
    """Return the outline of a shape; [] if it has none, such as a circle without a radius.

    Args:
        tag: one of SHAPES.
    """
    if tag == "path":
        return read_path(attributes.get("d", ""))
    if tag in ("polyline", "polygon"):
        return _polygon(read_numbers(attributes.get("points", "")), closed=tag == "polygon")
    if tag == "line":
        x1, y1, x2, y2 = (lengths.read(attributes, name) for name in ("x1", "y1", "x2", "y2"))
        return [Command("M", (x1, y1)), Command("L", (x2, y2))]
    if tag == "rect":
        return _rect(attributes, lengths)
    cx, cy = lengths.read(attributes, "cx"), lengths.read(attributes, "cy")
    if tag == "circle":
        rx = ry = lengths.read(attributes, "r")
    else:
        rx = lengths.read(attributes, "rx", lengths.read(attributes, "ry"))
        ry = lengths.read(attributes, "ry", rx)
    return _rounded(Box(cx - rx, cy - ry, 2 * rx, 2 * ry), rx, ry) if rx > 0 and ry > 0 else []


def rectangle(box: Box) -> list[Command]:
    """Return the outline of a rectangle."""
    x, y, right, bottom = box.x, box.y, box.right, box.bottom
    return [
        Command("M", (x, y)),
        Command("L", (right, y)),
        Command("L", (right, bottom)),
        Command("L", (x, bottom)),
        Command("Z", ()),
    ]


def _rect(attributes: Mapping[str, str], lengths: Lengths) -> list[Command]:
    box = Box(*(lengths.read(attributes, name) for name in ("x", "y", "width", "height")))
    if box.width <= 0 or box.height <= 0:
        return []
    given = [name for name in ("rx", "ry") if attributes.get(name, "auto").strip() not in ("auto", "")]
    radii = {name: lengths.read(attributes, name) for name in given}
    rx = radii.get("rx", radii.get("ry", 0.0))
    ry = radii.get("ry", rx)
    if rx <= 0 or ry <= 0:
        return rectangle(box)
    return _rounded(box, min(rx, box.width / 2), min(ry, box.height / 2))


def _rounded(box: Box, rx: float, ry: float) -> list[Command]:
    """Return the outline of a rectangle with elliptical corners. It begins as SVG's rect does, for dashes."""
    x, y, right, bottom = box.x, box.y, box.right, box.bottom
    kx, ky = rx * (1 - ROUND), ry * (1 - ROUND)
    commands = [
        Command("M", (x + rx, y)),
        Command("L", (right - rx, y)),
        Command("C", (right - kx, y, right, y + ky, right, y + ry)),
        Command("L", (right, bottom - ry)),
        Command("C", (right, bottom - ky, right - kx, bottom, right - rx, bottom)),
        Command("L", (x + rx, bottom)),
        Command("C", (x + kx, bottom, x, bottom - ky, x, bottom - ry)),
        Command("L", (x, y + ry)),
        Command("C", (x, y + ky, x + kx, y, x + rx, y)),
        Command("Z", ()),
    ]
    pen, kept = (math.nan, math.nan), list[Command]()
    for command in commands:
        if command.letter == "L" and math.dist(pen, command.numbers) < 1e-9:
            continue  # no straight side
        kept.append(command)
        pen = command.numbers[-2:] or pen
    return kept


def _polygon(numbers: Sequence[float], *, closed: bool) -> list[Command]:
    points = list(zip(numbers[0::2], numbers[1::2], strict=False))
    commands = [Command("M" if i == 0 else "L", point) for i, point in enumerate(points)]
    return [*commands, Command("Z", ())] if closed and commands else commands


def moved(commands: Sequence[Command], matrix: Matrix) -> list[Command]:
    """Return an outline after a map."""
    a, b, c, d, e, f = matrix
    return [
        Command(
            letter,
            tuple(
                value
                for i in range(0, len(n), 2)
                for value in (a * n[i] + c * n[i + 1] + e, b * n[i] + d * n[i + 1] + f)
            ),
        )
        for letter, n in commands
    ]


def bounds(commands: Sequence[Command]) -> Box | None:
    """Return the smallest rectangle around an outline, curves included; None for an empty one."""
    low = [math.inf, math.inf]
    high = [-math.inf, -math.inf]
    pen = start = (0.0, 0.0)
    for letter, numbers in commands:
        if letter == "Z":
            pen = start
            continue
        points = [pen, *zip(numbers[0::2], numbers[1::2], strict=True)]
        for axis in (0, 1):
            values = [point[axis] for point in points]
            for value in (values[-1], *_extremes(values)):
                low[axis], high[axis] = min(low[axis], value), max(high[axis], value)
        pen = points[-1]
        start = pen if letter == "M" else start
    if low[0] > high[0]:
        return None
    return Box(low[0], low[1], high[0] - low[0], high[1] - low[1])


def _extremes(p: Sequence[float]) -> Iterator[float]:
    """Yield the values of a Bezier curve of one coordinate where it turns. `p`: its control values."""
    if len(p) == 2 or min(p[0], p[-1]) <= min(p) <= max(p) <= max(p[0], p[-1]):
        return
    if len(p) == 3:
        bend = p[0] - 2 * p[1] + p[2]
        times = [(p[0] - p[1]) / bend] if bend else []
    else:
        a, b, c = -p[0] + 3 * p[1] - 3 * p[2] + p[3], 2 * (p[0] - 2 * p[1] + p[2]), p[1] - p[0]
        root = b * b - 4 * a * c
        if abs(a) < 1e-12 * (abs(b) + abs(c)):
            times = [-c / b] if b else []
        else:
            times = [(-b + sign * math.sqrt(root)) / (2 * a) for sign in (1, -1)] if root >= 0 else []
    for t in times:
        if 0 < t < 1:
            yield bezier(p, t)


def bezier(p: Sequence[float], t: float) -> float:
    """Return the value of a Bezier curve of one coordinate at the time `t` in [0, 1]. `p`: 2 to 4 control values."""
    values = list(p)
    while len(values) > 1:
        values = [u + (v - u) * t for u, v in pairwise(values)]
    return values[0]


def polyline(commands: Sequence[Command], pieces: int = 8) -> list[list[tuple[float, float]]]:
    """Return the points of each subpath, with every curve as `pieces` straight lines."""
    lines: list[list[tuple[float, float]]] = []
    for letter, numbers in commands:
        if letter == "M":
            lines.append([(numbers[0], numbers[1])])
        elif letter == "Z":
            if lines[-1][-1] != lines[-1][0]:
                lines[-1].append(lines[-1][0])
        else:
            if letter == "L":
                lines[-1].append((numbers[0], numbers[1]))
                continue
            points = [lines[-1][-1], *zip(numbers[0::2], numbers[1::2], strict=True)]
            xs, ys = zip(*points, strict=True)
            lines[-1] += [(bezier(xs, k / pieces), bezier(ys, k / pieces)) for k in range(1, pieces + 1)]
    return lines


def length_of(commands: Sequence[Command]) -> float:
    """Return a length that the outline does not exceed: that of its control polygon."""
    total, pen, start = 0.0, (0.0, 0.0), (0.0, 0.0)
    for letter, numbers in commands:
        points = list(zip(numbers[0::2], numbers[1::2], strict=True)) or [start]
        if letter == "M":
            pen = start = points[0]
            continue
        for point in points:
            total += math.dist(pen, point)
            pen = point
    return total


def fitted(box: Box, width: float, height: float, aspect: str = "") -> Matrix:
    """Return the map of `box` to a viewport of width times height at the origin. `aspect`: `preserveAspectRatio`."""
    sx = width / box.width if box.width > 0 else 1.0
    sy = height / box.height if box.height > 0 else 1.0
    words = aspect.replace("defer", "").split() or ["xMidYMid"]
    if words[0] == "none":
        return Matrix(sx, 0, 0, sy, -box.x * sx, -box.y * sy)
    scale = max(sx, sy) if "slice" in words[1:] else min(sx, sy)
    align = words[0] if len(words[0]) == 8 else "xMidYMid"
    shares = {"Min": 0.0, "Mid": 0.5, "Max": 1.0}
    fx, fy = shares.get(align[1:4], 0.5), shares.get(align[5:8], 0.5)
    return Matrix(
        scale,
        0,
        0,
        scale,
        (width - box.width * scale) * fx - box.x * scale,
        (height - box.height * scale) * fy - box.y * scale,
    )


class Vertex(NamedTuple):
    """Vertex of an outline, with the directions of the line before and after it, in radians; None = there is none."""

    x: float
    y: float
    before: float | None
    after: float | None


def vertices(commands: Sequence[Command]) -> list[Vertex]:
    """Return the vertices of an outline in order."""
    points: list[tuple[float, float]] = []
    before: list[float | None] = []
    after: list[float | None] = []
    pen = start = (0.0, 0.0)
    for letter, numbers in commands:
        controls = list(zip(numbers[0::2], numbers[1::2], strict=True)) or [start]
        if letter != "M":
            way = [pen, *controls]
            after[-1] = _direction(way)
            reverse = _direction(way[::-1])
            before.append(None if reverse is None else reverse + math.pi)
        else:
            before.append(None)
            start = controls[-1]
        points.append(controls[-1])
        after.append(None)
        pen = controls[-1]
    return [Vertex(*point, b, a) for point, b, a in zip(points, before, after, strict=True)]


def _direction(way: Sequence[tuple[float, float]]) -> float | None:
    """Return the direction from the first point to the next one that differs; None if all are equal."""
    for point in way[1:]:
        if math.dist(point, way[0]) > 1e-9:
            return math.atan2(point[1] - way[0][1], point[0] - way[0][0])
    return None
