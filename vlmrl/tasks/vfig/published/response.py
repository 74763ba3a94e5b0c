"""Shapes and arrows of a response as the published evaluator extracts them: only what has a label is a shape.

Arrowheads of a reference are found in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import (
    GRADIENTS,
    Classes,
    Fonts,
    Work,
    arrow_classes,
    border_style,
    canvas,
    classes,
    distance,
    fill_style,
    fill_styles,
    is_none,
    name_of,
    normal,
    number,
    numbers,
    parents,
    reference,
    resolved,
    stop_colours,
    style_property,
    text_of,
    translation,
)
from vlmrl.tasks.vfig.published.outlines import (
    SHAPES,
    Box,
    Definitions,
    Drawn,
    area,
    centre,
    claim_label,
    is_inside,
    merged,
    path_end,
    path_length,
    path_start,
    texts_in,
    union,
)
from vlmrl.tasks.vfig.published.truth import CURVES

SMALLEST = 15
"""Smallest width and height of a shape of a response, in pixels."""
LARGEST_SHARE = 0.5
"""Largest share of the canvas that a rectangle may cover."""
LABEL_MARGIN = 30
"""Width of the surroundings of a shape where its label may be, in pixels."""
OWN_TEXT = 60
"""Distance of a text from the centre of its own shape in a group of several, in pixels."""
SAME_PLACE = 20
"""Distance of the centres of two shapes of which the second is left out, in pixels, exclusive."""
OVERLAY_GAP = 15
"""Largest distance of a shape of the root from the pattern that is taken for its fill, in pixels."""
YIELDING = {"solid", *GRADIENTS.values()}
"""Fill styles that yield to a pattern that is drawn over them."""
LONG_LABEL = 1000
"""Length of a label whose search for a text counts as another comparison, in characters."""
FILLED_ONLY = {"polyline", "path"}
"""Shapes that need a fill; the others may have a stroke instead."""


class Extraction:
    """Shapes of one response."""

    def __init__(self, root: Element, work: Work) -> None:
        self.root, self.work = root, work
        self.definitions = Definitions(root, work)
        self.rules = classes(root)
        self.styles, self.colours = fill_styles(root), stop_colours(root)
        self.canvas = canvas(root)
        parent_of = parents(root)
        self.fonts = Fonts(parent_of, self.rules)
        self.texts = texts_in(root, parent_of)

    def shapes(self) -> list[Drawn]:
        """Return the labelled shapes: those of labelled groups, then those of texts near other shapes."""
        shapes: list[Drawn] = []
        loose = self._root_shapes()
        for group in self.root.iter():
            if name_of(group) == "g":
                self._read_group(group, shapes, loose)
        labels: set[str] = set()
        for cluster in merged(loose, self.work):
            one = self._joined(cluster)
            one.label, one.font = claim_label(one.box, self.texts, self.work, margin=LABEL_MARGIN, inside_first=False)
            if one.label and normal(one.label) not in labels:
                labels.add(normal(one.label))
                shapes.append(one)
        return shapes

    def _is_shape(self, element: Element, box: Box | None) -> bool:
        """Return whether an element is large enough, painted, and no background."""
        if box is None or not _is_large(box):
            return False
        name = name_of(element)
        width, height = self.canvas
        if name == "rect" and width > 0 and height > 0 and area(box) / (width * height) > LARGEST_SHARE:
            return False
        if not is_none(style_property(element, "fill", self.rules).strip()):
            return True
        return name not in FILLED_ONLY and not is_none(style_property(element, "stroke", self.rules).strip())

    def _drawn(self, element: Element, box: Box) -> Drawn:
        """Return a primitive as a shape without label."""
        return Drawn(
            name_of(element),
            box,
            resolved(style_property(element, "fill", self.rules), self.colours),
            style_property(element, "stroke", self.rules),
            fill_style(element, self.styles, self.rules),
            border_style(element, self.rules),
        )

    def _used(self, use: Element, box: Box) -> Drawn:
        """Return a use as a shape without label, in the colours of what it refers to; its styles count as solid."""
        target = self.definitions.target(use)
        assert target is not None
        fill = resolved(style_property(target, "fill", self.rules), self.colours)
        return Drawn("use", box, fill, style_property(target, "stroke", self.rules))

    def _used_at_root(self, use: Element, box: Box) -> Drawn | None:
        """Return a use in the root as a shape; None without a fill. Only an attribute gives its stroke here."""
        one, target = self._used(use, box), self.definitions.target(use)
        one.stroke = target.get("stroke", "") if target is not None else ""
        return one if not is_none(one.fill) else None

    def _pattern(self, element: Element) -> str | None:
        """Return the style of the pattern that fills an element; None for any other fill and an unknown pattern."""
        key = reference(style_property(element, "fill", self.rules))
        style = self.styles.get(key) if key is not None else None
        return None if style in GRADIENTS.values() else style

    def _root_shapes(self) -> list[Drawn]:
        """Return the shapes and the filled uses that are children of the root."""
        shapes: list[Drawn] = []
        outlined = [
            (c, box) for c in self.root if name_of(c) in SHAPES and (box := self.definitions.box(c)) is not None
        ]
        patterns = [(style, box) for child, box in outlined if (style := self._pattern(child)) is not None]
        for child, box in outlined:
            if not self._is_shape(child, box):
                continue
            one = self._drawn(child, box)
            if one.fill_style in YIELDING:
                self.work.spend(len(patterns))
                one.fill_style = next((style for style, other in patterns if _is_near(box, other)), one.fill_style)
            shapes.append(one)
        for child in self.root:
            box = self.definitions.use_box(child) if name_of(child) == "use" else None
            if box is not None and _is_large(box) and (one := self._used_at_root(child, box)) is not None:
                shapes.append(one)
        return shapes

    def _read_group(self, group: Element, shapes: list[Drawn], loose: list[Drawn]) -> None:
        """Add the shapes of a group to the labelled or to the loose ones."""
        dx, dy = self.definitions.move(group)
        primitives = [(child, self.definitions.box(child, dx, dy)) for child in group if name_of(child) in SHAPES]
        parts: list[tuple[Element, Box]] = []
        boxes: list[Box] = []
        tags = {name_of(child) for child, _ in primitives}
        for child in group:
            name = name_of(child)
            if name in SHAPES:
                box = self.definitions.box(child, dx, dy)
                box = box if self._is_shape(child, box) else None
            elif name in ("use", "g"):
                box_of = self.definitions.use_box if name == "use" else self.definitions.group_box
                box = box_of(child, dx, dy)
                box = box if box is not None and _is_large(box) and _is_measured(box) else None
            else:
                continue
            if box is not None:
                boxes.append(box)
                tags.add(name)
                if name != "g":
                    parts.append((child, box))
        box = union(boxes)
        if box is None:
            return
        lines = [(child, text) for child in group if name_of(child) == "text" and (text := text_of(child))]
        if lines:
            self._add_labelled(group, box, tags, parts, lines, shapes)
            return
        outlined = [(one, its_box) for one, its_box in primitives if its_box is not None and area(its_box) > 0]
        if outlined:
            one = self._drawn(*max(outlined, key=lambda part: area(part[1])))
            one.tag, one.box, one.tags = "g", box, tags
            loose.append(one)

    def _add_labelled(
        self,
        group: Element,
        box: Box,
        tags: set[str],
        parts: Sequence[tuple[Element, Box]],
        lines: Sequence[tuple[Element, str]],
        shapes: list[Drawn],
    ) -> None:
        """Add the shape of a group with texts, or the shapes if several have a text each."""
        whole = Drawn("", box)
        if parts:
            first, first_box = parts[0]
            whole = self._used(first, first_box) if name_of(first) == "use" else self._drawn(first, first_box)
        whole.box, whole.tags = box, tags
        if whole.fill_style in YIELDING:
            overlays = filter(None, (self._pattern(child) for child in group if name_of(child) in SHAPES))
            whole.fill_style = next(overlays, whole.fill_style)
        whole.label = " ".join(text for _, text in lines)
        fonts = (self.fonts.of(line) for line, _ in lines)
        whole.font = next(filter(None, fonts), "")
        for one in self._split(parts, lines, *self.definitions.move(group)) or [whole]:
            if not self._is_taken(one.box, shapes):
                shapes.append(one)
                self._use_texts(normal(one.label))

    def _use_texts(self, label: str) -> None:
        """Mark every text that stands in a label as used, wherever it is."""
        self.work.spend(len(self.texts) * (1 + len(label) // LONG_LABEL))
        for text in self.texts:
            text.is_used = text.is_used or text.label in label

    def _is_taken(self, box: Box, shapes: Sequence[Drawn]) -> bool:
        self.work.spend(len(shapes))
        return any(apart(centre(box), centre(shape.box)) < SAME_PLACE for shape in shapes)

    def _split(
        self, parts: Sequence[tuple[Element, Box]], lines: Sequence[tuple[Element, str]], dx: float, dy: float
    ) -> list[Drawn]:
        """Return the shapes of a group that have each a text of their own; none if fewer than two have."""
        left = [(number(line.get("x")) + dx, number(line.get("y")) + dy, text) for line, text in lines]
        shapes: list[Drawn] = []
        for child, box in parts:
            if name_of(child) == "use":
                continue
            self.work.spend(len(left))
            away = [apart(line[:2], centre(box)) for line in left]
            near = [i for i, one_away in enumerate(away) if one_away < OWN_TEXT]
            if near:
                best = min(near, key=away.__getitem__)
                one = self._drawn(child, box)
                one.label, one.tags = left.pop(best)[2], {one.tag}
                one.font = self.fonts.of(child)
                shapes.append(one)
        return shapes if len(shapes) > 1 else []

    def _joined(self, cluster: Sequence[Drawn]) -> Drawn:
        """Return shapes that overlap as one, which looks like the largest."""
        if len(cluster) == 1:
            return cluster[0]
        largest = max(cluster, key=lambda one: area(one.box))
        box = union([one.box for one in cluster])
        assert box is not None
        tags = {tag for one in cluster for tag in one.tags}
        return Drawn("g", box, largest.fill, largest.stroke, largest.fill_style, largest.border, tags)


def apart(one: tuple[float, float], other: tuple[float, float]) -> float:
    """Return the distance of two points."""
    return distance(one[0] - other[0], one[1] - other[1])


def _is_near(one: Box, other: Box) -> bool:
    """Return whether two boxes overlap or are at most 15 pixels apart, in x and in y."""
    pairs = ((one, other, 0), (other, one, 0), (one, other, 1), (other, one, 1))
    return not any(first[axis + 2] + OVERLAY_GAP < second[axis] for first, second, axis in pairs)


def _is_large(box: Box) -> bool:
    """Return whether no side is too short: one that is not a number is not."""
    return not (box[2] - box[0] < SMALLEST or box[3] - box[1] < SMALLEST)


def _is_measured(box: Box) -> bool:
    return not (math.isnan(box[2] - box[0]) or math.isnan(box[3] - box[1]))


def extracted_shapes(root: Element, work: Work) -> list[Drawn]:
    """Return the shapes of a response. Raises: Unscorable for a broken view box and for circles of uses."""
    return Extraction(root, work).shapes()


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
    """Reader of the arrows of a response."""

    def __init__(self, root: Element) -> None:
        self.root = root
        self.parent_of = parents(root)
        self.rules: Classes = arrow_classes(root)
        self._looks: dict[tuple[Element, str], str] = {}
        self._head_height = cache(_polygon_height)
        self._move = cache(lambda element: translation(element.get("transform")))
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
            move_x, move_y = self._move(above)
            x, y = x + move_x, y + move_y
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
        height = self._head_height(group)
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
    """Return the arrows of a response without those that are parts of its shapes, which have these bounds."""
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
    inside = sum(is_inside(x1 + t * (x2 - x1), y1 + t * (y2 - y1), box) for t in steps)
    if inside / SAMPLES >= INSIDE_SHARE:
        return True
    diagonal = distance(box[2] - box[0], box[3] - box[1])
    return 0 < arrow.length < SHORT_SHARE * diagonal and is_inside((x1 + x2) / 2, (y1 + y2) / 2, box)


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
        is_hidden = any(is_inside(x, y, box, -HIDDEN) for box in boxes)
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
