"""Texts of a figure and the shapes that they label, as the published evaluator joins them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import Work, name_of
from vlmrl.tasks.vfig.published.outlines import Box, centre
from vlmrl.tasks.vfig.published.styles import Fonts, normal, text_of
from vlmrl.tasks.vfig.published.transforms import distance, number, translation

UNDRAWN = {
    "defs", "style", "title", "desc", "marker", "filter", "linearGradient", "radialGradient", "pattern", "symbol",
}  # fmt: skip
"""Elements whose content is not looked at."""
NEAR = 150
"""Distance of a text from the centre of its shape, in pixels, exclusive; texts in the widened box may be farther."""
SAME_COLUMN = 30
"""Distance in x of the lines of one label, in pixels, exclusive."""
NEXT_LINE = 40
"""Distance in y of the lines of one label, in pixels, exclusive."""


@dataclass
class Text:
    """Text of a figure.

    Args:
        x, y: its own position, moved by the translations of its groups, in pixels.
        text: its pieces with spaces between them; never "".
        label: the same, as labels are compared.
        font: its font family; "" without one.
        is_used: whether a shape has it for its label.
    """

    x: float
    y: float
    text: str
    label: str
    font: str
    is_used: bool = False


def texts_in(root: Element, parent_of: Mapping[Element, Element]) -> list[Text]:
    """Return every text of a figure, in document order; positions of tspans and classes do not count."""
    return [] if name_of(root) in UNDRAWN else list(_texts(root, 0.0, 0.0, Fonts(parent_of, {})))


def _texts(element: Element, dx: float, dy: float, fonts: Fonts) -> Iterator[Text]:
    for child in element:
        name = name_of(child)
        if name in UNDRAWN:
            continue
        if name == "text":
            if text := text_of(child):
                x, y = number(child.get("x")) + dx, number(child.get("y")) + dy
                yield Text(x, y, text, normal(text), fonts.of(child))
            continue
        move_x, move_y = translation(child.get("transform")) if name == "g" else (0.0, 0.0)
        yield from _texts(child, dx + move_x, dy + move_y, fonts)


def is_inside(x: float, y: float, box: Box, margin: float = 0.0) -> bool:
    """Return whether a point lies in a box that is widened on every side; the edges belong to it."""
    return box[0] - margin <= x <= box[2] + margin and box[1] - margin <= y <= box[3] + margin


def claim_label(
    box: Box, texts: Sequence[Text], work: Work, *, margin: float, inside_first: bool
) -> tuple[str, str, list[Text]]:
    """Return label, font and texts of a shape, and mark the texts as used; ("", "", []) without any.

    Args:
        box: the shape's.
        texts: all of the figure.
        work: counter of the comparisons.
        margin: pixels by which the box is widened.
        inside_first: whether texts in the box itself come first, in document order, whatever their distance.
    """
    middle_x, middle_y = centre(box)
    work.spend(len(texts))
    candidates: list[tuple[float, Text]] = []
    for text in texts:
        if text.is_used:
            continue
        away = distance(text.x - middle_x, text.y - middle_y)
        if is_inside(text.x, text.y, box, margin) or away < NEAR:
            is_first = inside_first and is_inside(text.x, text.y, box)
            candidates.append((-1.0 if is_first else away, text))
    if not candidates:
        return "", "", []
    candidates.sort(key=lambda candidate: candidate[0])
    first = candidates[0][1]
    lines = [first]
    for _, text in candidates[1:]:
        work.spend(len(lines))
        if abs(text.x - first.x) < SAME_COLUMN and any(abs(text.y - line.y) < NEXT_LINE for line in lines):
            lines.append(text)
    lines.sort(key=lambda line: line.y)
    for line in lines:
        line.is_used = True
    return " ".join(line.text for line in lines), lines[0].font, lines
