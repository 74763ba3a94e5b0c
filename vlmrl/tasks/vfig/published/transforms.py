"""Numbers, translations and the canvas of a document, as the published evaluator reads them."""

from __future__ import annotations

import math
import re
from xml.etree.ElementTree import Element

from vlmrl.tasks.vfig.published.document import refuse

NUMERAL = re.compile(r"-?\d*\.?\d+(?:[eE][+-]?\d+)?")
TRANSLATION = re.compile(r"translate\(\s*([-\d.]+)[\s,]+([-\d.]+)")
FIRST_CANVAS = 800, 600
"""Width and height of a document that gives none, in pixels."""


def number(text: str | None, default: float = 0.0) -> float:
    """Return a text that is one number, else the default: `100px` and `50%` are none."""
    try:
        return float(text or "")
    except ValueError:
        return default


def numbers(text: str) -> list[float]:
    """Return every numeral of a text; a plus sign is ignored, so that `+5` is 5 and `--5` is -5."""
    return [float(numeral) for numeral in NUMERAL.findall(text)]


def distance(dx: float, dy: float) -> float:
    """Return the length of a vector. Raises: OverflowError beyond about 1e154, as the published code does."""
    return math.sqrt(dx**2 + dy**2)


def translation(transform: str | None) -> tuple[float, float]:
    """Return the first translation by two plain numbers; (0, 0) without one. Every other transform is ignored."""
    match = TRANSLATION.search(transform or "")
    if match is None:
        return 0.0, 0.0
    try:
        return float(match[1]), float(match[2])
    except ValueError:
        raise refuse(f"the translation {transform!r} has a broken number") from None


def reference_canvas(root: Element) -> tuple[float, float]:
    """Return width and height of a reference in pixels; 0 for a size with a unit."""
    box = numbers(root.get("viewBox", ""))
    if len(box) >= 4:
        return box[2], box[3]
    return number(root.get("width", str(FIRST_CANVAS[0]))), number(root.get("height", str(FIRST_CANVAS[1])))


def canvas(root: Element) -> tuple[float, float]:
    """Return width and height of a response in pixels; the first canvas instead of a size with a unit.

    Raises: Unscorable for a view box that is not four numbers with spaces between them.
    """
    box = root.get("viewBox")
    if box:
        parts = box.split()
        try:
            return float(parts[2]), float(parts[3])
        except (IndexError, ValueError):
            raise refuse(f"the view box {box!r} is not four numbers with spaces between them") from None
    return number(root.get("width"), FIRST_CANVAS[0]), number(root.get("height"), FIRST_CANVAS[1])
