"""Scene of a tree of elements: the allow-list, styles, transforms, references, and the limits of what is drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from vlmrl.redaction.redact import excerpt
from vlmrl.svg.css import BLENDS, OF_CONTEXT, Place, apply_styles, fails, inherit, is_hidden, page_of
from vlmrl.svg.geometry import SHAPES, Box, Command, Lengths, bounds, fitted, outline, rectangle
from vlmrl.svg.parse import ELEMENT, LETTER, POINT, STOP, Node, SvgLimits, Work
from vlmrl.svg.references import (
    GRADIENTS,
    MOST_REFERENCES,
    Content,
    Line,
    add_markers,
    clip_of,
    faded,
    gradient,
    markers_of,
    mask_of,
    number_of,
    opacity_of,
    parts_of,
    pattern,
    read_bitmap,
)
from vlmrl.svg.scene import Bitmap, ClipPart, Group, Item, Scene, Shape, Source, Stroke
from vlmrl.svg.text import lay_out
from vlmrl.svg.values import Matrix, Paint, read_length, read_origin, read_paint, read_transform, read_view_box
from vlmrl.untrusted import CodeRefused

Images = Literal["refuse", "drop", "draw"]
"""Policy for embedded pictures (data URIs): the document is refused, the picture is left out, or it is drawn."""
CONTAINERS = ("svg", "g", "a", "switch")
DRAWN = (*SHAPES, *CONTAINERS, "use", "text", "image")
"""Elements that paint something where they stand."""
REFUSED = ("script", "foreignObject", "iframe", "object", "embed", "audio", "video", "canvas")
"""Elements that no figure needs, and that other renderers run or load."""
MOST_NESTING = 200
"""Largest number of elements around one that is drawn, those of `use` included."""
MOST_DASHES = 64
BLACK = (0.0, 0.0, 0.0, 1.0)
Draw = Callable[[Node, Place, list[Item]], object]
"""Adder of what an element paints, without its own opacity, clip path and mask."""
DEFAULT_SIZE = (300.0, 150.0)
"""Size of a document that declares none."""


def build_scene(
    root: Node, limits: SvgLimits | None = None, *, images: Images = "refuse", size: tuple[int, int] | None = None
) -> Scene:
    """Return the scene of a document. Its styles are applied to the tree, in place.

    Args:
        size: width and height of the picture that will be drawn; relative sizes of the document refer to them.
    Raises: CodeRefused (`forbidden`, `limit`).
    """
    work = Work((limits or SvgLimits()).steps)
    try:
        _check(root)
        apply_styles(root, work)
        return _Builder(root, images, work).scene(root, size)
    except RecursionError:  # brackets of CSS, of any depth
        raise CodeRefused("limit", "its styles or elements are nested too deep") from None


def _check(root: Node) -> None:
    """Raise for elements and attributes that run code or load something. Those behind a `switch` have an alternative.

    Raises: CodeRefused (`forbidden`).
    """
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.tag in REFUSED:
            raise CodeRefused("forbidden", f"it has a {node.tag} element")
        for name in node.attributes:
            if name[:2].lower() == "on" and len(name) > 2:
                raise CodeRefused("forbidden", f"it has the event attribute {excerpt(name, 40)}")
        href = node.attributes.get("href", "").strip()
        if href and not href.startswith("#") and node.tag in ("image", "use", "feImage"):
            kind = "an embedded picture" if href[:5].lower() == "data:" else "something outside of it"
            if node.tag != "image" or kind != "an embedded picture":
                raise CodeRefused("forbidden", f"its {node.tag} element refers to {kind}")
        children = node.children
        if node.tag == "switch":
            children = [child for child in children if child.tag != "foreignObject"]
        waiting.extend(children)


class _Builder:
    """Walk over the tree that makes items, with the counts of the limits."""

    def __init__(self, root: Node, images: Images, work: Work) -> None:
        self.images, self.work = images, work
        self.ids: dict[str, Node] = {}
        self.above: dict[int, Node] = {}
        self.elements = 0
        for node in root.walk():
            self.elements += 1
            self.ids.setdefault(node.attributes.get("id", ""), node)
            for child in node.children:
                self.above[child.number] = node
        self.ids.pop("", None)

    def count(self, node: Node) -> None:
        """Count an element that is drawn. Raises: CodeRefused (`limit`)."""
        self.work.spend(ELEMENT + LETTER * sum(map(len, node.attributes.values())))

    def scene(self, root: Node, size: tuple[int, int] | None) -> Scene:
        view = read_view_box(root.attributes.get("viewBox", ""))
        outer = size or (view[2:] if view else DEFAULT_SIZE)
        sizes = [
            read_length(root.attributes.get(name, "100%"), whole=whole) or whole
            for name, whole in zip(("width", "height"), outer, strict=True)
        ]
        given = [root.attributes.get(name, "").strip() not in ("", "auto") for name in ("width", "height")]
        if view and given[0] != given[1]:  # the other one follows the shape of the viewBox
            ratio = view[3] / view[2]
            sizes = [sizes[0], sizes[0] * ratio] if given[0] else [sizes[1] / ratio, sizes[1]]
        width, height = (value if value > 0 else whole for value, whole in zip(sizes, outer, strict=True))
        box = Box(*view) if view else Box(0.0, 0.0, width, height)
        place = inherit(root, Place({}, Matrix(), Lengths(box.width, box.height, 16.0)))
        items = list[Item]()
        if root.attributes.get("display", "").strip() != "none":
            items.extend(page_of(root, box))
            self._wrapped(root, place, items, self.children)
        return Scene(tuple(items), width, height, box, root.attributes.get("preserveAspectRatio", ""), self.elements)

    def children(self, node: Node, place: Place, items: list[Item]) -> None:
        """Add what the children of an element paint."""
        for child in node.children:
            self.add(child, place, items)

    def add(self, node: Node, place: Place, items: list[Item]) -> None:
        """Add what an element paints."""
        tag = node.tag
        self.work.spend(POINT)
        if tag not in DRAWN:
            return
        self.count(node)
        if place.depth >= MOST_NESTING:
            raise CodeRefused("limit", f"elements are nested deeper than {MOST_NESTING}")
        if is_hidden(node):
            return
        place = inherit(node, place)._replace(depth=place.depth + 1)
        space = node.attributes.get("space")
        if space is not None:
            place = place._replace(style={**place.style, "space": space})
        turned = read_transform(node.attributes.get("transform", ""))
        if turned is not None:
            lengths = place.lengths
            x, y = read_origin(node.attributes.get("transform-origin", ""), lengths.width, lengths.height, lengths.em)
            turned = Matrix(e=x, f=y).times(turned).times(Matrix(e=-x, f=-y)) if x or y else turned
            place = place._replace(matrix=place.matrix.times(turned))
        m = place.matrix
        if not all(map(math.isfinite, m)) or abs(m.determinant) < 1e-12 or max(map(abs, m)) > 1e12:
            return
        if tag in SHAPES:
            self._wrapped(node, place, items, self._shape)
        elif tag == "text":
            self._wrapped(node, place, items, self._text)
        elif tag == "image":
            self._wrapped(node, place, items, self._image)
        elif tag == "use":
            self._wrapped(node, place, items, self._use)
        elif tag == "svg":
            self._wrapped(node, place, items, self._viewport)
        elif tag == "switch":
            chosen = [child for child in node.children if child.tag in DRAWN and not fails(child)][:1]
            self._wrapped(node, place, items, lambda _, p, to: [self.add(c, p, to) for c in chosen])
        else:
            self._wrapped(node, place, items, self.children)

    def _wrapped(self, node: Node, place: Place, items: list[Item], draw: Draw) -> None:
        """Add what `draw` adds, with the element's opacity, clip path and mask around it."""
        opacity = opacity_of(node.attributes.get("opacity", "1"))
        if opacity <= 0:
            return
        inner: list[Item] = []
        draw(node, place, inner)
        if not inner:
            return
        clip = clip_of(node, place, inner, self)
        mask = mask_of(node, place, inner, self)
        if clip == ():
            return
        blend, isolation = (node.attributes.get(n, "").strip().lower() for n in ("mix-blend-mode", "isolation"))
        blend = blend if blend in BLENDS else "normal" if isolation == "isolate" else ""
        group = Group(tuple(inner), opacity, clip, mask, blend)
        if clip is not None or mask is not None or blend:
            items.append(group)
            return
        single = _faded(inner[0], opacity) if len(inner) == 1 else None
        if single is not None:
            items.append(single)
        elif opacity >= 1:
            items.extend(inner)
        else:
            items.append(group)

    # --- shapes ------------------------------------------------------------------------------------------------------
    def _shape(self, node: Node, place: Place, items: list[Item]) -> None:
        commands = outline(node.tag, node.attributes, place.lengths)
        if len(commands) < 2:
            return
        self.work.spend(POINT * len(commands))
        markers = markers_of(place, self)
        fill, stroke = self._paints(commands, place, filled=node.tag != "line")
        if fill is not None or stroke is not None:
            items.append(self._styled(commands, place, fill, stroke, node, heads=markers.heads))
        if any(markers) and place.get("visibility") == "visible" and not place.clip:
            line = Line(commands, stroke.width if stroke else 1.0, (fill, stroke.source if stroke else None))
            add_markers(markers, line, place, self, items)

    def _styled(
        self,
        commands: Sequence[Command],
        place: Place,
        fill: Source | None,
        stroke: Stroke | None,
        node: Node,
        *,
        text: str = "",
        heads: tuple[bool, bool] = (False, False),
    ) -> Shape:
        return Shape(
            tuple(commands),
            place.matrix,
            fill,
            stroke,
            node.tag,
            node.number,
            even_odd=place.get("clip-rule" if place.clip else "fill-rule") == "evenodd" and not text,
            text=text,
            heads=heads,
            marker=place.marker,
            stroke_first=place.get("paint-order").startswith("stroke"),
            crisp=place.get("shape-rendering") in ("crispEdges", "optimizeSpeed") and not text,
        )

    def _paints(
        self, commands: Sequence[Command], place: Place, *, filled: bool = True
    ) -> tuple[Source | None, Stroke | None]:
        """Return the fill and the stroke of an outline; None for what paints nothing."""
        if place.get("visibility") != "visible":
            return None, None
        if place.clip:
            return BLACK, None
        fill = self._source("fill", commands, place) if filled else None
        width = read_length(place.get("stroke-width"), whole=place.lengths.diagonal, em=place.lengths.em)
        width = 1.0 if width is None or width < 0 else width
        source = self._source("stroke", commands, place) if width > 0 else None
        if source is None:
            return fill, None
        words = place.get("stroke-dasharray").replace(",", " ").split(None, MOST_DASHES)[:MOST_DASHES]
        values = [read_length(w, whole=place.lengths.diagonal, em=place.lengths.em) for w in words]
        dashes = tuple(v for v in values if v is not None)
        if len(dashes) != len(values) or any(v < 0 for v in dashes) or sum(dashes) <= 0:
            dashes = ()
        if len(dashes) % 2:
            dashes *= 2
        offset = read_length(place.get("stroke-dashoffset"), whole=place.lengths.diagonal, em=place.lengths.em) or 0.0
        miter = max(1.0, number_of(place.get("stroke-miterlimit"), 4.0))
        cap, join = place.get("stroke-linecap"), place.get("stroke-linejoin")
        return fill, Stroke(source, width, cap, join, miter, dashes, offset)

    def _source(self, name: str, commands: Sequence[Command], place: Place) -> Source | None:
        """Return what `fill` or `stroke` paints; None for nothing."""
        text, alpha = place.get(name), opacity_of(place.get(f"{name}-opacity"))
        if alpha <= 0:
            return None
        if text in OF_CONTEXT:
            return faded(place.context[OF_CONTEXT.index(text)], alpha)
        paint = read_paint(text, place.get("color")) or Paint(None)
        server = self.ids.get(paint.server) if paint.server else None
        if server is not None and server.tag in (*GRADIENTS, "pattern"):
            box = bounds(commands) or Box(0, 0, 0, 0)
            self.work.spend(POINT * len(commands) + STOP * parts_of(server, self.ids))
            if server.tag != "pattern":
                source = gradient(server, self.ids, box, place.lengths, alpha)
            elif server.number in place.uses:
                return None
            else:
                source = pattern(server, self.ids, box, place.lengths, alpha, self._content_within(server, place))
            if source is not None:
                return None if isinstance(source, tuple) and source[3] <= 0 else source
        if paint.colour is None or paint.colour[3] * alpha <= 0:
            return None
        return (*paint.colour[:3], paint.colour[3] * alpha)

    def _content_within(self, server: Node, place: Place) -> Content:
        """Return a maker of a pattern's content."""

        def content(node: Node, matrix: Matrix, viewport: Box) -> tuple[Item, ...]:
            inner = self.defined(node, place)._replace(
                matrix=matrix,
                lengths=Lengths(viewport.width, viewport.height, 16.0),
                uses=(*place.uses, server.number),
                depth=place.depth + 1,
            )
            if len(inner.uses) > MOST_REFERENCES:
                raise CodeRefused("limit", f"references are nested deeper than {MOST_REFERENCES}")
            items: list[Item] = []
            self.children(node, inner, items)
            return tuple(items)

        return content

    def defined(self, node: Node, place: Place) -> Place:
        """Return the place within an element that is shown by reference: it inherits from where it is defined."""
        inner = Place({}, Matrix(), place.lengths._replace(em=16.0))
        for element in (*reversed(self._around(node)), node):
            inner = inherit(element, inner)
        return inner

    def _around(self, node: Node) -> list[Node]:
        """Return the elements around one, the nearest first."""
        around: list[Node] = []
        while (above := self.above.get(node.number)) is not None:
            around.append(node := above)
        return around

    # --- text, images, references ------------------------------------------------------------------------------------
    def _text(self, node: Node, place: Place, items: list[Item]) -> None:
        for run in lay_out(node, place, self):
            if not run.commands:
                continue
            fill, stroke = self._paints(run.commands, run.place)
            if fill is not None or stroke is not None:
                within = run.place._replace(matrix=place.matrix)
                items.append(self._styled(run.commands, within, fill, stroke, node, text=run.text))

    def _image(self, node: Node, place: Place, items: list[Item]) -> None:
        href = node.attributes.get("href", "").strip()
        if not href or href.startswith("#") or self.images == "drop":
            return
        if self.images == "refuse":
            raise CodeRefused("forbidden", "it embeds a picture")
        if place.get("visibility") != "visible":
            return
        pixels = read_bitmap(href)
        rows, columns = pixels.shape[:2]
        self.work.spend(rows * columns)
        box = Box(*(place.lengths.read(node.attributes, name) for name in ("x", "y", "width", "height")))
        width = box.width if box.width > 0 else float(columns)
        height = box.height if box.height > 0 else float(rows)
        fit = fitted(Box(0, 0, columns, rows), width, height, node.attributes.get("preserveAspectRatio", ""))
        matrix = place.matrix.times(Matrix(e=box.x, f=box.y)).times(fit)
        if abs(matrix.determinant) >= 1e-12:
            frame = ClipPart(tuple(rectangle(Box(box.x, box.y, width, height))), place.matrix, False)
            items.append(Group((Bitmap(pixels, matrix, node.number),), clip=(frame,)))

    def _use(self, node: Node, place: Place, items: list[Item]) -> None:
        target = self.ids.get(node.attributes.get("href", "").strip().removeprefix("#"))
        if target is None or target.number in place.uses or target in self._around(node):
            return
        x, y = place.lengths.read(node.attributes, "x"), place.lengths.read(node.attributes, "y")
        place = place._replace(matrix=place.matrix.times(Matrix(e=x, f=y)), uses=(*place.uses, target.number))
        if target.tag in ("symbol", "svg"):
            self.count(target)
            if not is_hidden(target):
                sizes = {n: node.attributes[n] for n in ("width", "height") if n in node.attributes}
                inner = inherit(target, place)._replace(depth=place.depth + 1)
                self._wrapped(target, inner, items, lambda n, p, to: self._viewport(n, p, to, sizes))
        else:
            self.add(target, place, items)

    def _viewport(self, node: Node, place: Place, items: list[Item], sizes: dict[str, str] | None = None) -> None:
        """Add the content of a nested `svg`, or of a `symbol`: scaled to its viewport, and cut at it."""
        attributes = {"width": "100%", "height": "100%", **node.attributes, **(sizes or {})}
        frame = Box(*(place.lengths.read(attributes, name) for name in ("x", "y", "width", "height")))
        if frame.width <= 0 or frame.height <= 0:
            return
        view = read_view_box(attributes.get("viewBox", ""))
        inner = Matrix(e=frame.x, f=frame.y)
        box = Box(0, 0, frame.width, frame.height)
        if view is not None:
            box = Box(*view)
            inner = inner.times(fitted(box, frame.width, frame.height, attributes.get("preserveAspectRatio", "")))
        lengths = place.lengths._replace(width=box.width, height=box.height)
        content: list[Item] = []
        self.children(node, place._replace(matrix=place.matrix.times(inner), lengths=lengths), content)
        if content and attributes.get("overflow", "hidden").strip() not in ("visible", "auto"):
            items.append(Group(tuple(content), clip=(ClipPart(tuple(rectangle(frame)), place.matrix, False),)))
        else:
            items.extend(content)


def _faded(item: Item, opacity: float) -> Item | None:
    """Return an item with an opacity in addition; None if its fill and its stroke need a group for that."""
    if opacity >= 1:
        return item
    if isinstance(item, Group):
        return replace(item, opacity=item.opacity * opacity)
    if isinstance(item, Bitmap):
        return replace(item, alpha=item.alpha * opacity)
    if item.fill is not None and item.stroke is not None:
        return None
    source = faded(item.stroke.source, opacity) if item.stroke is not None else None
    stroke = replace(item.stroke, source=source) if item.stroke is not None and source is not None else None
    return replace(item, fill=faded(item.fill, opacity), stroke=stroke)
