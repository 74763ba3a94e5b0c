"""Scene of an SVG document: what is painted, in order, with all references, styles and transforms resolved.

A painter draws it, and a reward reads shapes and texts from it: both see the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from vlmrl.svg.geometry import Box, Command
from vlmrl.svg.values import Matrix

Colour = tuple[float, float, float, float]
"""Red, green, blue and alpha, each in [0, 1], not premultiplied."""
Spread = Literal["pad", "reflect", "repeat"]


@dataclass(frozen=True, slots=True)
class Gradient:
    """Gradient as the source of a fill or a stroke.

    Args:
        coords: x1, y1, x2, y2; radial: centre and radius of the first circle, then of the second one.
        matrix: from the gradient's space to the user space of the shape.
        stops: offset in [0, 1], not falling, and colour; at least two.
    """

    radial: bool
    coords: tuple[float, ...]
    matrix: Matrix
    stops: tuple[tuple[float, Colour], ...]
    spread: Spread


@dataclass(frozen=True, slots=True)
class Tile:
    """Pattern as the source of a fill or a stroke: a tile that repeats.

    Args:
        items: content. Their matrices lead to the space of the tile.
        box: the tile in its own space.
        matrix: from the tile's space to the user space of the shape.
        alpha: opacity of the fill or the stroke.
    """

    items: tuple[Item, ...]
    box: Box
    matrix: Matrix
    alpha: float


Source = Colour | Gradient | Tile


@dataclass(frozen=True, slots=True)
class Stroke:
    """Line along an outline, with lengths in user space. `dashes`: () = a solid line."""

    source: Source
    width: float
    cap: str
    join: str
    miter: float
    dashes: tuple[float, ...]
    offset: float


@dataclass(frozen=True, slots=True)
class Shape:
    """Outline that is filled, stroked or both: a shape, or a run of text.

    Args:
        commands: outline in user space.
        matrix: from user space to the space of the scene.
        tag: element that it comes from.
        number: position of that element in the document. Shapes that `use` shows twice have the same number.
        text: for text: its characters.
        heads: whether the begin and the end have a marker.
        marker: whether it belongs to a marker.
        crisp: edges are not smoothed.
    """

    commands: tuple[Command, ...]
    matrix: Matrix
    fill: Source | None
    stroke: Stroke | None
    tag: str
    number: int
    even_odd: bool = False
    text: str = ""
    heads: tuple[bool, bool] = (False, False)
    marker: bool = False
    stroke_first: bool = False
    crisp: bool = False


@dataclass(frozen=True, slots=True)
class Bitmap:
    """Embedded picture. `pixels`: (height, width, 4) uint8 RGBA; `matrix` leads from its pixels to the scene."""

    pixels: np.ndarray
    matrix: Matrix
    number: int
    alpha: float = 1.0


class ClipPart(NamedTuple):
    """Part of a clip path. A point shows if it is within any of the parts."""

    commands: tuple[Command, ...]
    matrix: Matrix
    even_odd: bool


@dataclass(frozen=True, slots=True)
class Mask:
    """Mask of a group. `alpha_only`: the alpha of the items counts alone, not their luminance."""

    items: tuple[Item, ...]
    box: tuple[Command, ...]
    matrix: Matrix
    alpha_only: bool


@dataclass(frozen=True, slots=True)
class Group:
    """Items that are painted as one: with an opacity, within a clip path, or through a mask.

    Args:
        clip: the parts of the clip path; () = nothing shows; None = no clip path.
        blend: mode in which they are mixed with what is below (see properties.BLENDS); "normal" = they cover it, and
            blend with each other alone; "" = they cover it, one by one.
    """

    items: tuple[Item, ...]
    opacity: float = 1.0
    clip: tuple[ClipPart, ...] | None = None
    mask: Mask | None = None
    blend: str = ""


Item = Shape | Bitmap | Group


@dataclass(frozen=True, slots=True)
class Scene:
    """Content of an SVG document.

    Args:
        width, height: size that the document declares, in pixels.
        box: part of the scene's space that the picture shows.
        aspect: value of `preserveAspectRatio` of the outermost element.
        elements: number of elements in the document.
    """

    items: tuple[Item, ...]
    width: float
    height: float
    box: Box
    aspect: str
    elements: int

    def leaves(self) -> Iterator[tuple[Shape | Bitmap, tuple[Group, ...]]]:
        """Yield what is painted, in order, with the groups around it from the outermost one on."""
        waiting: list[tuple[Item, tuple[Group, ...]]] = [(item, ()) for item in reversed(self.items)]
        while waiting:
            item, groups = waiting.pop()
            if isinstance(item, Group):
                waiting.extend((inner, (*groups, item)) for inner in reversed(item.items))
            else:
                yield item, groups
