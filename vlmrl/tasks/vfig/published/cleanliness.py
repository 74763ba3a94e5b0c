"""Published cleanliness of SVG code: the share of its shapes that are simple ones."""

from __future__ import annotations

SIMPLE = ("rect", "circle", "ellipse", "line", "polyline")
"""Elements that count as simple."""
COMPLEX = ("path", "polygon")
"""Elements that count as complex."""
TINY = 1e-9
"""Addend of the divisor, as published: code with n simple shapes only scores n / (n + 1e-9)."""


def published_cleanliness(svg: str) -> float | None:
    """Return simple shapes / all shapes, in [0, 1); None for code without a shape or text, 0 with text only.

    Names are counted as pieces of text, in upper and lower case: `linearGradient` is a line, and comments count.
    """
    lower = svg.lower()
    simple, others = (sum(lower.count(f"<{name}") for name in names) for names in (SIMPLE, COMPLEX))
    if not simple + others and "<text" not in svg:
        return None
    return simple / (simple + others + TINY)
