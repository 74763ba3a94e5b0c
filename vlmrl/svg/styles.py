"""Values of presentation properties of an element: its own, and those that it inherits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from vlmrl.svg.geometry import Box, Lengths, rectangle
from vlmrl.svg.parse import Node
from vlmrl.svg.properties import INHERITED
from vlmrl.svg.scene import Shape, Source
from vlmrl.svg.values import Matrix, read_colour, read_length, read_paint

FONT_SIZES = {
    "xx-small": 9.0, "x-small": 10.0, "small": 13.0, "medium": 16.0, "large": 18.0, "x-large": 24.0, "xx-large": 32.0,
}  # fmt: skip
RELATIVE_SIZES = {"smaller": 1 / 1.2, "larger": 1.2}
OF_CONTEXT = ("context-fill", "context-stroke")
"""Paints of a marker that are those of the line it stands on."""
MOST_FONT = 100_000.0
"""Largest size of a font, in user units."""
MOST_VALUE_CHARS = 10_000
"""Longest value of a property that is inherited. A longer one is left out: it would be read again in each element."""
LANGUAGE = "en"
"""Language of whoever looks at a picture, for `systemLanguage`."""
EXTENSIONS = frozenset(("http://www.w3.org/1999/xhtml", "http://www.w3.org/1998/Math/MathML"))
"""Values of `requiredExtensions` that browsers know."""


AROUND = 100.0
"""Size of the page around a scene, in sizes of its box: it shows beside it too, where the picture has another shape."""


def page_of(root: Node, box: Box) -> list[Shape]:
    """Return what CSS paints below a document: its `background-color`, as browsers draw it; [] if it has none."""
    colour = read_colour(root.attributes.get("background-color", ""))
    if colour is None or not colour[3]:
        return []
    x, y = AROUND * box.width, AROUND * box.height
    page = rectangle(Box(box.x - x, box.y - y, box.width + 2 * x, box.height + 2 * y))
    return [Shape(tuple(page), Matrix(), colour, None, root.tag, root.number)]


class Place(NamedTuple):
    """Values that an element takes from the elements around it.

    Args:
        style: inherited property -> value; a missing one has its first value.
        matrix: from user space to the space of the scene.
        lengths: sizes that relative lengths refer to.
        depth: elements around it, those of `use` included.
        uses: positions of the elements that are being shown by `use` or another reference.
        context: fill and stroke of the line that a marker stands on.
        marker: whether it is within a marker.
        clip: whether it is within a clip path, of which the outlines alone count.
    """

    style: Mapping[str, str]
    matrix: Matrix
    lengths: Lengths
    depth: int = 0
    uses: tuple[int, ...] = ()
    context: tuple[Source | None, Source | None] = (None, None)
    marker: bool = False
    clip: bool = False

    def get(self, name: str) -> str:
        """Return the value of an inherited property."""
        return self.style.get(name) or INHERITED[name]


def is_hidden(node: Node) -> bool:
    """Return whether an element is left out with all that is within it."""
    return node.attributes.get("display", "").strip().lower() == "none" or fails(node)


def fails(node: Node) -> bool:
    """Return whether an element has a condition that is not met, of languages or of extensions.

    Source: SVG 2, section 5.7. No language and no extension is a condition that nobody meets.
    """
    extensions, languages = (node.attributes.get(name) for name in ("requiredExtensions", "systemLanguage"))
    if extensions is not None and not (extensions.strip() and EXTENSIONS.issuperset(extensions.split())):
        return True
    if languages is None:
        return False
    return not any(word.strip().lower().split("-")[0] == LANGUAGE for word in languages.split(","))


def inherit(node: Node, place: Place) -> Place:
    """Return the place within an element, with its own values of inherited properties. A wrong value is left out."""
    own = {name: value.strip() for name, value in node.attributes.items() if name in INHERITED}
    own = {name: value for name, value in own.items() if 0 < len(value) <= MOST_VALUE_CHARS}
    if not own:
        return place
    for name in ("fill", "stroke"):
        value = own.get(name)
        if value is not None and value not in OF_CONTEXT and read_paint(value) is None:
            del own[name]
    if own.get("color", "").lower() == "currentcolor":
        del own["color"]
    lengths = place.lengths
    if "font-size" in own:
        size = _font_size(own.pop("font-size"), lengths.em)
        lengths = lengths._replace(em=size)
    return place._replace(style={**place.style, **own}, lengths=lengths)


def _font_size(text: str, em: float) -> float:
    word = text.lower()
    if word in FONT_SIZES:
        return FONT_SIZES[word]
    if word in RELATIVE_SIZES:
        return em * RELATIVE_SIZES[word]
    size = read_length(text, whole=em, em=em)
    return em if size is None or not 0 <= size <= MOST_FONT else size
