"""Facts about the code of a figure that need no picture: its kinds of shapes, repetition, its text in one spelling.

Source of the counts and the filter: the appendix of the paper on VFig (arXiv 2603.24575). There `<line` is counted as a
text; here elements are counted, so that a `linearGradient` is no line, and what is only defined is not counted.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from dataclasses import dataclass

from vlmrl.svg.parse import Node, parse_svg

BASIC = frozenset(("rect", "circle", "ellipse"))
CONNECTORS = frozenset(("line", "polyline"))
COMPLEX = frozenset(("path", "polygon"))
NOT_DRAWN = frozenset(("defs", "clipPath", "mask", "pattern", "marker", "symbol"))
"""Elements whose content shows only where others refer to it."""
MOST_PERIOD = 24
"""Longest sequence of tags that is searched for repetition."""
LEAST_REPEATS, LEAST_CHARS = 12, 400
"""A text repeats itself if a sequence of tags comes this often in a row, and these have this many characters."""
LONG_TEXT, LEAST_SHARE = 4_000, 0.02
"""A longer text repeats itself if zlib makes it smaller than this share."""
TAG = re.compile(r"<[^<>]*>[^<]*")
BETWEEN = re.compile(r"\s*([<>=])\s*")


@dataclass(frozen=True)
class ShapeCounts:
    """Numbers of elements that are drawn: rectangles and round shapes, lines, paths and polygons, texts."""

    basic: int
    connectors: int
    complex: int
    texts: int

    @property
    def shapes(self) -> int:
        """Number of elements that are drawn, without texts."""
        return self.basic + self.connectors + self.complex

    @property
    def simple_share(self) -> float | None:
        """Share of the shapes that are basic or connectors, in [0, 1]; None without shapes."""
        return (self.basic + self.connectors) / self.shapes if self.shapes else None


def count_shapes(svg: str) -> ShapeCounts:
    """Return the counts of a figure's code. Raises: SvgRefused for a text that is no SVG or beyond the limits."""
    numbers: dict[str, int] = dict.fromkeys(("basic", "connectors", "complex", "texts"), 0)
    kinds = {**dict.fromkeys(BASIC, "basic"), **dict.fromkeys(CONNECTORS, "connectors")}
    kinds |= {**dict.fromkeys(COMPLEX, "complex"), "text": "texts"}
    waiting: list[Node] = [parse_svg(svg)]
    while waiting:
        node = waiting.pop()
        if node.tag in kinds:
            numbers[kinds[node.tag]] += 1
        if node.tag not in NOT_DRAWN:
            waiting.extend(node.children)
    return ShapeCounts(**numbers)


def repetition(svg: str) -> str:
    """Return how a text repeats itself, as a broken writer's does, in words; "" if it does not.

    Time: linear in the length of the text.
    """
    tags = [tag.strip() for tag in TAG.findall(svg)]
    for period in range(1, min(MOST_PERIOD, len(tags) // LEAST_REPEATS) + 1):
        run = 0
        for i in range(period, len(tags)):
            run = run + 1 if tags[i] == tags[i - period] else 0
            if run >= period * (LEAST_REPEATS - 1):
                block = "".join(tags[i - period + 1 : i + 1])
                if "=" in block and len(block) * LEAST_REPEATS >= LEAST_CHARS:
                    return f"{period} tag{'s' * (period > 1)} come {LEAST_REPEATS} times in a row or more"
    data = svg.encode("utf-8", "replace")
    if len(data) > LONG_TEXT and len(zlib.compress(data)) < LEAST_SHARE * len(data):
        return f"zlib makes it smaller than {LEAST_SHARE:.0%}"
    return ""


def code_hash(svg: str) -> str:
    """Return a hash of a figure's code: equal for texts that differ in comments and in white space around tags."""
    text = BETWEEN.sub(r"\1", " ".join(_without_comments(svg).split()))
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]


def _without_comments(svg: str) -> str:
    parts, place = [], 0
    while (start := svg.find("<!--", place)) >= 0 and (end := svg.find("-->", start)) >= 0:
        parts.append(svg[place:start])
        place = end + 3
    return "".join([*parts, svg[place:]])
