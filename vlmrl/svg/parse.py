"""SVG code in a response, read as a tree of elements: with limits, without DTD, entities or processing instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from vlmrl.untrusted import CodeRefused

ELEMENT, LETTER, POINT, STOP, GLYPH = 1000, 10, 10, 100, 150
"""Steps of work of an element, of a character of its attributes, of a point of an outline, of a colour of a gradient,
and of a character of text."""


@dataclass(frozen=True)
class SvgLimits:
    """Limits of one SVG text. A text beyond one of them is refused as a whole, with the limit in the reason.

    Args:
        chars: characters of the text.
        elements: elements, those that are not drawn included.
        depth: nested elements.
        attribute_chars: characters of one attribute. Paths of traced figures are the longest.
        pixels: width times height of the picture.
        steps: work of reading what is drawn, and again of painting it; see `Work`.
        cpu_seconds, seconds: processor time and wall clock of a worker: backstops, far above what `steps` allow.
        memory_mb: address space of a worker beyond what it has at its start, in MiB.
    """

    chars: int = 1_000_000
    elements: int = 20_000
    depth: int = 100
    attribute_chars: int = 200_000
    pixels: int = 16_777_216
    steps: int = 50_000_000
    cpu_seconds: float = 60.0
    seconds: float = 600.0
    memory_mb: int = 384


class BrokenPainter(CodeRefused):
    """Refusal after which this process must not draw again: cairo keeps some errors, such as those of a font."""


class Work:
    """Counter of the work that a text asks for: elements, characters, points, pixels. It is the same on every machine.

    A step is about 0.1 microseconds of one core.

    Args:
        most: number of steps from which on the text is refused.
    """

    def __init__(self, most: int = SvgLimits.steps) -> None:
        self.most = self.left = most

    def spend(self, steps: float) -> None:
        """Count steps. Raises: CodeRefused (`limit`) when there were more than `most`."""
        self.left -= steps
        if not self.left >= 0:  # it may be no number
            raise CodeRefused("limit", f"drawing it takes more than {self.most:,} steps of work")


SVG = "http://www.w3.org/2000/svg"
XLINK = "http://www.w3.org/1999/xlink"
XML = "http://www.w3.org/XML/1998/namespace"
SEPARATOR = "\x1f"
"""Character between namespace and name in expat's names: no XML text can hold it."""


@dataclass(slots=True, eq=False)
class Node:
    """Element of an SVG document.

    Args:
        tag: name without prefix; "" for an element of another namespace, whose content is not SVG.
        attributes: name -> value. `xlink:href` is `href`, `xml:space` is `space`; those of other namespaces are left
            out.
        texts: the texts before the first child, and after each child: one more than there are children.
        number: position among all elements, from 0, in document order.
    """

    tag: str
    attributes: dict[str, str]
    number: int
    children: list[Node] = field(default_factory=list)
    texts: list[str] = field(default_factory=lambda: [""])

    def walk(self) -> Iterator[Node]:
        """Yield this element and all below it, in document order, without recursion."""
        waiting: list[Node] = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


class _Builder:
    """Handlers of expat that build the tree and raise at a limit."""

    def __init__(self, limits: SvgLimits) -> None:
        self.limits, self.number, self.root = limits, 0, None
        self.open: list[Node] = []

    def start(self, name: str, attributes: dict[str, str]) -> None:
        if self.number >= self.limits.elements:
            raise CodeRefused("limit", f"it has more than {self.limits.elements:,} elements")
        if len(self.open) >= self.limits.depth:
            raise CodeRefused("limit", f"elements are nested deeper than {self.limits.depth}")
        space, _, tag = name.rpartition(SEPARATOR)
        node = Node(tag if space in (SVG, "") else "", self._kept(attributes), self.number)
        self.number += 1
        if self.open:
            self.open[-1].children.append(node)
            self.open[-1].texts.append("")
        else:
            self.root = node
        self.open.append(node)

    def _kept(self, attributes: dict[str, str]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for name, value in attributes.items():
            if len(value) > self.limits.attribute_chars:
                raise CodeRefused("limit", f"an attribute has more than {self.limits.attribute_chars:,} characters")
            space, _, plain = name.rpartition(SEPARATOR)
            if space == "" or (space == XML and plain == "space"):
                kept[plain] = value
            elif space == XLINK and plain == "href":
                kept.setdefault("href", value)
            elif space == XML and plain == "base":
                raise CodeRefused("forbidden", "it sets xml:base")
        return kept

    def end(self, name: str) -> None:
        self.open.pop()

    def text(self, data: str) -> None:
        if self.open:
            self.open[-1].texts[-1] += data

    def doctype(self, *_: object) -> int:
        raise CodeRefused("forbidden", "it has a document type declaration")

    def instruction(self, *_: object) -> None:
        raise CodeRefused("forbidden", "it has a processing instruction")


def parse_svg(text: str, limits: SvgLimits | None = None) -> Node:
    """Return the root of an SVG text. The text may begin with a byte order mark or an XML declaration.

    Raises: CodeRefused (`syntax`, `limit`, or `forbidden` for a document type, an entity declaration, a processing
        instruction or `xml:base`).
    """
    limits = limits or SvgLimits()
    if len(text) > limits.chars:
        raise CodeRefused("limit", f"it has more than {limits.chars:,} characters")
    builder = _Builder(limits)
    parser = expat.ParserCreate(encoding="utf-8", namespace_separator=SEPARATOR)
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = builder.start, builder.end
    parser.CharacterDataHandler = builder.text
    # Entities are declared in a document type only, so that this handler is enough.
    parser.StartDoctypeDeclHandler = builder.doctype
    parser.ProcessingInstructionHandler = builder.instruction
    try:
        parser.Parse(text.removeprefix("\ufeff").strip().encode("utf-8"), True)
    except expat.ExpatError as error:
        where = f"line {error.lineno}, column {error.offset + 1}"
        raise CodeRefused("syntax", f"it is not XML: {expat.ErrorString(error.code)} ({where})") from None
    except UnicodeEncodeError:
        raise CodeRefused("syntax", "it holds half of a surrogate pair") from None
    root = builder.root
    if root is None or root.tag != "svg":
        raise CodeRefused("syntax", "its outermost element is not svg")
    return root


TOKEN = re.compile(r"<!--|-->|<!\[CDATA\[|\]\]>|<(/?)(?:[A-Za-z_][\w.-]*:)?svg(?=[\s/>])", re.IGNORECASE)
"""Begin and end of comments and of CDATA sections, and tags of `svg` elements with or without a prefix."""
ENDS = {"<!--": "-->", "<![CDATA[": "]]>"}
"""Begin of a comment and of a CDATA section -> its end."""
TAG_END = re.compile(r"[^\"'>]*(?:\"[^\"]*\"[^\"'>]*|'[^']*'[^\"'>]*)*>")
"""Rest of a tag. A `>` within quotes does not end it."""


def find_svg(response: str) -> str:
    """Return the last complete `svg` element of a response, from its tag to the end tag that belongs to it.

    Prose, thoughts and code fences around it are left out. An `svg` within an `svg` belongs to the outer one. A word
    such as `<svg>` in prose that no end tag follows is not an element.

    Raises: CodeRefused (`missing` without an element, `cut` if the last one has no end).
    """
    complete: list[tuple[int, int]] = []
    starts: list[int] = []
    place, last_ends = 0, {end: response.rfind(end) for end in ENDS.values()}
    while token := TOKEN.search(response, place):
        place = token.end()
        if token[0] in ENDS:
            end = ENDS[token[0]]
            # Not searched where there is none: of many that have no end, each would search the rest of the text.
            place = response.find(end, place) + len(end) if starts and last_ends[end] >= place else place
            continue
        if token[0] in ENDS.values():
            continue
        rest = TAG_END.match(response, place)
        if rest is None:
            starts.append(token.start())
            break
        place = rest.end()
        if token[1]:
            if starts:
                complete.append((starts.pop(), place))
        elif rest[0].endswith("/>"):
            complete.append((token.start(), place))
        else:
            starts.append(token.start())
    if not complete:
        raise CodeRefused(
            *(("cut", "the svg element has no end tag") if starts else ("missing", "there is no svg element"))
        )
    # An open tag after the last complete element: the answer was cut, and what is complete is an earlier draft.
    last = max(end for _, end in complete)
    if starts and starts[-1] > last:
        raise CodeRefused("cut", "the last svg element has no end tag")
    first = min(start for start, end in complete if end == last)
    return response[first:last]
