"""Boxes, labels and clusters of elements as the published evaluator finds them.

Transforms other than translations do not count. Texts are joined to the shapes that they label. Shapes of a response
that lie so much upon each other count as one.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from xml.etree.ElementTree import Element

from vlmrl.redaction.redact import excerpt
from vlmrl.tasks.vfig.published.document import (
    LINK,
    Fonts,
    Work,
    distance,
    name_of,
    normal,
    number,
    numbers,
    refuse,
    text_of,
    translation,
)

Box = tuple[float, float, float, float]
"""Left, top, right and bottom edge, in pixels."""
SHAPES = {"rect", "circle", "ellipse", "polygon", "polyline", "path"}
"""Elements that can be shapes."""
TOKEN = re.compile(r"[MLHVCSQTAZmlhvcsqtaz]|-?\d*\.?\d+(?:[eE][+-]?\d+)?")
MOVE = re.compile(r"\s*[Mm]\s*([-\d.]+)[\s,]+([-\d.]+)")
PER_STEP = {"m": 2, "l": 2, "t": 2, "h": 1, "v": 1, "q": 4, "s": 4, "c": 6, "a": 7}
"""Numbers of a step of a path; the last two are its end, of H and V the last one."""
DEEPEST_USE = 150
"""Most groups and uses within each other. The published code stops at Python's limit of recursion, a little later."""


def path_steps(data: str, *, returns: bool = False) -> Iterator[tuple[str, float, float]]:
    """Yield (command in lower case, x, y) of the steps of a path: their ends, without control points.

    A step is counted in tokens, so that a command among the control points does not end it. The end of a path does not
    lead back to its start; if it `returns`, a number after that end does.
    """
    x = y = first_x = first_y = 0.0
    tokens: list[str] = TOKEN.findall(data)
    command, at = "M", 0
    while at < len(tokens):
        if tokens[at].isalpha():
            command, at = tokens[at], at + 1
            continue
        kind = command.lower()
        if kind == "z" and returns:
            x, y, at = first_x, first_y, at + 1
            yield kind, x, y
            continue
        size = PER_STEP.get(kind, 0)
        end = tokens[at + max(size - 2, 0) : at + size]
        if at + size > len(tokens) or not end or any(token.isalpha() for token in end):
            at += 1
            continue
        is_relative = command.islower()
        if kind != "v":
            x = float(end[0]) + x if is_relative else float(end[0])
        if kind != "h":
            y = float(end[-1]) + y if is_relative else float(end[-1])
        if kind == "m":
            first_x, first_y = x, y
        yield kind, x, y
        at += size


def path_points(data: str) -> list[tuple[float, float]]:
    """Return the ends of the steps of a path."""
    return [(x, y) for _, x, y in path_steps(data)]


def path_end(data: str) -> tuple[float, float]:
    """Return the last point of a path; (0, 0) without any."""
    last = deque(path_steps(data, returns=True), maxlen=1)
    return last[0][1:] if last else (0.0, 0.0)


def path_length(data: str) -> float:
    """Return the length of a path with straight lines for curves; moves do not count."""
    length = before_x = before_y = 0.0
    for kind, x, y in path_steps(data, returns=True):
        if kind != "m":
            length += distance(x - before_x, y - before_y)
        before_x, before_y = x, y
    return length


def path_start(data: str) -> tuple[float, float] | None:
    """Return the point of a move at the start of a path; None for any other start, and for numbers that touch.

    Raises: Unscorable for a number such as 1.2.3.
    """
    match = MOVE.match(data)
    if match is None:
        return None
    try:
        return float(match[1]), float(match[2])
    except ValueError:
        refuse(f"a path begins with a broken number: {excerpt(data, 80)!r}")


def union(boxes: Iterable[Box]) -> Box | None:
    """Return the smallest box around boxes; None without any."""
    everything = list(boxes)
    return reduce(_around, everything) if everything else None


def _around(one: Box, other: Box) -> Box:
    return min(one[0], other[0]), min(one[1], other[1]), max(one[2], other[2]), max(one[3], other[3])


def centre(box: Box) -> tuple[float, float]:
    """Return the middle of a box."""
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2


def area(box: Box) -> float:
    """Return the area of a box, in square pixels."""
    return (box[2] - box[0]) * (box[3] - box[1])


def own_box(element: Element) -> Box | None:
    """Return the box of a shape; None for other elements and for fewer than two points."""
    name = name_of(element)
    if name == "rect":
        x, y = number(element.get("x")), number(element.get("y"))
        return x, y, x + number(element.get("width")), y + number(element.get("height"))
    if name in ("circle", "ellipse"):
        x, y = number(element.get("cx")), number(element.get("cy"))
        rx = number(element.get("r" if name == "circle" else "rx"))
        ry = number(element.get("r" if name == "circle" else "ry"))
        return x - rx, y - ry, x + rx, y + ry
    if name in ("polygon", "polyline"):
        # A last number without a partner counts as an x.
        values = numbers(element.get("points", ""))
    elif name == "path":
        values = [value for point in path_points(element.get("d", "")) for value in point]
    else:
        return None
    if len(values) < 4:
        return None
    xs, ys = values[0::2], values[1::2]
    return min(xs), min(ys), max(xs), max(ys)


def _target(use: Element, by_id: Mapping[str, Element]) -> Element | None:
    """Return the element that a use refers to; None if it is not in the `defs`."""
    return by_id.get((use.get("href") or use.get(LINK) or "").lstrip("#"))


def _move(element: Element) -> tuple[float, float]:
    """Return the translation of a group, or the position of a use."""
    if name_of(element) == "use":
        return number(element.get("x")), number(element.get("y"))
    return translation(element.get("transform"))


class Definitions:
    """Elements with an id in the `defs` that are children of the root: what `use` refers to."""

    def __init__(self, root: Element, work: Work) -> None:
        self.work = work
        self.by_id: Mapping[str, Element] = {
            key: element
            for child in root
            if name_of(child) == "defs"
            for element in child.iter()
            if (key := element.get("id"))
        }
        # Outlines, positions and references are read once each, however often they are used.
        self._own_box, self.move = cache(own_box), cache(_move)
        self.target = cache(partial(_target, by_id=self.by_id))

    def box(self, shape: Element, dx: float = 0.0, dy: float = 0.0) -> Box | None:
        """Return the box of a shape, moved; None for other elements and for fewer than two points."""
        box = self._own_box(shape)
        return box if box is None else (box[0] + dx, box[1] + dy, box[2] + dx, box[3] + dy)

    def use_box(self, use: Element, dx: float = 0.0, dy: float = 0.0, depth: int = 0) -> Box | None:
        """Return the box of what a use shows; its own transform does not count. Raises: Unscorable for a circle."""
        target = self.target(use)
        if target is None:
            return None
        move_x, move_y = self.move(use)
        return self.target_box(target, dx + move_x, dy + move_y, depth)

    def target_box(self, target: Element, dx: float, dy: float, depth: int) -> Box | None:
        """Return the box of a shape, a use or a group with its translation; None for anything else."""
        name = name_of(target)
        self.work.spend()
        if depth > DEEPEST_USE:
            refuse(f"more than {DEEPEST_USE} groups and uses within each other")
        if name in SHAPES:
            return self.box(target, dx, dy)
        if name == "use":
            return self.use_box(target, dx, dy, depth + 1)
        return self.group_box(target, dx, dy, depth + 1) if name == "g" else None

    def group_box(self, group: Element, dx: float = 0.0, dy: float = 0.0, depth: int = 0) -> Box | None:
        """Return the box around the shapes, uses and groups in a group, moved by its translation, too."""
        move_x, move_y = self.move(group)
        dx, dy = dx + move_x, dy + move_y
        boxes: list[Box] = []
        for child in group:
            box = self.target_box(child, dx, dy, depth)
            if box is not None:
                boxes.append(box)
        return union(boxes)


def has_shape(group: Element) -> bool:
    """Return whether a group, or a group in it, has a shape or a use."""
    return any(name_of(child) in SHAPES or name_of(child) == "use" for g in groups_in(group) for child in g)


def groups_in(group: Element) -> list[Element]:
    """Return a group and the groups in its groups."""
    groups = [group]
    for one in groups:
        groups += [child for child in one if name_of(child) == "g"]
    return groups


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


def claim_label(box: Box, texts: Sequence[Text], work: Work, *, margin: float, inside_first: bool) -> tuple[str, str]:
    """Return label and font of a shape in a figure with these texts, and mark its texts as used; ("", "") without any.

    Args:
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
        return "", ""
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
    return " ".join(line.text for line in lines), lines[0].font


GAP = 2
"""Largest gap of boxes that touch, in pixels."""
INNER_SHARE = 0.8
"""Share of the smaller box in the other from which it lies inside."""
INNER_SIZE = 0.7
"""Ratio of areas below which a box inside another is a shape of its own."""
COMMON = 0.3
"""Smallest share of either box that two boxes of one shape have in common, exclusive."""


@dataclass
class Drawn:
    """Shape of a response.

    Args:
        tag: name of its element; `g` for several, `use`.
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


def merged(shapes: Sequence[Drawn], work: Work) -> list[list[Drawn]]:
    """Return the shapes in groups that belong together, each group in the order of its members."""
    group_of = list(range(len(shapes)))

    def leader(i: int) -> int:
        while group_of[i] != i:
            group_of[i] = group_of[group_of[i]]
            i = group_of[i]
        return i

    for i, one in enumerate(shapes):
        work.spend(len(shapes) - i)
        for j in range(i + 1, len(shapes)):
            if belong_together(one.box, shapes[j].box):
                first, second = sorted((leader(i), leader(j)))
                group_of[second] = first
    groups: dict[int, list[Drawn]] = {}
    for i, one in enumerate(shapes):
        groups.setdefault(leader(i), []).append(one)
    return list(groups.values())


def belong_together(one: Box, other: Box) -> bool:
    """Return whether two boxes are taken for parts of one shape."""
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    if across <= 0 or down <= 0:
        return False
    common = across * down
    small, large = sorted((area(one), area(other)))
    if small <= 0:
        return False
    if common / small > INNER_SHARE and small / large < INNER_SIZE:
        return False
    return common / small > COMMON and common / large > COMMON
