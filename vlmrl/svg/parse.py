"""Reading of SVG text as a tree of elements, with limits, without DTD, entities or processing instructions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from xml.parsers import expat

from vlmrl.svg.limits import SvgLimits, SvgRefused

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
            raise SvgRefused("limit", f"it has more than {self.limits.elements:,} elements")
        if len(self.open) >= self.limits.depth:
            raise SvgRefused("limit", f"elements are nested deeper than {self.limits.depth}")
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
                raise SvgRefused("limit", f"an attribute has more than {self.limits.attribute_chars:,} characters")
            space, _, plain = name.rpartition(SEPARATOR)
            if space == "" or (space == XML and plain == "space"):
                kept[plain] = value
            elif space == XLINK and plain == "href":
                kept.setdefault("href", value)
            elif space == XML and plain == "base":
                raise SvgRefused("forbidden", "it sets xml:base")
        return kept

    def end(self, name: str) -> None:
        self.open.pop()

    def text(self, data: str) -> None:
        if self.open:
            self.open[-1].texts[-1] += data

    def doctype(self, *_: object) -> int:
        raise SvgRefused("forbidden", "it has a document type declaration")

    def instruction(self, *_: object) -> None:
        raise SvgRefused("forbidden", "it has a processing instruction")


def parse_svg(text: str, limits: SvgLimits | None = None) -> Node:
    """Return the root of an SVG text. The text may begin with a byte order mark or an XML declaration.

    Raises: SvgRefused (`syntax`, `limit`, or `forbidden` for a document type, an entity declaration, a processing
        instruction or `xml:base`).
    """
    limits = limits or SvgLimits()
    if len(text) > limits.chars:
        raise SvgRefused("limit", f"it has more than {limits.chars:,} characters")
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
        raise SvgRefused("syntax", f"it is not XML: {expat.ErrorString(error.code)} ({where})") from None
    except UnicodeEncodeError:
        raise SvgRefused("syntax", "it holds half of a surrogate pair") from None
    root = builder.root
    if root is None or root.tag != "svg":
        raise SvgRefused("syntax", "its outermost element is not svg")
    return root
