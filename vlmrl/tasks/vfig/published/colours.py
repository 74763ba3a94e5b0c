"""Colours as the published evaluator reads and compares them: a short list of names, and a distance in RGB."""

from __future__ import annotations

import math
import re

NAMED = {
    "aliceblue": "f0f8ff", "aqua": "00ffff", "beige": "f5f5dc", "black": "000000", "blue": "0000ff", "brown": "a52a2a",
    "coral": "ff7f50", "crimson": "dc143c", "cyan": "00ffff", "darkblue": "00008b", "darkgray": "a9a9a9",
    "darkgreen": "006400", "darkgrey": "a9a9a9", "darkorange": "ff8c00", "darkred": "8b0000", "deepskyblue": "00bfff",
    "dimgray": "696969", "dimgrey": "696969", "dodgerblue": "1e90ff", "floralwhite": "fffaf0", "fuchsia": "ff00ff",
    "ghostwhite": "f8f8ff", "gold": "ffd700", "gray": "808080", "green": "008000", "grey": "808080",
    "honeydew": "f0fff0", "hotpink": "ff69b4", "indigo": "4b0082", "ivory": "fffff0", "khaki": "f0e68c",
    "lavender": "e6e6fa", "lightblue": "add8e6", "lightgray": "d3d3d3", "lightgreen": "90ee90", "lightgrey": "d3d3d3",
    "lightyellow": "ffffe0", "lime": "00ff00", "linen": "faf0e6", "magenta": "ff00ff", "maroon": "800000",
    "mintcream": "f5fffa", "navy": "000080", "oldlace": "fdf5e6", "olive": "808000", "orange": "ffa500",
    "pink": "ffc0cb", "purple": "800080", "red": "ff0000", "royalblue": "4169e1", "salmon": "fa8072",
    "seashell": "fff5ee", "silver": "c0c0c0", "slategray": "708090", "slategrey": "708090", "snow": "fffafa",
    "steelblue": "4682b4", "tan": "d2b48c", "teal": "008080", "tomato": "ff6347", "turquoise": "40e0d0",
    "violet": "ee82ee", "white": "ffffff", "whitesmoke": "f5f5f5", "yellow": "ffff00",
}  # fmt: skip
"""The 64 names that the published code knows. CSS has 148; a colour by another name scores 0, even against itself."""
TRIPLE = re.compile(r"rgba?\(\s*([\d.]+%?)\s*,\s*([\d.]+%?)\s*,\s*([\d.]+%?)", re.IGNORECASE)
FARTHEST = 255 * math.sqrt(3)
"""Distance of black and white."""
PER_CENT = 2.55
"""Step of a per cent; multiplied and cut, so that 100% is 254."""


def rgb(text: str) -> tuple[int, int, int] | None:
    """Return a colour in 0 to 255; None for what the published code cannot read, transparent colours among them."""
    text = text.strip()
    triple = TRIPLE.match(text)
    if triple is not None:
        values = [_channel(part) for part in triple.groups()]
        return None if None in values else tuple(values)  # type: ignore[return-value]
    digits = (NAMED.get(text.lower()) or text).lstrip("#")
    if len(digits) == 3:
        digits = "".join(2 * digit for digit in digits)
    if len(digits) != 6:
        return None
    try:
        return int(digits[0:2], 16), int(digits[2:4], 16), int(digits[4:6], 16)
    except ValueError:
        return None


def _channel(text: str) -> int | None:
    try:
        # A number of 400 digits is infinite.
        return int(float(text[:-1]) * PER_CENT) if text.endswith("%") else round(float(text))
    except (ValueError, OverflowError):
        return None


def is_reference(text: str) -> bool:
    """Return whether a colour is a reference to a gradient or a pattern."""
    return text.strip().lower().startswith("url(")


def is_nothing(text: str) -> bool:
    """Return whether a colour is absent, `none` or `transparent`."""
    return text.strip().lower() in ("", "none", "transparent")


def colour_score(one: str | None, other: str | None) -> float:
    """Return how near two colours are, in [0, 1].

    1 - distance in RGB / 441.67; 1 if both are none, 0 if one is; 0.5 for two references, 0.3 for one; 0 for a colour
    that is not understood.
    """
    one, other = one or "", other or ""
    references = is_reference(one) + is_reference(other)
    if references:
        return 0.5 if references == 2 else 0.3
    if is_nothing(one) or is_nothing(other):
        return float(is_nothing(one) and is_nothing(other))
    first, second = rgb(one), rgb(other)
    if first is None or second is None:
        return 0.0
    away = math.sqrt(sum((a - b) ** 2 for a, b in zip(first, second, strict=True)))
    return max(0.0, 1.0 - away / FARTHEST)
