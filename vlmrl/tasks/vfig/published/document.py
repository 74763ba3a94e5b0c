"""Reading of SVG code from anybody: one function for the reference and for the response, with limits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NoReturn
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

from vlmrl.redaction.redact import excerpt

MOST_CHARACTERS = 4_000_000
"""Longest document that is read."""
MOST_ELEMENTS = 20_000
"""Largest number of elements of a document."""
MOST_ATTRIBUTE = 10_000
"""Longest value of an attribute, in characters, except for outlines and references."""
LINK = "{http://www.w3.org/1999/xlink}href"
LONG = ("d", "points", "href", LINK)
"""Attributes that may be as long as the document: outlines, and images that are written into a reference."""
DEEPEST_ENTITY = 20
"""Largest depth of entities in each other."""
DEEPEST = 150
"""Largest depth of nested elements. The published code stops at Python's limit of recursion, at about 900."""
REFERENCE = re.compile(r"&([^\s;&<]{1,200});")
MOST_WORK = 3_000_000
"""Largest number of comparisons and visits for one pair. 150 shapes and 120 arrows need about 400,000."""


class Unscorable(Exception):
    """Reason why a document is not scored: a limit of this code, or a place where the published code stops."""


def refuse(reason: str) -> NoReturn:
    """Stop the evaluation. Raises: Unscorable with the reason."""
    raise Unscorable(reason)


class Work:
    """Counter of the comparisons of one evaluation, so that no document costs unbounded time.

    Args:
        left: number of comparisons that may still be made.
    """

    def __init__(self, left: int = MOST_WORK) -> None:
        self.left = left

    def spend(self, steps: int = 1) -> None:
        """Count steps. Raises: Unscorable when more than the limit were made."""
        self.left -= steps
        if self.left < 0:
            refuse(f"the figures need more than {MOST_WORK:,} comparisons")


class _Reader:
    """Handlers of expat that build a tree and stop at the limits while they read, not after it."""

    def __init__(self, text: str) -> None:
        self.builder, self.text = TreeBuilder(), text
        self.elements = self.depth = 0
        self.entities: dict[str, str] = {}

    def start(self, name: str, attributes: dict[str, str]) -> None:
        self.elements += 1
        self.depth += 1
        if self.elements > MOST_ELEMENTS:
            refuse(f"more than {MOST_ELEMENTS:,} elements")
        if self.depth > DEEPEST:
            refuse(f"more than {DEEPEST} nested elements")
        plain = {_full(key): value for key, value in attributes.items()}
        if any(len(value) > MOST_ATTRIBUTE and key not in LONG for key, value in plain.items()):
            refuse(f"an attribute of more than {MOST_ATTRIBUTE:,} characters")
        self.builder.start(_full(name), plain)

    def end(self, name: str) -> None:
        self.depth -= 1
        self.builder.end(_full(name))

    def declared(self, name: str, is_parameter: bool, value: str | None, *_: object) -> None:
        """Note an entity of the document type. Those of files have no value, and are unknown."""
        if not is_parameter and value is not None:
            self.entities.setdefault(name, value)

    def declared_all(self) -> None:
        """Stop if the text is too long with all entities in their places: expat would write them out."""
        sizes: dict[str, int] = {}
        for _ in range(DEEPEST_ENTITY):
            grown = {name: _written(value, sizes) for name, value in self.entities.items()}
            if grown == sizes:
                break
            sizes = grown
        else:
            refuse(f"entities are nested deeper than {DEEPEST_ENTITY}")
        if _written(self.text, sizes) > MOST_CHARACTERS:
            refuse(f"more than {MOST_CHARACTERS:,} characters with its entities")

    def unknown(self, name: str, is_parameter: bool) -> None:
        if not is_parameter:
            refuse(f"the entity {excerpt(name, 80)!r} is unknown")

    def outside(self, context: str, *_: object) -> NoReturn:
        refuse(f"the entity {excerpt(context, 80)!r} is not in the document")


def _written(text: str, sizes: Mapping[str, int]) -> int:
    """Return the length of a text with entities of these lengths in their places."""
    return len(text) + sum(sizes.get(name, 0) for name in REFERENCE.findall(text))


def _full(name: str) -> str:
    """Return a name as trees have it, {namespace}name, from expat's form with the bracket in the middle only."""
    return "{" + name if "}" in name else name


def parse(text: str) -> Element:
    """Return the root of a document, as if its text were a file in UTF-8. No other file and no address is read.

    Raises: Unscorable for text that is no XML, declares an encoding that it does not have, or is beyond a limit.
    """
    if len(text) > MOST_CHARACTERS:
        refuse(f"more than {MOST_CHARACTERS:,} characters")
    reader = _Reader(text)
    parser = expat.ParserCreate(namespace_separator="}")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = reader.start, reader.end
    parser.CharacterDataHandler = reader.builder.data
    parser.EntityDeclHandler, parser.EndDoctypeDeclHandler = reader.declared, reader.declared_all
    parser.SkippedEntityHandler, parser.ExternalEntityRefHandler = reader.unknown, reader.outside
    try:
        parser.Parse(text.encode("utf-8"), True)
    except expat.ExpatError as error:
        refuse(f"no XML: {expat.ErrorString(error.code)} in line {error.lineno}, column {error.offset + 1}")
    except UnicodeEncodeError:
        refuse("no XML: half of a surrogate pair")
    except (LookupError, ValueError) as error:
        refuse(f"no XML: {error}")
    return reader.builder.close()


def name_of(element: Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2] if "}" in element.tag else element.tag


def parents(root: Element) -> dict[Element, Element]:
    """Return the parent of every element but the root."""
    return {child: parent for parent in root.iter() for child in parent}
