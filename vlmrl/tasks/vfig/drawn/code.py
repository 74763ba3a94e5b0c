"""SVG code as text: elements with attributes in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from xml.sax.saxutils import escape, quoteattr

from vlmrl.tasks.vfig.drawn.plane import Point, number

NAMESPACE = "http://www.w3.org/2000/svg"


def tag(name: str, attributes: Mapping[str, str | float], *content: str) -> str:
    """Return the code of an element.

    Args:
        attributes: in the order in which they are written; numbers get at most one decimal.
        content: code of the children, or text that `escaped` has returned.
    """
    texts = {key: value if isinstance(value, str) else number(value) for key, value in attributes.items()}
    start = " ".join([name, *(f"{key}={quoteattr(text)}" for key, text in texts.items())])
    return f"<{start}>{''.join(content)}</{name}>" if content else f"<{start}/>"


def escaped(text: str) -> str:
    """Return text as the content of an element."""
    return escape(text)


def translated(elements: Iterable[str], by: Point) -> str:
    """Return the code of a group that draws elements at another place."""
    return tag("g", {"transform": f"translate({number(by.x)},{number(by.y)})"}, *elements)


def reference(identity: str) -> str:
    """Return a reference to the element with this id, as the value of an attribute."""
    return f"url(#{identity})"
