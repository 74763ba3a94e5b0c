"""Glyphs of the fonts that ship with vlmrl. Text is drawn with these alone: pictures do not depend on a machine.

Families of a document are mapped to a sans-serif, a serif and a monospaced font; characters that one of them lacks come
from a font with many symbols. Licences: fonts/LICENSES.md.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fontTools.pens.basePen import BasePen
from fontTools.ttLib import TTFont

from vlmrl.svg.paths import Command

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
