"""Reading of SVG code from anybody: one function for the reference and for the response, with limits."""

from __future__ import annotations

from typing import NoReturn
from xml.etree.ElementTree import Element, ParseError, TreeBuilder

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import DefusedXMLParser

MOST_CHARACTERS = 4_000_000
"""Longest document that is read."""
MOST_ELEMENTS = 20_000
"""Largest number of elements of a document."""
DEEPEST = 150
"""Largest depth of nested elements. The published code runs into Python's limit of recursion a little later."""
MOST_WORK = 3_000_000
"""Largest number of comparisons and visits for one pair; a figure with 100 shapes and 100 arrows needs about 50,000."""


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


class _Limited(TreeBuilder):
    """Builder of a tree that stops at the limits while it reads, not after it."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.depth = 0

    def start(self, tag: str, attrs: dict[str, str]) -> Element:
        self.elements += 1
        self.depth += 1
        if self.elements > MOST_ELEMENTS:
            refuse(f"more than {MOST_ELEMENTS:,} elements")
        if self.depth > DEEPEST:
            refuse(f"more than {DEEPEST} nested elements")
        return super().start(tag, attrs)

    def end(self, tag: str) -> Element:
        self.depth -= 1
        return super().end(tag)


def parse(text: str) -> Element:
    """Return the root of a document. No file and no address is read; document types and entities are refused.

    Raises: Unscorable for text that is no XML, has a document type, or is over a limit.
    """
    if len(text) > MOST_CHARACTERS:
        refuse(f"more than {MOST_CHARACTERS:,} characters")
    parser = DefusedXMLParser(target=_Limited(), forbid_dtd=True)
    try:
        parser.feed(text)
        return parser.close()
    except ParseError as error:
        raise Unscorable(f"no XML: {error}") from None
    except DefusedXmlException as error:
        raise Unscorable(f"document types and entities are not read: {type(error).__name__}") from None
    except (UnicodeError, ValueError) as error:
        raise Unscorable(f"no XML: {error}") from None


def name_of(element: Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2] if "}" in element.tag else element.tag


def parents(root: Element) -> dict[Element, Element]:
    """Return the parent of every element but the root."""
    return {child: parent for parent in root.iter() for child in parent}
