"""Layout of text: characters of a `text` element become outlines of the fonts that ship with vlmrl.

Pictures do not depend on a machine. A document's families are mapped to a sans-serif, a serif and a monospaced font;
characters that one of them lacks come from a font with many symbols (licences: fonts/LICENSES.md). Each character
stands alone: there is no kerning, and no right-to-left order.

Source: SVG 1.1 (second edition), chapter 10.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fontTools.pens.basePen import BasePen
from fontTools.ttLib import TTFont

from vlmrl.svg.css import Place, inherit, is_hidden
from vlmrl.svg.geometry import Command, moved, outline, polyline
from vlmrl.svg.parse import GLYPH, LETTER, POINT, Node
from vlmrl.svg.references import Walk
from vlmrl.svg.values import Matrix, read_length, read_numbers
from vlmrl.untrusted import CodeRefused

FOLDER = Path(__file__).parent / "fonts"
FALLBACK = "DejaVuSans"
SLANT = 0.2
"""Shift of a glyph of 1 em height where a font has no italic shapes."""
SERIF = ("serif", "times", "georgia", "garamond", "palatino", "cambria", "roman", "computer modern", "cmr", "stix")
MONO = ("mono", "courier", "consolas", "menlo", "monaco", "code", "typewriter", "fixed")
FILES = {
    ("sans", False, False): "LiberationSans-Regular",
    ("sans", True, False): "LiberationSans-Bold",
    ("sans", False, True): "LiberationSans-Italic",
    ("serif", False, False): "LiberationSerif-Regular",
    ("serif", True, False): "LiberationSerif-Bold",
    ("mono", False, False): "LiberationMono-Regular",
}
"""(family, bold, italic) -> file. Where one lacks, the italic is slanted, then bold is left out."""


class Glyph(NamedTuple):
    """Shape of a character, in em, with y downwards from the baseline."""

    advance: float
    commands: tuple[Command, ...]


class _Outline(BasePen):
    """Pen that records a glyph as commands in em."""

    def __init__(self, glyphs: Any, em: int, slant: float) -> None:
        super().__init__(glyphs)
        self.em, self.slant, self.commands = em, slant, list[Command]()

    def _points(self, *points: tuple[float, float]) -> tuple[float, ...]:
        return tuple(v for x, y in points for v in ((x + self.slant * y) / self.em, -y / self.em))

    def _moveTo(self, pt: tuple[float, float]) -> None:
        self.commands.append(Command("M", self._points(pt)))

    def _lineTo(self, pt: tuple[float, float]) -> None:
        self.commands.append(Command("L", self._points(pt)))

    def _curveToOne(self, pt1: tuple[float, float], pt2: tuple[float, float], pt3: tuple[float, float]) -> None:
        self.commands.append(Command("C", self._points(pt1, pt2, pt3)))

    def _qCurveToOne(self, pt1: tuple[float, float], pt2: tuple[float, float]) -> None:
        self.commands.append(Command("Q", self._points(pt1, pt2)))

    def _closePath(self) -> None:
        self.commands.append(Command("Z", ()))


class _File:
    """Font file that is read when its first glyph is needed."""

    def __init__(self, name: str) -> None:
        self.font = TTFont(FOLDER / f"{name}.ttf", lazy=True)
        self.names: dict[int, str] = self.font.getBestCmap() or {}
        self.glyphs = self.font.getGlyphSet()
        self.em: int = self.font["head"].unitsPerEm  # pyright: ignore[reportAttributeAccessIssue]
        lines: Any = self.font["hhea"]
        self.ascent, self.descent = lines.ascent / self.em, -lines.descent / self.em

    def glyph(self, name: str, slant: float) -> Glyph:
        shape = self.glyphs[name]
        pen = _Outline(self.glyphs, self.em, slant)
        shape.draw(pen)
        return Glyph(shape.width / self.em, tuple(pen.commands))


@cache
def _file(name: str) -> _File:
    return _File(name)


class Face:
    """Font in one style."""

    def __init__(self, family: str, bold: bool, italic: bool) -> None:
        name = FILES.get((family, bold, italic))
        self._slant = 0.0 if name or not italic else SLANT
        name = name or FILES.get((family, bold, False)) or FILES[(family, False, False)]
        self._own, self._cache = _file(name), dict[str, Glyph]()
        self.ascent, self.descent = self._own.ascent, self._own.descent

    def glyph(self, character: str) -> Glyph:
        """Return the glyph of a character; an empty box if no font has it."""
        if character not in self._cache:
            file, name = self._own, self._own.names.get(ord(character))
            if name is None:
                file = _file(FALLBACK)
                name = file.names.get(ord(character), ".notdef")
            self._cache[character] = file.glyph(name, self._slant)
        return self._cache[character]


@cache
def _face(family: str, bold: bool, italic: bool) -> Face:
    return Face(family, bold, italic)


def face_for(families: str, weight: str, style: str) -> Face:
    """Return the font for the values of `font-family`, `font-weight` and `font-style`."""
    first = families.split(",")[0].strip("\"' ").lower()
    family = "sans"
    if any(word in first for word in MONO):
        family = "mono"
    elif "sans" not in first and any(word in first for word in SERIF):
        family = "serif"
    bold = weight.strip() in ("bold", "bolder") or (weight.strip().isdecimal() and int(weight.strip()[:5]) >= 550)
    return _face(family, bold, style.strip() in ("italic", "oblique"))


MOST_CHARACTERS = 50_000
SPANS = ("tspan", "a", "tref")
BASELINES = {
    "middle": 0.5, "central": 0.5, "mathematical": 0.5, "hanging": 1.0, "text-before-edge": 1.0, "text-top": 1.0,
    "before-edge": 1.0, "text-after-edge": 0.0, "text-bottom": 0.0, "after-edge": 0.0, "ideographic": 0.0,
}  # fmt: skip
"""Baseline -> its height between the bottom (0) and the top (1) of the font."""
SHIFTS = {"sub": -0.2, "super": 0.4}


class Run(NamedTuple):
    """Characters of one style on one line.

    Args:
        place: style of the element that they stand in.
        commands: their outlines, in the user space of the `text` element.
    """

    text: str
    place: Place
    commands: list[Command]


@dataclass(slots=True)
class _Character:
    """Character with the attributes that are its own. `x`, `y`: absolute place; None = after the one before."""

    text: str
    face: Face
    place: Place
    span: int
    x: float | None = None
    y: float | None = None
    dx: float = 0.0
    dy: float = 0.0
    turn: float = 0.0
    spacing: float = 0.0
    rise: float = 0.0
    path: _TextPath | None = None

    @property
    def advance(self) -> float:
        return self.face.glyph(self.text).advance * self.place.lengths.em + self.spacing


@dataclass(slots=True)
class _TextPath:
    """Line that text follows. `lengths`: of the line up to each point; `start`: length where the text begins."""

    points: list[tuple[float, float]]
    lengths: list[float]
    start: float

    def at(self, length: float) -> tuple[float, float, float] | None:
        """Return x, y and direction at a length along the line; None beyond its ends."""
        end = bisect_left(self.lengths, length) or bisect_right(self.lengths, 0.0)
        if length < 0 or end == len(self.points):
            return None
        (x1, y1), (x2, y2) = self.points[end - 1 : end + 1]
        share = (length - self.lengths[end - 1]) / (self.lengths[end] - self.lengths[end - 1])
        return x1 + (x2 - x1) * share, y1 + (y2 - y1) * share, math.atan2(y2 - y1, x2 - x1)


@dataclass
class _Reader:
    """Walk over a `text` element that gathers its characters."""

    walk: Walk
    characters: list[_Character] = field(default_factory=list)
    spans: int = 0
    after_space: bool = True

    def read(self, node: Node, place: Place, rise: float, path: _TextPath | None) -> None:
        self.walk.count(node)
        if place.depth > 100:
            raise CodeRefused("limit", "text elements are nested deeper than 100")
        attributes, lengths, begin = node.attributes, place.lengths, len(self.characters)
        span = self.spans
        for index, text in enumerate(node.texts):
            self._add(text, place, span, rise, path)
            if index == len(node.children):
                break
            child = node.children[index]
            if is_hidden(child):
                continue
            inner = inherit(child, place)._replace(depth=place.depth + 1)
            if child.tag in SPANS:
                self.spans += 1
                self.read(child, inner, rise + _shift(child, inner), path)
            elif child.tag == "textPath" and (line := self._line(child, inner)) is not None:
                self.spans += 1
                self.read(child, inner, rise, line)
            span = self.spans = self.spans + 1
        own = self.characters[begin:]
        for name in ("x", "y", "dx", "dy"):
            whole = lengths.width if name in ("x", "dx") else lengths.height
            words = attributes.get(name, "").replace(",", " ").split()[:MOST_CHARACTERS]
            for character, word in zip(own, words, strict=False):
                value = read_length(word, whole=whole, em=lengths.em)
                # A value of an inner element has precedence: it was set before.
                if value is not None and (getattr(character, name) in (None, 0.0)):
                    setattr(character, name, value)
        turns = read_numbers(attributes.get("rotate", ""), MOST_CHARACTERS)
        for index, character in enumerate(own if turns else ()):
            character.turn = character.turn or turns[min(index, len(turns) - 1)]

    def _add(self, text: str, place: Place, span: int, rise: float, path: _TextPath | None) -> None:
        face = face_for(place.get("font-family"), place.get("font-weight"), place.get("font-style"))
        spacing = read_length(place.get("letter-spacing"), em=place.lengths.em) or 0.0
        words = read_length(place.get("word-spacing"), em=place.lengths.em) or 0.0
        keep = place.style.get("space") == "preserve"
        for character in text:
            is_space = character in " \t\r\n"
            if is_space and not keep:
                if self.after_space:
                    continue
                character = " "
            elif is_space:
                character = " "
            self.after_space = is_space and not keep
            if len(self.characters) >= MOST_CHARACTERS:
                raise CodeRefused("limit", f"a text has more than {MOST_CHARACTERS:,} characters")
            gap = spacing + (words if is_space else 0.0)
            self.characters.append(_Character(character, face, place, span, spacing=gap, rise=rise, path=path))

    def _line(self, node: Node, place: Place) -> _TextPath | None:
        target = self.walk.ids.get(node.attributes.get("href", "").strip().removeprefix("#"))
        if target is None or target.tag != "path":
            return None
        self.walk.work.spend(LETTER * len(target.attributes.get("d", "")))
        lines = polyline(outline("path", target.attributes, place.lengths), 24)
        self.walk.work.spend(POINT * sum(map(len, lines)))
        if not lines:
            return None
        points = lines[0]
        lengths = [0.0, *accumulate(math.dist(a, b) for a, b in pairwise(points))]
        start = read_length(node.attributes.get("startOffset", "0"), whole=lengths[-1], em=place.lengths.em) or 0.0
        return _TextPath(points, lengths, start)


def _shift(node: Node, place: Place) -> float:
    """Return how far the baseline of an element is raised, in user units."""
    text = node.attributes.get("baseline-shift", "").strip()
    if text in SHIFTS:
        return SHIFTS[text] * place.lengths.em
    return read_length(text, whole=place.lengths.em, em=place.lengths.em) or 0.0


def lay_out(node: Node, place: Place, walk: Walk) -> list[Run]:
    """Return the runs of a `text` element, in order.

    Args:
        place: the place within the element.
        walk: counter of elements and of work.
    Raises: CodeRefused (`limit`).
    """
    reader = _Reader(walk)
    reader.read(node, place, _shift(node, place), None)
    characters = reader.characters
    while characters and characters[-1].text == " " and characters[-1].place.style.get("space") != "preserve":
        characters.pop()
    runs: list[Run] = []
    x, y, begin = 0.0, 0.0, 0
    while begin < len(characters):
        end = begin + 1
        while end < len(characters) and not _begins_line(characters[end], characters[end - 1]):
            end += 1
        for character in characters[begin:end]:
            walk.work.spend(GLYPH + POINT * len(character.face.glyph(character.text).commands))
        x, y = _place_line(characters[begin:end], x, y, node, runs)
        begin = end
    return runs


def _begins_line(character: _Character, before: _Character) -> bool:
    """Return whether a character begins a new line, which `text-anchor` aligns by itself."""
    return character.x is not None or character.y is not None or character.path is not before.path


def _place_line(line: Sequence[_Character], x: float, y: float, node: Node, runs: list[Run]) -> tuple[float, float]:
    """Add the runs of one line. Return the point behind it."""
    first = line[0]
    x = first.x if first.x is not None else x
    y = first.y if first.y is not None else y
    width = sum(c.advance + c.dx for c in line) - line[-1].spacing
    anchor = {"middle": width / 2, "end": width}.get(first.place.get("text-anchor"), 0.0)
    position = (first.path.start if first.path is not None else x) - anchor
    if first.path is not None:
        y = 0.0
    span = None
    for character in line:
        if span != character.span:
            runs.append(Run("", character.place, []))
            span = character.span
        run = runs[-1]
        position += character.dx
        y += character.dy
        spot = _spot(character, position, y - character.rise + _drop(character, node))
        if spot is not None:
            size = character.place.lengths.em
            run.commands.extend(
                moved(character.face.glyph(character.text).commands, spot.times(Matrix(size, 0, 0, size, 0, 0)))
            )
            runs[-1] = run._replace(text=run.text + character.text)
        position += character.advance
    return (position, y) if first.path is None else (x, y)


def _spot(character: _Character, position: float, y: float) -> Matrix | None:
    """Return the map from the character's own space to the text's; None beyond the end of its path."""
    turn = math.radians(character.turn)
    if character.path is None:
        return Matrix(math.cos(turn), math.sin(turn), -math.sin(turn), math.cos(turn), position, y)
    half = character.advance / 2
    middle = character.path.at(position + half)
    if middle is None:
        return None
    x, line_y, direction = middle
    cos, sin = math.cos(direction + turn), math.sin(direction + turn)
    return Matrix(cos, sin, -sin, cos, x, line_y).times(Matrix(e=-half, f=y))


def _drop(character: _Character, node: Node) -> float:
    """Return how far the baseline is below the line that `dominant-baseline` puts at y, in user units."""
    attributes = node.attributes
    names = (attributes.get("dominant-baseline", ""), attributes.get("alignment-baseline", ""))
    share = next((BASELINES[name.strip()] for name in names if name.strip() in BASELINES), None)
    if share is None:
        return 0.0
    face, size = character.face, character.place.lengths.em
    return (face.ascent * share - face.descent * (1 - share)) * size
