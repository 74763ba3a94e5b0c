"""Values of SVG attributes: numbers, lengths, lists, transforms, colours. Whatever is not one is None, never an error.

Colours of all colour spaces become sRGB, in which a figure is drawn.

Source: SVG 1.1 (second edition), sections 4.2, 7.6 and 8.3; CSS Color Module Level 4, also section 17.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tinycss2.color4 import parse_color

Row = tuple[float, float, float]
XYZ_D65: tuple[Row, Row, Row] = (
    (3.2409699419045213, -1.5373831775700935, -0.4986107602930033),
    (-0.9692436362808798, 1.8759675015077206, 0.0415550574071756),
    (0.0556300796969936, -0.2039769588889765, 1.0569715142428784),
)
"""XYZ with the white of D65 -> linear sRGB."""
XYZ_D50: tuple[Row, Row, Row] = (
    (3.1341359569958707, -1.6173863321612538, -0.4906619460083532),
    (-0.9787954856777704, 1.9162543773959884, 0.0334427354118024),
    (0.0719537988411677, -0.2289768264158322, 1.4053860583244920),
)
"""XYZ with the white of D50 -> linear sRGB, with Bradford's adaptation."""
DISPLAY_P3: tuple[Row, Row, Row] = (
    (1.2249401762805598, -0.2249401762805598, 0.0),
    (-0.0420569547096881, 1.0420569547096881, 0.0),
    (-0.0196375545903344, -0.0786360455506319, 1.0982736001409663),
)
"""Linear Display P3 -> linear sRGB."""


def srgb_of(colour: Any) -> list[float] | None:
    """Return red, green, blue and alpha of a colour of tinycss2, not clamped; None for a space that is not drawn.

    Drawn are sRGB, linear sRGB, Display P3, HSL, HWB, XYZ, and Lab, LCH, OKLab and OKLCH.
    """
    space, alpha = colour.space, float(colour.alpha)
    values = [float(value or 0.0) for value in colour.coordinates]
    try:
        if space in ("srgb", "hsl", "hwb"):
            return [*map(float, tuple(colour.to("srgb"))[:3]), alpha]
        if space == "srgb-linear":
            linear = values
        elif space == "display-p3":
            linear = _product(DISPLAY_P3, [_linear(value) for value in values])
        elif space in ("lab", "lch", "xyz-d50"):
            linear = _product(XYZ_D50, tuple(colour.to("xyz-d50"))[:3])
        elif space in ("oklab", "oklch", "xyz", "xyz-d65"):
            linear = _product(XYZ_D65, tuple(colour.to("xyz-d65"))[:3])
        else:
            return None
        return [*map(_encoded, linear), alpha]
    except (ArithmeticError, ValueError):  # numbers beyond those of floats
        return None


def _product(rows: Sequence[Row], values: Sequence[float]) -> list[float]:
    return [sum(a * float(b) for a, b in zip(row, values, strict=True)) for row in rows]


def _linear(value: float) -> float:
    """Return the linear light of an encoded channel."""
    size = abs(value)
    light = size / 12.92 if size <= 0.04045 else ((size + 0.055) / 1.055) ** 2.4
    return light if value >= 0 else -light


def _encoded(light: float) -> float:
    """Return the encoded channel of linear light."""
    size = abs(light)
    value = 12.92 * size if size <= 0.0031308 else 1.055 * size ** (1 / 2.4) - 0.055
    return value if light >= 0 else -value


LARGEST = 1e7
"""Largest size of a number that is drawn. cairo's own coordinates end at 2**23."""
NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
LENGTH = re.compile(rf"({NUMBER.pattern})\s*(px|pt|pc|mm|cm|in|em|ex|rem|%)?", re.IGNORECASE)
GAP = re.compile(r"[\s,]*")
TRANSFORM = re.compile(r"\s*,?\s*(matrix|translate|scale|rotate|skewX|skewY)\s*\(([^()]*)\)")
PIXELS = {"": 1.0, "px": 1.0, "pt": 96 / 72, "pc": 16.0, "mm": 96 / 25.4, "cm": 96 / 2.54, "in": 96.0, "rem": 16.0}
"""Unit -> pixels."""
URL = re.compile(r"url\(\s*(?:\"#([^\"\s]+)\"|'#([^'\s]+)'|#([^)\"'\s]+))\s*\)\s*(.*)", re.DOTALL | re.IGNORECASE)


class Matrix(NamedTuple):
    """Affine map: x' = a x + c y + e, y' = b x + d y + f."""

    a: float = 1.0
    b: float = 0.0
    c: float = 0.0
    d: float = 1.0
    e: float = 0.0
    f: float = 0.0

    def times(self, inner: Matrix) -> Matrix:
        """Return the map that applies `inner` first and this one then."""
        return Matrix(
            self.a * inner.a + self.c * inner.b,
            self.b * inner.a + self.d * inner.b,
            self.a * inner.c + self.c * inner.d,
            self.b * inner.c + self.d * inner.d,
            self.a * inner.e + self.c * inner.f + self.e,
            self.b * inner.e + self.d * inner.f + self.f,
        )

    def apply(self, x: float, y: float) -> tuple[float, float]:
        """Return the image of a point."""
        return self.a * x + self.c * y + self.e, self.b * x + self.d * y + self.f

    def inverted(self) -> Matrix:
        """Return the inverse of a map whose determinant is not 0."""
        a, b, c, d, e, f = self
        det = self.determinant
        return Matrix(d / det, -b / det, -c / det, a / det, (c * f - d * e) / det, (b * e - a * f) / det)

    @property
    def determinant(self) -> float:
        """Factor of areas, negative where the map mirrors. 0 = all is on a line, and nothing is drawn."""
        return self.a * self.d - self.b * self.c


class Paint(NamedTuple):
    """Value of `fill` or `stroke`.

    Args:
        colour: red, green, blue, alpha in [0, 1]; None = nothing is painted.
        server: id of a gradient or a pattern, which is painted instead; "" = none.
    """

    colour: tuple[float, float, float, float] | None
    server: str = ""


def _bounded(value: float) -> float:
    """Return a number, or the largest of its sign: what is that far away, or that large, looks the same."""
    return min(LARGEST, max(-LARGEST, value))


def read_number(text: str) -> float | None:
    """Return a number, at most LARGEST in size; None for anything else."""
    match = NUMBER.fullmatch(text.strip())
    return None if match is None else _bounded(float(match[0]))


def read_share(text: str) -> float | None:
    """Return an opacity or an offset, clamped to [0, 1]. `50%` is 0.5."""
    text = text.strip()
    value = read_number(text.removesuffix("%"))
    return None if value is None else min(1.0, max(0.0, value / 100 if text.endswith("%") else value))


def read_length(text: str, *, whole: float = 0.0, em: float = 16.0) -> float | None:
    """Return a length in pixels.

    Args:
        whole: length in pixels of which `%` is a share.
        em: size of the font in pixels.
    """
    match = LENGTH.fullmatch(text.strip())
    if match is None:
        return None
    unit = (match[2] or "").lower()
    factor = {"%": whole / 100, "em": em, "ex": em / 2}.get(unit) if unit not in PIXELS else PIXELS[unit]
    return None if factor is None else _bounded(float(match[1]) * factor)


def read_numbers(text: str, most: int = 200_000) -> list[float]:
    """Return the numbers at the begin of a text, which spaces or commas separate. The first fault ends the list."""
    numbers: list[float] = []
    place = GAP.match(text).end()  # pyright: ignore[reportOptionalMemberAccess]
    while len(numbers) < most and (match := NUMBER.match(text, place)) is not None:
        numbers.append(_bounded(float(match[0])))
        place = GAP.match(text, match.end()).end()  # pyright: ignore[reportOptionalMemberAccess]
    return numbers


def read_view_box(text: str) -> tuple[float, float, float, float] | None:
    """Return left, top, width and height of a viewBox; None unless it is four numbers with positive sizes."""
    numbers = read_numbers(text, 5)
    if len(numbers) != 4 or numbers[2] <= 0 or numbers[3] <= 0:
        return None
    return numbers[0], numbers[1], numbers[2], numbers[3]


def _rotation(degrees: float, x: float = 0.0, y: float = 0.0) -> Matrix:
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return Matrix(1, 0, 0, 1, x, y).times(Matrix(cos, sin, -sin, cos)).times(Matrix(1, 0, 0, 1, -x, -y))


FUNCTIONS: dict[str, tuple[tuple[int, ...], Callable[..., Matrix]]] = {
    "matrix": ((6,), Matrix),
    "translate": ((1, 2), lambda x, y=0.0: Matrix(e=x, f=y)),
    "scale": ((1, 2), lambda x, y=None: Matrix(a=x, d=x if y is None else y)),
    "rotate": ((1, 3), _rotation),
    "skewX": ((1,), lambda angle: Matrix(c=math.tan(math.radians(angle)))),
    "skewY": ((1,), lambda angle: Matrix(b=math.tan(math.radians(angle)))),
}
"""Function of a transform -> (possible numbers of arguments, its map)."""


def read_transform(text: str, most: int = 100) -> Matrix | None:
    """Return the map of a `transform`; None if it is wrong anywhere, or has too many functions or too large numbers."""
    if text.strip() in ("", "none"):
        return Matrix()
    matrix, place = Matrix(), 0
    for _ in range(most):
        match = TRANSFORM.match(text, place)
        if match is None:
            break
        counts, function = FUNCTIONS[match[1]]
        words = [word for word in re.split(r"[\s,]+", match[2].strip().replace("deg", "").replace("px", "")) if word]
        numbers = [read_number(word) for word in words]
        numbers = numbers if None not in numbers else read_numbers(match[2])
        if len(numbers) not in counts:
            return None
        matrix, place = matrix.times(function(*numbers)), match.end()
    return matrix if not text[place:].strip(" \t\r\n,;") and all(abs(n) <= LARGEST for n in matrix) else None


ORIGINS = {"left": "0%", "top": "0%", "center": "50%", "right": "100%", "bottom": "100%"}
"""Word of `transform-origin` -> its share of the viewport."""


def read_origin(text: str, width: float, height: float, em: float = 16.0) -> tuple[float, float]:
    """Return the point of `transform-origin` in a viewport of that size; (0, 0) for what is none."""
    words = text.lower().split()[:2]
    if words[:1] in (["top"], ["bottom"]) or words[1:] in (["left"], ["right"]):
        words = [*words[1:], *(["center"] if len(words) == 1 else []), words[0]]
    words = [ORIGINS.get(word, word) for word in words] + ["50%"] * (len(words) == 1)
    point = [read_length(word, whole=whole, em=em) for word, whole in zip(words, (width, height), strict=False)]
    return (0.0, 0.0) if len(point) != 2 or point[0] is None or point[1] is None else (point[0], point[1])


def read_colour(text: str) -> tuple[float, float, float, float] | None:
    """Return red, green, blue and alpha in [0, 1] of a CSS colour; None for `currentColor` and for no colour."""
    if len(text) > 200:
        return None
    colour = parse_color(text.strip())
    channels = None if colour is None or isinstance(colour, str) else srgb_of(colour)
    if channels is None or len(channels) != 4 or not all(map(math.isfinite, channels)):
        return None
    red, green, blue, alpha = (min(1.0, max(0.0, channel)) for channel in channels)
    return red, green, blue, alpha


def read_reference(text: str) -> tuple[str, str] | None:
    """Return (id, rest) of `url(#id) rest`; None if it is no reference within the document."""
    match = URL.fullmatch(text.strip())
    return None if match is None else (match[1] or match[2] or match[3], match[4].strip())


def read_paint(text: str, current: str = "black") -> Paint | None:
    """Return the value of `fill` or `stroke`; None for what is no paint.

    Args:
        current: value of the property `color`, for `currentColor`.
    """
    word = text.strip()
    if word.lower() in ("none", "transparent"):
        return Paint(None)
    if (reference := read_reference(word)) is not None:
        return Paint(_colour(reference[1], current), reference[0])
    colour = _colour(word, current)
    return None if colour is None else Paint(colour)


def _colour(word: str, current: str) -> tuple[float, float, float, float] | None:
    """Return a colour or `currentColor`. A second reference is none: it is no fallback of a first one."""
    return read_colour(current if word.lower() == "currentcolor" else word)


def number_text(value: float) -> str:
    """Return a number as SVG code writes it, with nine digits at most."""
    text = f"{value:.9g}"
    return "0" if text == "-0" else text


def numbers_text(values: Sequence[float]) -> str:
    """Return numbers with spaces between them."""
    return " ".join(map(number_text, values))
