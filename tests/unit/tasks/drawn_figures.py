"""Reader of drawn diagrams: what the code and the picture show, without the generator's help."""

from __future__ import annotations

import io
import math
import random
import re
from collections.abc import Iterator
from functools import cache
from typing import Any
from xml.etree import ElementTree

import cairosvg
import numpy as np
from PIL import Image

from vlmrl.tasks.vfig.drawn.figure import DrawnFigure, DrawnSettings, draw_figure

SVG = "{http://www.w3.org/2000/svg}"
FIGURES = 300
ALLOWED = {
    "svg", "g", "defs", "rect", "circle", "ellipse", "line", "path", "polygon", "text", "marker", "linearGradient",
    "radialGradient", "stop", "pattern",
}  # fmt: skip
ATTRIBUTES_TEXT = """
    id width height viewBox x y x1 y1 x2 y2 cx cy r rx ry d points fill stroke stroke-width stroke-dasharray
    marker-end transform text-anchor font-family font-size offset stop-color patternUnits refX refY markerWidth
    markerHeight orient
"""
ATTRIBUTES = set(ATTRIBUTES_TEXT.split())
Entity = dict[str, Any]


@cache
def drawn(seed: int, simple: bool = False) -> DrawnFigure:
    return draw_figure(random.Random(seed), DrawnSettings(simple=simple))


def many(simple: bool = False, count: int = FIGURES) -> Iterator[DrawnFigure]:
    return (drawn(seed, simple) for seed in range(count))


def entities(figure: DrawnFigure, kind: str) -> list[Entity]:
    return [entity for key, entity in figure.metadata["entities"].items() if key.startswith(kind)]


def shapes() -> list[Entity]:
    return [shape for figure in many() for shape in entities(figure, "shape")]


def pixels(svg: str) -> np.ndarray:
    png = cairosvg.svg2png(bytestring=svg.encode(), background_color="white")
    with Image.open(io.BytesIO(png or b"")) as image:
        return np.asarray(image.convert("RGB"))


def numbers_in(text: str) -> list[float]:
    return [float(n) for n in re.findall(r"-?\d+(?:\.\d+)?", text)]


def within_chance(hits: int, trials: int, chance: float) -> bool:
    """Whether a count is within 4 standard deviations of its mean."""
    return abs(hits - trials * chance) <= 4 * math.sqrt(trials * chance * (1 - chance))


def points_of(element: ElementTree.Element) -> list[tuple[float, float]]:
    """Points whose box is that of an element; for a cloud, a picture is needed."""
    tag, get = element.tag.removeprefix(SVG), lambda key: float(element.get(key, "0"))
    if tag == "rect":
        return [(get("x"), get("y")), (get("x") + get("width"), get("y") + get("height"))]
    if tag in ("circle", "ellipse"):
        rx, ry = (get("r"), get("r")) if tag == "circle" else (get("rx"), get("ry"))
        return [(get("cx") - rx, get("cy") - ry), (get("cx") + rx, get("cy") + ry)]
    if tag == "polygon":
        flat = numbers_in(element.get("points", ""))
        return list(zip(flat[::2], flat[1::2], strict=True))
    assert tag == "path"
    upright = re.fullmatch(
        r"M([\d.]+),[\d.]+ V[\d.]+ A\S+ 0 0 0 \S+,([\d.]+) A\S+ 0 0 0 ([\d.]+),.*", element.get("d", "")
    )
    assert upright, "the body of a cylinder: left, bottom, right"
    left, bottom, right = map(float, upright.groups())
    return [(left, bottom), (right, bottom)]


def read_shape(root: ElementTree.Element, index: int) -> Entity:
    """Return the metadata of a shape as its code shows it."""
    top = list(root)
    position = next(i for i, e in enumerate(top) if e.get("id") == f"shape_{index}")
    element = top[position]
    is_group = element.tag == f"{SVG}g"
    parts = [e for e in element if e.tag not in (f"{SVG}g", f"{SVG}text")] if is_group else [element]
    copies = [e for e in element if e.tag == f"{SVG}g"]
    text = element.find(f"{SVG}text") if is_group else top[position + 1]
    front = parts[0]
    assert text is not None
    fill, tag = front.get("fill", ""), front.tag.removeprefix(SVG)
    bounds = None
    if not (tag == "path" and len(parts) == 1):
        xs, ys = zip(*(point for part in parts for point in points_of(part)), strict=True)
        bounds = [min(xs), min(ys), max(xs), max(ys)]
    return {
        "bounds": bounds,
        "tags": [part.tag.removeprefix(SVG) for part in parts],
        "corners": len(points_of(front)) if tag == "polygon" else 0,
        "label": text.text,
        "font": text.get("font-family"),
        **read_fill(root, fill),
        "strokeColor": front.get("stroke"),
        "strokeWidth": float(front.get("stroke-width", "0")),
        "borderStyle": read_border(front),
        "stacked": len(copies) + 1,
        "rounded": front.get("rx") is not None and tag == "rect",
        "steps": [numbers_in(copy.get("transform", "")) for copy in copies],
    }


def read_fill(root: ElementTree.Element, fill: str) -> Entity:
    if not fill.startswith("url"):
        return {"fillStyle": "solid", "fillColor": fill}
    definition = next(e for e in root.iter() if e.get("id") == fill[5:-1])
    tag, first = definition.tag.removeprefix(SVG), definition[0]
    if tag.endswith("Gradient"):
        return {"fillStyle": f"gradient-{tag.removesuffix('Gradient')}", "fillColor": first.get("stop-color")}
    marks = [e.tag.removeprefix(SVG) for e in definition[1:]]
    slopes = [float(e.get("y2", "0")) - float(e.get("y1", "0")) for e in definition[1:]]
    lines = "crosshatch" if len(marks) == 2 else "hatching" if slopes[0] else "horizontal-lines"
    return {"fillStyle": "dots" if marks == ["circle"] else lines, "fillColor": first.get("fill")}


def read_border(element: ElementTree.Element) -> str:
    dashes, width = numbers_in(element.get("stroke-dasharray", "")), float(element.get("stroke-width", "1"))
    return "solid" if not dashes else "dash-dot" if len(dashes) == 4 else "dotted" if dashes[0] <= width else "dashed"


def tags_of(shape: Entity) -> tuple[str, int]:
    """Return the front element and the number of its corners that a kind of shape must have."""
    corners = {
        "triangle": 3,
        "diamond": 4,
        "trapezoid": 4,
        "parallelogram": 4,
        "pentagon": 5,
        "hexagon": 6,
        "octagon": 8,
    }
    corners |= {f"3d-{name}": corners[name] for name in ("diamond", "trapezoid", "hexagon")} | {"3d-prism": 3}
    tags = {"rectangle": "rect", "square": "rect", "3d-cube": "rect", "cloud": "path", "3d-cylinder": "path"}
    kind = shape["shape"]
    return ("polygon", corners[kind]) if kind in corners else (tags[kind] if kind in tags else str(kind), 0)


def ends_of(element: ElementTree.Element) -> tuple[np.ndarray, np.ndarray]:
    """Return start and tip of an arrow; the tip is one line width beyond the end of the line."""
    keys = ("x1", "y1", "x2", "y2")
    flat = numbers_in(element.get("d", "")) or [float(element.get(key, "nan")) for key in keys]
    start, before, end = np.array(flat[:2]), np.array(flat[-4:-2]), np.array(flat[-2:])
    return start, end + (end - before) / np.linalg.norm(end - before) * float(element.get("stroke-width", "0"))
