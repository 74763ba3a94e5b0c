"""Filters of figures for a dataset: code that is too long, repeats itself, or is mostly paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from vlmrl.svg.parse import Node, parse_svg

BASIC, CONNECTORS, COMPLEX = ("rect", "circle", "ellipse"), ("line", "polyline"), ("path", "polygon")
UNDRAWN = ("defs", "symbol", "clipPath", "mask", "marker", "pattern")
"""Elements whose content is shown by reference alone."""
PERIODS = range(10, 201)
REPEATS = 10
"""Number of equal pieces at the end of a code that a model or a converter was stuck in."""


@dataclass(frozen=True)
class Filters:
    """Filters of a dataset.

    Args:
        min_basic: least share of basic shapes and connectors among all shapes; 0 = no filter.
        max_complex: largest number of paths and polygons; 0 = no filter.
        max_chars: largest number of characters.
        max_aspect: largest ratio of the sides of the picture.
    """

    min_basic: float = 0.0
    max_complex: int = 0
    max_chars: int = 30_000
    max_aspect: float = 8.0

    def reason(self, svg: str) -> str:
        """Return why code is left out; "" if it is not. Raises: SvgRefused for code that cannot be read."""
        if len(svg) > self.max_chars:
            return f"its code has {len(svg):,} characters; the limit is {self.max_chars:,}"
        if repeats(svg):
            return f"its code ends with a piece that is there {REPEATS} times"
        if not self.min_basic and not self.max_complex:
            return ""
        simple, complex_shapes = count_shapes(svg)
        if self.max_complex and complex_shapes > self.max_complex:
            return f"it has {complex_shapes:,} paths and polygons; the limit is {self.max_complex:,}"
        share = simple / max(1, simple + complex_shapes)
        if share < self.min_basic:
            return f"{share:.0%} of its shapes are basic; the least share is {self.min_basic:.0%}"
        return ""


def repeats(text: str) -> bool:
    """Return whether a text ends with the same piece of 10 to 200 characters ten times, end tags apart."""
    body = text.rstrip()
    while body.endswith(">") and "</" in body and body.rfind("</") == body.rfind("<"):
        body = body[: body.rfind("</")].rstrip()
    for period in PERIODS:
        tail = body[-period * REPEATS :]
        if len(tail) == period * REPEATS and tail[period:] == tail[:-period]:
            return True
    return False


def count_shapes(svg: str) -> tuple[int, int]:
    """Return the number of basic shapes and connectors, and of paths and polygons, that are drawn.

    Raises: SvgRefused as `parse_svg`.
    """
    tags = [node.tag for node in _drawn(parse_svg(svg))]
    return sum(tag in (*BASIC, *CONNECTORS) for tag in tags), sum(tag in COMPLEX for tag in tags)


def _drawn(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(child for child in node.children if child.tag not in UNDRAWN)
