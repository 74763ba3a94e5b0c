"""Shapes and arrows of a reference as the published evaluator reconstructs them from its SVG code, or from metadata.

The published description is `{"entities": {...}}`, read with its defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from xml.etree.ElementTree import Element

from vlmrl.redaction.redact import excerpt
from vlmrl.tasks.vfig.published.document import (
    Classes,
    Unscorable,
    Work,
    border_style,
    classes,
    distance,
    fill_style,
    fill_styles,
    is_none,
    name_of,
    number,
    numbers,
    parents,
    parse,
    reference_canvas,
    reference_colours,
    refuse,
    resolved,
    stop_colours,
    style_property,
    translation,
)
from vlmrl.tasks.vfig.published.outlines import (
    SHAPES,
    UNDRAWN,
    Box,
    Definitions,
    area,
    claim_label,
    has_shape,
    own_box,
    path_end,
    path_start,
    texts_in,
    union,
)

NOWHERE: Box = (0.0, 0.0, 0.0, 0.0)
"""Bounds of what has none: it is too small to be kept."""
EQUAL_SIDES = 0.10
"""Largest difference of the sides' ratio from 1 for squares, and for ellipses that are circles."""
EQUAL_PATH_SIDES = 0.15
"""The same for the box of a path that is made of curves."""
LEVEL = 5.0
"""Difference below which the heights of the ends of an edge make it horizontal, in pixels."""


def layers(group: Element) -> int:
    """Return the number of a group's groups with a translation: the copies behind a stacked shape."""
    return sum(name_of(child) == "g" and "translate" in child.get("transform", "").lower() for child in group)


def main_child(group: Element) -> Element:
    """Return the first shape without a transform in a group, else the first in one of its groups, else the group."""
    for child in group:
        if name_of(child) in SHAPES and not child.get("transform"):
            return child
    for child in group:
        for grandchild in child if name_of(child) == "g" else ():
            if name_of(grandchild) in SHAPES:
                return grandchild
    return group


def bounds(element: Element, definitions: Definitions) -> Box:
    """Return the box of a shape, a use or a group, as written.

    Translations within a group count only if it has no shape of its own and the document defines something.
    """
    name = name_of(element)
    if name == "use":
        return definitions.use_box(element) or NOWHERE
    if name != "g":
        return own_box(element) or NOWHERE
    shapes = [child for child in element if name_of(child) in SHAPES]
    if not shapes and definitions.by_id and (box := definitions.group_box(element)) is not None:
        return box
    main = main_child(element)
    box = own_box(main) if main is not element else None
    if main is not element and layers(element):
        return box or NOWHERE
    if box is not None and len(shapes) == 1:
        return box
    return union(box for box in map(own_box, shapes) if box is not None) or NOWHERE


def kind_of(element: Element) -> str:
    """Return the kind of a shape of a reference."""
    if name_of(element) != "g":
        return plain_kind(element)
    return plain_kind(main_child(element)) if layers(element) else solid_kind(element)


def plain_kind(element: Element) -> str:
    """Return the kind of a flat shape."""
    name = name_of(element)
    if name == "rect":
        return "square" if _nearly_equal(element, "width", "height") else "rectangle"
    if name == "ellipse":
        return "circle" if _nearly_equal(element, "rx", "ry") else "ellipse"
    if name == "path":
        return _path_kind(element)
    return name if name in ("circle", "polygon") else "rectangle"


def _nearly_equal(element: Element, one: str, other: str) -> bool:
    first, second = number(element.get(one)), number(element.get(other))
    return second > 0 and abs(first / second - 1) <= EQUAL_SIDES


def _path_kind(path: Element) -> str:
    """Return the kind of a path, from the numbers of its curves and arcs."""
    data = path.get("d", "")
    if data.count("a") >= 3:
        return "cloud"
    box = own_box(path)
    if box is not None and (data.count("C") + data.count("c") >= 4 or data.count("A") >= 2):
        width, height = box[2] - box[0], box[3] - box[1]
        return "circle" if height > 0 and abs(width / height - 1) <= EQUAL_PATH_SIDES else "ellipse"
    return "cloud" if sum(map(data.count, "QqCcAa")) >= 4 else "polygon"


def solid_kind(group: Element) -> str:
    """Return the kind of a shape that is drawn as a group: one of the pseudo-3D shapes."""
    names = {name_of(child) for child in group}
    if names & {"ellipse", "circle"}:
        return "3d-cylinder"
    if "rect" in names:
        return "3d-cube"
    polygons = [child.get("points", "") for child in group if name_of(child) == "polygon"]
    if polygons:
        if max(len(numbers(points)) // 2 for points in polygons) >= 5:
            return "3d-hexagon"
        return "3d-trapezoid" if any(map(has_level_edge, polygons)) else "3d-diamond"
    return "3d-cylinder" if "path" in names else "3d-cube"


def has_level_edge(points: str) -> bool:
    """Return whether an edge of a polygon is horizontal within 5 pixels."""
    heights = numbers(points)[1::2]
    return any(abs(heights[i] - heights[i - 1]) < LEVEL for i in range(len(heights)))


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
        label, font = claim_label(box, texts, work, margin=LABEL_MARGIN, inside_first=True)
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
    """Search for shapes in a reference that does not name them. `width`, `height`: of the canvas, in pixels."""

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


FIRST_SHAPE = "shape_0"
"""Shape that stands for an end near no shape."""
REACH = 150
"""Distance of an arrow's end from its shape, in pixels, exclusive."""
MARGIN = 10
"""Width by which a shape is grown for an end of an arrow, in pixels."""
BLACK = "#000000"
ARROWS_COMMENT = re.compile(r"<!--\s*Arrows")
SHAPES_COMMENT = re.compile(r"<!--\s*Shapes")
NAMESPACE = re.compile(r'\sxmlns(?::\w+)?="[^"]*"')
Point = tuple[float, float]
CURVES = re.compile(r"[QTSCAqtsca]")


@dataclass(frozen=True)
class TruthArrow:
    """Arrow of a reference.

    Args:
        key: `arrow_<number>`.
        source, target: keys of the shapes that it joins.
        colour: of its shaft, as written.
        is_curved: whether its shaft has a curve or an arc.
    """

    key: str
    source: str
    target: str
    colour: str
    is_curved: bool


def nearest(x: float, y: float, boxes: Mapping[str, Box], reach: float, work: Work) -> str | None:
    """Return the key of the first nearest box within reach, each grown by MARGIN on every side; None without any."""
    best, best_distance = None, reach
    work.spend(len(boxes))
    for key, box in boxes.items():
        across = max(box[0] - MARGIN - x, 0.0, x - (box[2] + MARGIN))
        away = distance(across, max(box[1] - MARGIN - y, 0.0, y - (box[3] + MARGIN)))
        if away < best_distance:
            best, best_distance = key, away
    return best


def reconstructed_arrows(root: Element, text: str, boxes: Mapping[str, Box], work: Work) -> list[TruthArrow]:
    """Return the arrows of a reference. `text`: its SVG code, for the comments in it; `boxes`: bounds of its shapes."""
    arrows: list[TruthArrow] = []
    for element in arrow_elements(root, text):
        parts = element if name_of(element) == "g" else [element]
        shafts = [part for part in parts if name_of(part) in ("path", "line")]
        colours = [shaft.get("stroke", "") for shaft in shafts if "stroke" in shaft.attrib]
        # The published code reads the course of every shaft, and stops at a broken number in any of them.
        start, end, is_curved = [_course(shaft) for shaft in shafts][-1]
        source = nearest(*start, boxes, REACH, work) if start is not None else None
        target = nearest(*end, boxes, REACH, work)
        if target is not None and target == source:
            others = {key: box for key, box in boxes.items() if key != source}
            target = nearest(*end, others, REACH, work) or target
        arrows.append(
            TruthArrow(
                key=f"arrow_{len(arrows)}",
                source=source or FIRST_SHAPE,
                target=target or FIRST_SHAPE,
                colour=colours[-1] if colours else BLACK,
                is_curved=is_curved,
            )
        )
    return arrows


def _course(shaft: Element) -> tuple[Point | None, Point, bool]:
    """Return start and end of a shaft, and whether it is curved; None for a path that begins with no plain point."""
    if name_of(shaft) == "line":
        start = number(shaft.get("x1")), number(shaft.get("y1"))
        return start, (number(shaft.get("x2")), number(shaft.get("y2"))), False
    data = shaft.get("d", "")
    return path_start(data), path_end(data), CURVES.search(data) is not None


def arrow_elements(root: Element, text: str) -> list[Element]:
    """Return the elements that are arrows: of the section between comments, else of the root, else with markers."""
    section = _section(text)
    groups = [group for group in section if is_arrow_like(group)]
    if groups:
        return groups
    groups = [child for child in root if name_of(child) == "g" and is_arrow_like(child)]
    groups = [group for group in groups if not group.get("id", "").startswith(ID_START)]
    if groups:
        return groups
    return [e for e in root.iter() if name_of(e) in ("line", "path") and _has_marker(e)]


def _has_marker(element: Element) -> bool:
    marker = element.get("marker-end") or element.get("marker-start") or ""
    return not is_none(marker.strip())


def _section(text: str) -> list[Element]:
    """Return the groups between the comments that begin with `Arrows` and with `Shapes`."""
    opening = ARROWS_COMMENT.search(text)
    begin = text.find("-->", opening.end()) if opening is not None else -1
    closing = SHAPES_COMMENT.search(text, begin) if begin >= 0 else None
    if closing is None:
        return []
    section = NAMESPACE.sub("", text[begin + 3 : closing.start()])
    try:
        return [child for child in parse(f"<section>{section}</section>") if child.tag == "g"]
    except Unscorable:
        return []


def read_metadata(metadata: Mapping[str, Any]) -> tuple[dict[str, TruthShape], list[TruthArrow]]:
    """Return shapes and arrows of a description.

    Raises: Unscorable for an entity without what the published code needs.
    """
    entities = metadata.get("entities") if isinstance(metadata, Mapping) else None
    if not isinstance(entities, Mapping):
        refuse("the metadata have no `entities`")
    shapes: dict[str, TruthShape] = {}
    arrows: list[TruthArrow] = []
    for key, entity in entities.items():
        if not isinstance(entity, Mapping):
            refuse(f"{key} of the metadata is not an object")
        if "type" not in entity:
            refuse(f"{key} of the metadata has no `type`")
        if entity["type"] == "arrow":
            arrows.append(_arrow(key, entity))
        else:
            shapes[key] = _shape(key, entity)
    return shapes, sorted(arrows, key=lambda arrow: _number(arrow.key))


def _number(key: str) -> int:
    """Return the number at the end of a key such as `arrow_3`."""
    parts = key.split("_")
    if len(parts) < 2:
        refuse(f"the arrow {key!r} of the metadata has no number")
    try:
        return int(parts[1]) if parts[1].isdigit() else 0
    except ValueError:
        refuse(f"the arrow {key!r} of the metadata has no number")


def _text(key: str, entity: Mapping[str, Any], name: str, default: str | None = "") -> str:
    """Return a text of an entity; "" for null, 0 and the like."""
    if name not in entity:
        if default is None:
            refuse(f"{key} of the metadata has no `{name}`")
        return default
    value = entity[name] or ""
    if not isinstance(value, str):
        refuse(f"`{name}` of {key} in the metadata is not a text: {excerpt(str(value), 80)}")
    return value


def _shape(key: str, entity: Mapping[str, Any]) -> TruthShape:
    return TruthShape(
        key=key,
        kind=entity["type"] if isinstance(entity["type"], str) else None,
        box=_box(key, entity.get("bounds")),
        label=_text(key, entity, "label", None),
        font=_text(key, entity, "font"),
        fill=_text(key, entity, "fillColor"),
        fill_style=_text(key, entity, "fillStyle", "solid"),
        stroke=_text(key, entity, "strokeColor"),
        border=_text(key, entity, "borderStyle", "solid"),
    )


def _box(key: str, bounds: Any) -> Box:
    is_box = isinstance(bounds, list | tuple) and len(bounds) >= 4
    if not is_box or not all(isinstance(edge, int | float) and math.isfinite(edge) for edge in bounds[:4]):
        refuse(f"`bounds` of {key} in the metadata are not four numbers")
    left, top, right, bottom = (float(edge) for edge in bounds[:4])
    return left, top, right, bottom


def _arrow(key: str, entity: Mapping[str, Any]) -> TruthArrow:
    return TruthArrow(
        key=key,
        source=_text(key, entity, "from", None),
        target=_text(key, entity, "to", None),
        colour=_text(key, entity, "color", BLACK),
        is_curved=_text(key, entity, "style") == "curved",
    )
