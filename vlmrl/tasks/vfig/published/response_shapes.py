"""Shapes of a response as the published evaluator extracts them: only what has a label is a shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.clusters import merged
from vlmrl.tasks.vfig.published.document import Work, name_of, parents
from vlmrl.tasks.vfig.published.labels import claim_label, texts_in
from vlmrl.tasks.vfig.published.outlines import SHAPES, Box, Definitions, area, centre, union
from vlmrl.tasks.vfig.published.paints import (
    GRADIENTS,
    border_style,
    fill_style,
    fill_styles,
    is_none,
    reference,
    resolved,
    stop_colours,
)
from vlmrl.tasks.vfig.published.styles import Fonts, classes, normal, style_property, text_of
from vlmrl.tasks.vfig.published.transforms import canvas, distance, number

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


@dataclass
class Drawn:
    """Shape of a response.

    Args:
        tag: name of its element; `g` for several, `use`.
        box: its bounds.
        fill, stroke: colours as written; a fill by a gradient is the colour of its first stop.
        fill_style: solid, none, dots ...
        border: solid, dashed, dotted or dash-dot.
        tags: names of the elements in its group.
        label, font: of its texts; "" until it is labelled.
    """

    tag: str
    box: Box
    fill: str = ""
    stroke: str = ""
    fill_style: str = "solid"
    border: str = "solid"
    tags: set[str] = field(default_factory=set)
    label: str = ""
    font: str = ""


class Extraction:
    """Shapes of one response.

    Args:
        root: root of the document.
        work: counter of the comparisons.
    """

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
            one.label, one.font, _ = claim_label(
                one.box, self.texts, self.work, margin=LABEL_MARGIN, inside_first=False
            )
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
