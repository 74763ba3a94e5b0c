"""Shapes of a reference, reconstructed from its SVG code as the published evaluator does, or read from its metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from xml.etree.ElementTree import Element

from vlmrl.redaction.redact import excerpt
from vlmrl.tasks.vfig.published.document import Work, name_of, parents, refuse
from vlmrl.tasks.vfig.published.labels import UNDRAWN, claim_label, texts_in
from vlmrl.tasks.vfig.published.outlines import SHAPES, Box, Definitions, area, has_shape, own_box
from vlmrl.tasks.vfig.published.paints import (
    border_style,
    fill_style,
    fill_styles,
    reference_colours,
    resolved,
    stop_colours,
)
from vlmrl.tasks.vfig.published.styles import Classes, classes, style_property
from vlmrl.tasks.vfig.published.transforms import number, reference_canvas, translation
from vlmrl.tasks.vfig.published.truth_types import bounds, kind_of, main_child

ID_START = "shape_"
"""Start of the id of a shape; a number follows."""
SMALLEST = 5
"""Smallest width and height of a shape of a reference, in pixels."""
SMALLEST_USE = 15
"""Smallest width and height of a use that is a shape by itself, in pixels."""
BACKGROUND_EDGE = 5
"""Difference of width and height of a background from those of the canvas, in pixels, exclusive."""
BACKGROUND_SHARE = 0.5
"""Largest share of the canvas that a rectangle may cover."""
PLAIN = ("solid", "none")
"""Fill styles without a pattern or gradient."""
LABEL_MARGIN = 50
"""Width of the surroundings of a shape where its label may be, in pixels."""


@dataclass(frozen=True)
class TruthShape:
    """Shape of a reference.

    Args:
        key: `shape_<number>`.
        kind: rectangle, circle, 3d-cube ...; None if metadata give none.
        box: bounds, in whole pixels if reconstructed.
        label: its text; the key if it has none.
        font: font family of the label; "" if unknown.
        fill, stroke: colours as written; fill is a colour of the gradient where there is one.
        fill_style: solid, none, dots ...
        border: solid, dashed, dotted or dash-dot.
    """

    key: str
    kind: str | None
    box: Box
    label: str
    font: str
    fill: str
    fill_style: str
    stroke: str
    border: str


def reconstructed_shapes(root: Element, work: Work) -> dict[str, TruthShape]:
    """Return the shapes of a reference by their keys, in the order of their numbers."""
    definitions = Definitions(root, work)
    styles, colours = fill_styles(root), reference_colours(root)
    texts = texts_in(root, parents(root))
    shapes: dict[str, TruthShape] = {}
    for number_text, element in shape_elements(root, definitions):
        work.spend()
        box = bounds(element, definitions)
        if box[2] - box[0] < SMALLEST or box[3] - box[1] < SMALLEST:
            continue
        key = f"shape_{number_text}"
        label, font, _ = claim_label(box, texts, work, margin=LABEL_MARGIN, inside_first=True)
        look = _look(element, definitions, styles, colours)
        shapes[key] = TruthShape(key, kind_of(element), _whole(box), label or key, font, *look)
    return shapes


def with_written_colours(shapes: Mapping[str, TruthShape], root: Element) -> dict[str, TruthShape]:
    """Return shapes whose missing colours are taken from the element with the shape's key as its id.

    Of a group the largest shape counts; only attributes count, and of several elements with an id the last.
    """
    colours = stop_colours(root)
    written: dict[str, Element] = {}
    for element in root.iter():
        key = element.get("id", "")
        if key in shapes:
            written[key] = _largest(element) if name_of(element) == "g" else element
    return {
        key: replace(
            shape,
            fill=shape.fill or resolved(written[key].get("fill", ""), colours),
            stroke=shape.stroke or written[key].get("stroke", ""),
        )
        if key in written
        else shape
        for key, shape in shapes.items()
    }


def _largest(group: Element) -> Element:
    """Return the first largest shape in a group; an element without attributes if none has an area."""
    best, best_area = Element("none"), 0.0
    for child in group:
        box = own_box(child)
        if box is not None and area(box) > best_area:
            best, best_area = child, area(box)
    return best


def _whole(box: Box) -> Box:
    """Return a box in whole pixels. Raises: Unscorable for one that is not finite."""
    try:
        left, top, right, bottom = (round(edge) for edge in box)
    except (ValueError, OverflowError):
        refuse("a shape of the reference has bounds that are not finite")
    return left, top, right, bottom


def _look(
    element: Element, definitions: Definitions, styles: Mapping[str, str], colours: Mapping[str, str]
) -> tuple[str, str, str, str]:
    """Return fill, fill style, stroke and border style of a shape; colours are read from attributes only.

    A plain fill yields to the first pattern or gradient in the group.
    """
    name = name_of(element)
    main = main_child(element) if name == "g" else definitions.target(element) if name == "use" else element
    main = element if main is None else main
    fill = resolved(main.get("fill") or element.get("fill", ""), colours)
    style = fill_style(main, styles, {})
    if style in PLAIN:
        for other in element.iter():
            definitions.work.spend()
            other_style = fill_style(other, styles, {}) if name_of(other) in SHAPES else "none"
            if other_style in PLAIN:
                continue
            style, colour = other_style, resolved(other.get("fill", ""), colours)
            if colour and not colour.startswith("url("):
                fill = colour
            break
    return fill, style, main.get("stroke") or element.get("stroke", ""), border_style(main, {})


def shape_elements(root: Element, definitions: Definitions) -> list[tuple[str, Element]]:
    """Return (number, element) of the shapes: those with an id `shape_<number>`, or else all that look like one."""
    named: dict[str, Element] = {}
    for element in root.iter():
        start, prefix, digits = element.get("id", "").partition(ID_START)
        if not start and prefix and digits.isdigit():
            named.setdefault(digits, element)
    if named:
        return sorted(named.items(), key=lambda item: _whole_number(item[0]))
    width, height = reference_canvas(root)
    search = _Search(definitions, classes(root), width, height)
    return [(str(i), element) for i, element in enumerate(search.shapes(root, 0.0, 0.0))]


def _whole_number(digits: str) -> int:
    """Return a number. Raises: Unscorable for digits such as those of powers, and for thousands of them."""
    try:
        return int(digits)
    except ValueError:
        refuse(f"the id shape_{excerpt(digits, 80)} has no number")


class _Search:
    """Search for shapes in a reference that does not name them.

    Args:
        definitions: what a use refers to.
        rules: style sheets.
        width, height: of the canvas, in pixels.
    """

    def __init__(self, definitions: Definitions, rules: Classes, width: float, height: float) -> None:
        self.definitions, self.rules, self.width, self.height = definitions, rules, width, height

    def shapes(self, parent: Element, dx: float, dy: float) -> Iterator[Element]:
        """Yield the shapes below an element, in document order; translations of their groups move primitives only."""
        for child in parent:
            name = name_of(child)
            if name in UNDRAWN:
                continue
            if name in SHAPES:
                if not self._is_left_out(child, name):
                    yield _moved(child, dx, dy)
            elif name == "use":
                box = self.definitions.use_box(child)
                if box is not None and box[2] - box[0] >= SMALLEST_USE and box[3] - box[1] >= SMALLEST_USE:
                    yield child
            elif name == "g":
                move_x, move_y = translation(child.get("transform"))
                if _is_container(child):
                    yield from self.shapes(child, dx + move_x, dy + move_y)
                elif has_shape(child) and (_has(child, "text") or not is_arrow_like(child)):
                    yield child

    def _is_left_out(self, element: Element, name: str) -> bool:
        """Return whether a shape is without fill, a background, or a rectangle over half of the canvas."""
        if style_property(element, "fill", self.rules).strip().lower() == "none":
            return True
        if name != "rect":
            return False
        if "%" in element.get("width", "") or "%" in element.get("height", ""):
            return True
        width, height = number(element.get("width")), number(element.get("height"))
        if abs(width - self.width) < BACKGROUND_EDGE and abs(height - self.height) < BACKGROUND_EDGE:
            return True
        has_canvas = self.width > 0 and self.height > 0
        return has_canvas and width * height / (self.width * self.height) > BACKGROUND_SHARE


def _moved(element: Element, dx: float, dy: float) -> Element:
    """Return a copy of an element with its position moved; points and path data stay where they are."""
    if not dx and not dy:
        return element
    copy = Element(element.tag, dict(element.attrib))
    copy.extend(element)
    for name, move in (("x", dx), ("cx", dx), ("y", dy), ("cy", dy)):
        if name in copy.attrib:
            copy.set(name, str(number(copy.get(name)) + move))
    return copy


def _has(group: Element, name: str) -> bool:
    return any(name_of(child) == name for child in group)


def _is_container(group: Element) -> bool:
    """Return whether a group holds shapes rather than being one."""
    parts = sum(name_of(child) in SHAPES or name_of(child) == "use" for child in group)
    return (parts > 2 or "transform" in group.attrib) and not (_has(group, "use") and _has(group, "text"))


def is_arrow_like(group: Element) -> bool:
    """Return whether a group has a path or line, and a polygon."""
    return (_has(group, "path") or _has(group, "line")) and _has(group, "polygon")
