"""Arrows of a reference, reconstructed from its SVG code as the published evaluator does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import Unscorable, Work, name_of, parse
from vlmrl.tasks.vfig.published.outlines import Box, path_end, path_start
from vlmrl.tasks.vfig.published.paints import is_none
from vlmrl.tasks.vfig.published.transforms import distance, number
from vlmrl.tasks.vfig.published.truth_shapes import ID_START, is_arrow_like

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


def distance_to_box(x: float, y: float, box: Box, margin: float = MARGIN) -> float:
    """Return the distance of a point from a box grown on every side, in pixels; 0 inside."""
    across = max(box[0] - margin - x, 0.0, x - (box[2] + margin))
    return distance(across, max(box[1] - margin - y, 0.0, y - (box[3] + margin)))


def nearest(x: float, y: float, boxes: Mapping[str, Box], reach: float, work: Work) -> str | None:
    """Return the key of the first nearest box within reach; None without any."""
    best, best_distance = None, reach
    work.spend(len(boxes))
    for key, box in boxes.items():
        away = distance_to_box(x, y, box)
        if away < best_distance:
            best, best_distance = key, away
    return best


def reconstructed_arrows(root: Element, text: str, boxes: Mapping[str, Box], work: Work) -> list[TruthArrow]:
    """Return the arrows of a reference.

    Args:
        root: root of the document.
        text: its SVG code, for the comments in it.
        boxes: bounds of its shapes.
        work: counter of the comparisons.
    """
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
