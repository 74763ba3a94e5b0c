"""Kinds and bounds of the shapes of a reference, as the published evaluator infers them from its SVG code."""

from __future__ import annotations

from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import name_of
from vlmrl.tasks.vfig.published.outlines import SHAPES, Box, Definitions, own_box, union
from vlmrl.tasks.vfig.published.transforms import number, numbers

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
