"""Colours of CSS Color Module Level 4 in sRGB, which is all that a figure is drawn in.

Source: CSS Color Module Level 4, section 17, sample code for conversions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
