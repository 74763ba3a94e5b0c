"""Gradients, patterns, fill styles and border styles as the published evaluator reads them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from xml.etree.ElementTree import Element

from vlmrl.redaction.redact import excerpt
from vlmrl.tasks.vfig.published.document import name_of, refuse
from vlmrl.tasks.vfig.published.styles import Classes, style_property
from vlmrl.tasks.vfig.published.transforms import number, numbers

GRADIENTS = {"linearGradient": "gradient-linear", "radialGradient": "gradient-radial"}
STROKE_START = re.compile(r"M\s*([-\d.]+)[\s,]+([-\d.]+)", re.IGNORECASE)
STROKE_END = re.compile(r"L\s*([-\d.]+)[\s,]+([-\d.]+)", re.IGNORECASE)
STOP_COLOUR = re.compile(r"stop-color\s*:([^;]+)")
ANGLE_STEP = 15
"""Angles of strokes count as equal when they are rounded to the same multiple, in degrees."""
SHORTEST = 0.1
"""Change of x and of y up to which a stroke has no direction, in pixels."""
FLAT = 1
"""Largest change of height of a line that is horizontal, in pixels."""
DOTTED = 3
"""Longest first dash of a dotted border, in pixels."""


def reference(paint: str) -> str | None:
    """Return the id that a paint refers to; None for a plain colour, and for an id in quotation marks.

    The last character is taken for the bracket, so that `url(#a) red` refers to `a) re`.
    """
    return paint[5:-1] if paint.startswith("url(#") else None


def fill_styles(root: Element) -> dict[str, str]:
    """Return id -> style of the gradients and patterns in `defs`."""
    styles: dict[str, str] = {}
    for definitions in root.iter():
        if name_of(definitions) != "defs":
            continue
        for child in definitions:
            name = name_of(child)
            if name in GRADIENTS:
                styles[child.get("id", "")] = GRADIENTS[name]
            elif name == "pattern":
                styles[child.get("id", "")] = pattern_style(child)
    return styles


def pattern_style(pattern: Element) -> str:
    """Return what a pattern draws: dots, crosshatch, hatching, horizontal-lines, or `pattern` for anything else."""
    names = [name_of(child) for child in pattern]
    lines = [child for child, name in zip(pattern, names, strict=True) if name == "line"]
    if "circle" in names:
        return "dots"
    if len(lines) > 1:
        return "crosshatch"
    if lines:
        rise = number(lines[0].get("y2")) - number(lines[0].get("y1"))
        return "hatching" if abs(rise) > FLAT else "horizontal-lines"
    paths = [child.get("d", "") for child, name in zip(pattern, names, strict=True) if name == "path"]
    angles = {angle for path in paths for angle in _angles(path)}
    return "pattern" if not angles else "hatching" if len(angles) == 1 else "crosshatch"


def _angles(path: str) -> set[int]:
    """Return the rounded angles of the straight strokes of a path, in [0, 180).

    Raises: Unscorable for a number such as 1.2.3.
    """
    angles: set[int] = set()
    for stroke in _strokes(path):
        try:
            x1, y1, x2, y2 = map(float, stroke)
            if abs(x2 - x1) > SHORTEST or abs(y2 - y1) > SHORTEST:
                angle = math.atan2(y2 - y1, x2 - x1) * 180 / math.pi
                angles.add(round(angle / ANGLE_STEP) * ANGLE_STEP % 180)
        except ValueError:
            refuse(f"a pattern has a stroke with a broken number: {excerpt(path, 80)!r}")
    return angles


def _strokes(path: str) -> Iterator[tuple[str, ...]]:
    """Yield the four numbers of the strokes of a path, all read as absolute.

    A stroke is a move and the next line after it in the same row of text, whatever stands between.
    """
    at, end = 0, None
    while start := STROKE_START.search(path, at):
        if end is None or end.start() < start.end():
            end = STROKE_END.search(path, start.end())
        if end is None:
            return
        row_end = path.find("\n", start.end(), end.start())
        if row_end < 0:
            yield (*start.groups(), *end.groups())
        # A move without a line in its row may still be part of the next match.
        at = end.end() if row_end < 0 else start.start() + 1


def stop_colours(root: Element) -> dict[str, str]:
    """Return id -> colour of the gradients anywhere in a document."""
    colours: dict[str, str] = {}
    for gradient in root.iter():
        if (key := gradient.get("id")) and name_of(gradient) in GRADIENTS and (colour := _first_stop(gradient)):
            colours[key] = colour
    return colours


def reference_colours(root: Element) -> dict[str, str]:
    """Return id -> colour of the gradients and patterns of a reference; a pattern's is that of its first rectangle."""
    colours: dict[str, str] = {}
    for element in root.iter():
        name, colour = name_of(element), ""
        if name in GRADIENTS:
            colour = _first_stop(element)
        elif name == "pattern":
            colour = next((c.get("fill", "") for c in element if name_of(c) == "rect"), "")
        if (key := element.get("id")) and not is_none(colour):
            colours[key] = colour
    return colours


def is_none(paint: str) -> bool:
    """Return whether a paint is absent or `none`; spaces around it are not removed."""
    return len(paint) <= 4 and paint.lower() in ("", "none")


def _first_stop(gradient: Element) -> str:
    """Return the colour of the first stop that has one; "" without any. Classes do not count."""
    colours = (_stop_colour(child) for child in gradient if name_of(child) == "stop")
    return next((colour for colour in colours if not is_none(colour)), "")


def _stop_colour(stop: Element) -> str:
    match = None if stop.get("stop-color") else STOP_COLOUR.search(stop.get("style", ""))
    return match[1].strip() if match is not None else stop.get("stop-color", "")


def resolved(paint: str, colours: Mapping[str, str]) -> str:
    """Return the colour that a paint refers to; the paint itself if it is a colour or the reference is unknown."""
    key = reference(paint)
    return colours.get(key, paint) if key is not None else paint


def fill_style(element: Element, styles: Mapping[str, str], rules: Classes) -> str:
    """Return the fill style of an element: none, solid, or the style of the gradient or pattern."""
    fill = style_property(element, "fill", rules)
    if is_none(fill):
        return "none"
    key = reference(fill)
    return "solid" if key is None else styles.get(key, "pattern")


def border_style(element: Element, rules: Classes) -> str:
    """Return solid, dotted, dashed or dash-dot, from the dashes of a border."""
    return dash_style(style_property(element, "stroke-dasharray", rules))


def dash_style(dashes: str) -> str:
    """Return the style of a list of dashes: four or more are dash-dot, a short first one is dotted."""
    if is_none(dashes):
        return "solid"
    lengths = numbers(dashes)
    if len(lengths) >= 4:
        return "dash-dot"
    return "solid" if not lengths else "dotted" if lengths[0] <= DOTTED else "dashed"
