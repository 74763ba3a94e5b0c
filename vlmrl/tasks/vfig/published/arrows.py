"""Arrows of a response, and arrowheads of a reference, as the published evaluator extracts them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import Work, name_of, parents
from vlmrl.tasks.vfig.published.outlines import Box, path_end, path_length, path_start
from vlmrl.tasks.vfig.published.paints import is_none
from vlmrl.tasks.vfig.published.styles import Classes, arrow_classes
from vlmrl.tasks.vfig.published.transforms import distance, number, numbers, translation
from vlmrl.tasks.vfig.published.truth_arrows import CURVES

Point = tuple[float, float]
SHORTEST = 20
"""Smallest distance of the ends of an arrow, in pixels."""
CLOSED = 1
"""Distance in x and in y of the ends of a path, in pixels, below which it is closed."""
MARKER_SIZE = 10
"""Width and height of a marker that gives none."""
SAMPLES = 11
"""Points of an arrow's chord that are looked up in the shapes."""
INSIDE_SHARE = 0.8
"""Share of these points from which an arrow is part of a shape."""
SHORT_SHARE = 0.15
"""Share of a shape's diagonal below which an arrow with its middle in the shape is part of it."""
HEAD_STROKE = 2.0
"""Stroke width of an arrow of the reference that gives none."""
HIDDEN = 10
"""Distance from the edges of a shape from which a tip in it is hidden, in pixels."""


@dataclass(frozen=True)
class DrawnArrow:
    """Arrow of a response.

    Args:
        start, end: its ends, moved by the translations of its ancestors.
        length: of its steps with straight lines for curves, in pixels.
        colour: of its stroke, as written.
        is_curved: whether it has a curve or an arc.
        has_head: whether it has a marker at its end, or a polygon in its group.
        head: width of the head in widths of the stroke; 0 if unknown.
    """

    start: Point
    end: Point
    length: float
    colour: str
    is_curved: bool
    has_head: bool
    head: float


@dataclass(frozen=True)
class TruthHead:
    """Arrowhead of a reference.

    Args:
        width: vertical extent of its polygon, in pixels, whatever the arrow's direction.
        stroke: stroke width of its shaft, in pixels.
        is_visible: whether its tip is not deep in a shape of the reference.
    """

    width: float
    stroke: float
    is_visible: bool


@dataclass(frozen=True)
class _Marker:
    width: float
    is_in_strokes: bool


class _Reader:
    """Reader of the arrows of a response.

    Args:
        root: root of the document.
    """

    def __init__(self, root: Element) -> None:
        self.root = root
        self.parent_of = parents(root)
        self.rules: Classes = arrow_classes(root)
        self._looks: dict[tuple[Element, str], str] = {}
        self._moves: dict[Element, Point] = {}
        self._heads: dict[Element, float | None] = {}
        self.markers = {e.get("id", ""): _marker(e) for e in root.iter() if name_of(e) == "marker"}

    def inherited(self, element: Element, name: str) -> str:
        """Return an attribute or a class's property of the element or of the nearest group with one.

        `style` does not count.
        """
        key = element, name
        if key not in self._looks:
            self._looks[key] = self._look(element, name)
        return self._looks[key]

    def _look(self, element: Element, name: str) -> str:
        if value := element.get(name):
            return value
        for class_name in element.get("class", "").split():
            if name in self.rules.get(class_name, ()):
                return self.rules[class_name][name]
        above = self.parent_of.get(element)
        while above is not None and name_of(above) != "g":
            above = self.parent_of.get(above)
        return self.inherited(above, name) if above is not None else ""

    def shift(self, element: Element) -> Point:
        """Return the sum of the translations of an element and its ancestors."""
        x = y = 0.0
        above = self.parent_of.get(element)
        while above is not None:
            if above not in self._moves:
                self._moves[above] = translation(above.get("transform"))
            x, y = x + self._moves[above][0], y + self._moves[above][1]
            above = self.parent_of.get(above)
        move_x, move_y = translation(element.get("transform"))
        return x + move_x, y + move_y

    def arrow(self, element: Element) -> DrawnArrow | None:
        """Return a path or line as an arrow; None if it is none."""
        stroke = self.inherited(element, "stroke")
        ends = _ends(element)
        if not stroke or ends is None:
            return None
        if name_of(element) == "path" and not is_none(self.inherited(element, "fill")):
            return None
        dx, dy = self.shift(element)
        start, end = (ends[0][0] + dx, ends[0][1] + dy), (ends[1][0] + dx, ends[1][1] + dy)
        chord = distance(end[0] - start[0], end[1] - start[1])
        if chord < SHORTEST:
            return None
        is_path, data = name_of(element) == "path", element.get("d", "")
        length = path_length(data) if is_path else chord
        is_curved = is_path and CURVES.search(data) is not None
        width = number(self.inherited(element, "stroke-width"), 1.0)
        return DrawnArrow(start, end, length, stroke, is_curved, *self._head(element, width))

    def _head(self, element: Element, stroke: float) -> tuple[bool, float]:
        """Return whether an arrow has a head, and its width in widths of the stroke."""
        stroke = stroke if stroke > 0 else 1.0
        marker_end = self.inherited(element, "marker-end")
        if "url(#" in marker_end:
            key = marker_key(marker_end)
            marker = self.markers.get(key) if key is not None else None
            if marker is None:
                return True, 0.0
            return True, marker.width if marker.is_in_strokes else marker.width / stroke
        group = self.parent_of.get(element)
        if group is None or name_of(group) != "g":
            return False, 0.0
        if group not in self._heads:
            self._heads[group] = _polygon_height(group)
        height = self._heads[group]
        return height is not None, (height or 0.0) / stroke


def marker_key(text: str) -> str | None:
    """Return the id that a marker's reference names, which may stand anywhere in the text; None without one."""
    at = text.find("url(#")
    while at >= 0:
        end = text.find(")", at)
        if end < 0:
            return None
        if end > at + 5:
            return text[at + 5 : end]
        at = text.find("url(#", end)
    return None


def _polygon_height(group: Element) -> float | None:
    """Return the height of the first polygon of a group that has three corners; None without any."""
    for child in group:
        points = numbers(child.get("points", "")) if name_of(child) == "polygon" else []
        if len(points) >= 6:
            return _extent(points[1::2])
    return None


def _extent(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _marker(marker: Element) -> _Marker:
    """Return a marker with the height of the last path or polygon in it, else its own."""
    width = number(marker.get("markerHeight"), MARKER_SIZE)
    for child in marker:
        # Every second number of a path counts as a height, whatever it is.
        data = child.get({"path": "d", "polygon": "points"}.get(name_of(child), ""), "")
        heights = numbers(data)[1::2]
        if len(heights) >= (2 if name_of(child) == "path" else 3):
            width = _extent(heights)
    return _Marker(width, marker.get("markerUnits", "strokeWidth") == "strokeWidth")


def _ends(element: Element) -> tuple[Point, Point] | None:
    """Return start and end of a line, or of an open path that begins with two plain numbers and ends elsewhere."""
    if name_of(element) == "line":
        start = number(element.get("x1")), number(element.get("y1"))
        return start, (number(element.get("x2")), number(element.get("y2")))
    data = element.get("d", "")
    start = path_start(data) if not data.rstrip().endswith(("Z", "z")) else None
    if start is None:
        return None
    end = path_end(data)
    return None if abs(start[0] - end[0]) < CLOSED and abs(start[1] - end[1]) < CLOSED else (start, end)


def extracted_arrows(root: Element, boxes: Iterable[Box], work: Work) -> list[DrawnArrow]:
    """Return the arrows of a response without those that are parts of its shapes.

    Args:
        root: root of the document.
        boxes: bounds of the response's shapes.
        work: counter of the comparisons.
    """
    reader = _Reader(root)
    places = list(boxes)
    arrows: list[DrawnArrow] = []
    for element in root.iter():
        if name_of(element) not in ("path", "line"):
            continue
        arrow = reader.arrow(element)
        work.spend(1 + SAMPLES * len(places) if arrow is not None else 1)
        if arrow is not None and not any(is_part(arrow, box) for box in places):
            arrows.append(arrow)
    return arrows


def is_part(arrow: DrawnArrow, box: Box) -> bool:
    """Return whether an arrow is part of a shape: most of its chord is in the box, or it is short and its middle is."""
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    steps = [i / (SAMPLES - 1) for i in range(SAMPLES)]
    inside = sum(_is_in(x1 + t * (x2 - x1), y1 + t * (y2 - y1), box) for t in steps)
    if inside / SAMPLES >= INSIDE_SHARE:
        return True
    diagonal = distance(box[2] - box[0], box[3] - box[1])
    return 0 < arrow.length < SHORT_SHARE * diagonal and _is_in((x1 + x2) / 2, (y1 + y2) / 2, box)


def _is_in(x: float, y: float, box: Box) -> bool:
    return box[0] <= x <= box[2] and box[1] <= y <= box[3]


def truth_heads(root: Element, boxes: Sequence[Box], work: Work) -> list[TruthHead]:
    """Return the arrowheads of a reference: of groups of the root with a shaft and a polygon, in document order."""
    heads: list[TruthHead] = []
    for group in root:
        if name_of(group) != "g":
            continue
        shafts = [child for child in group if name_of(child) in ("path", "line")]
        polygons = [child for child in group if name_of(child) == "polygon"]
        points = numbers(polygons[-1].get("points", "")) if polygons else []
        if len(points) < 6 or not any(is_none(shaft.get("fill", "")) for shaft in shafts):
            continue
        stroke = number(shafts[-1].get("stroke-width"), HEAD_STROKE)
        work.spend(len(boxes) + len(points) ** 2)
        x, y = tip(points)
        is_hidden = any(
            box[0] + HIDDEN <= x <= box[2] - HIDDEN and box[1] + HIDDEN <= y <= box[3] - HIDDEN for box in boxes
        )
        heads.append(TruthHead(_extent(points[1::2]), stroke, not is_hidden))
    return heads


def tip(points: Sequence[float]) -> Point:
    """Return the first corner of a polygon that is farthest from the mean of the others; (nan, nan) if none is."""
    corners = list(zip(points[0::2], points[1::2], strict=False))
    best, best_distance = (math.nan, math.nan), -1.0
    for i, (x, y) in enumerate(corners):
        others = corners[:i] + corners[i + 1 :]
        mean_x, mean_y = (sum(corner[axis] for corner in others) / len(others) for axis in (0, 1))
        away = distance(x - mean_x, y - mean_y)
        if away > best_distance:
            best, best_distance = (x, y), away
    return best
