"""Score of a drawing beside the true one: elements, picture, cleanliness of the code and its length."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np

from vlmrl.svg.build import Images, build_scene
from vlmrl.svg.draw import FONT_SAMPLE, own_size
from vlmrl.svg.parse import SvgLimits, parse_svg
from vlmrl.svg.scene import Bitmap
from vlmrl.tasks.vfig.scoring.elements import Element, elements_of
from vlmrl.tasks.vfig.scoring.matching import correspond
from vlmrl.tasks.vfig.scoring.picture import PictureScore, TruePicture
from vlmrl.tasks.vfig.scoring.seen import View, look

SIDE, LEAST_SIDE = 320, 64
"""Limits of the longer side of the pictures that are compared, in pixels. Icons declare sizes such as 16 pixels."""
BASIC = ("rect", "circle", "ellipse", "line", "polyline")
COMPLEX = ("path", "polygon")
LONG, TOO_LONG, SPARE = 1.5, 4.0, 200
"""Length of the code, in lengths of the truth, up to which it earns all, and from which on it earns nothing; and the
number of characters that are free."""


@dataclass(frozen=True, eq=False)
class Figure:
    """Drawing as it is compared.

    Args:
        elements: what can be seen of it.
        cleanliness: share of basic shapes and lines among all shapes that show, in [0, 1]; None without any.
        chars: length of its code.
    """

    view: View
    elements: list[Element]
    cleanliness: float | None
    chars: int

    @cached_property
    def true_picture(self) -> TruePicture:
        """The picture, if this is a truth."""
        return TruePicture(self.view.picture, self.view.page)

    @property
    def size(self) -> tuple[int, int]:
        """Width and height of its picture."""
        height, width = self.view.picture.shape[:2]
        return width, height


def read_figure(
    svg: str, size: tuple[int, int] | None = None, *, images: Images = "refuse", limits: SvgLimits | None = None
) -> Figure:
    """Return a drawing as it is compared.

    Args:
        size: width and height of its picture; None = what it declares, with a longer side of LEAST_SIDE to SIDE.
    Raises: SvgRefused.
    """
    limits = limits or SvgLimits()
    scene = build_scene(parse_svg(svg, limits), limits, images=images, size=size)
    width, height = size or compared_size(*own_size(scene, limits))
    view = look(scene, width, height)
    return Figure(view, elements_of(view), cleanliness(view), len(svg))


def load_fonts() -> None:
    """Load the fonts, before the time of a response is taken."""
    read_figure(FONT_SAMPLE)


@lru_cache(maxsize=64)
def read_truth(svg: str, images: Images = "refuse") -> Figure:
    """Return a true drawing; see `read_figure`. All responses to one prompt share it."""
    return read_figure(svg, images=images)


def compared_size(width: int, height: int) -> tuple[int, int]:
    """Return the size of the picture in which a truth of that size is compared."""
    return fitting(width, height, SIDE, LEAST_SIDE)


def fitting(width: int, height: int, side: int = SIDE, least: int = 1) -> tuple[int, int]:
    """Return a size of the same shape whose longer side is at least `least` and at most `side`."""
    longer = max(width, height)
    scale = min(side, max(least, longer)) / longer
    return max(1, round(width * scale)), max(1, round(height * scale))


def cleanliness(view: View) -> float | None:
    """Return (basic shapes + lines) / all shapes, over the elements that show; None if there is no shape.

    Markers and texts do not count. Hidden and empty elements do not show, and do not count.
    """
    tags = [one.leaf.tag for one in view.seen if not isinstance(one.leaf, Bitmap) and not one.leaf.marker]
    basic, rest = (sum(tag in group for tag in tags) for group in (BASIC, COMPLEX))
    return basic / (basic + rest) if basic + rest else None


@dataclass(frozen=True)
class FigureScore:
    """Scores of a drawing beside the true one, all in [0, 1]; all are 1 for the truth itself.

    Args:
        elements: see matching.correspond; if neither drawing has elements, the score of the picture.
        picture: see picture.TruePicture.
        clean: `content` times the cleanliness of the code beside that of the truth.
        length: `content` times how the length of the code is beside that of the truth.
        kinds: the score over shapes, lines and texts alone.
        matched: number of pairs of elements.
    """

    elements: float
    picture: PictureScore
    clean: float
    length: float
    kinds: Mapping[str, float] = field(default_factory=dict)
    matched: int = 0


def compare(truth: Figure, response: Figure) -> FigureScore:
    """Return the scores of a drawing. Both must have pictures of one size."""
    pairs = correspond(
        truth.elements,
        response.elements,
        math.hypot(*truth.size),
        (truth.view.more, response.view.more),
    )
    picture = truth.true_picture.similarity(response.view.picture)
    # Where neither has elements, their pages are all that there is.
    is_page = not (truth.elements or response.elements or truth.view.more or response.view.more)
    elements = picture.value if is_page else pairs.score
    content = (elements + picture.value) / 2
    tidy = 1.0
    if truth.cleanliness is not None:
        tidy = min(1.0, ((response.cleanliness or 0.0) + 0.05) / (truth.cleanliness + 0.05))
    short = length_share(response.chars, truth.chars)
    return FigureScore(elements, picture, content * tidy, content * short, pairs.kinds, len(pairs.pairs))


def length_share(chars: int, truth_chars: int) -> float:
    """Return 1 for code of up to LONG lengths of the truth, falling to 0 at TOO_LONG, after SPARE free characters."""
    ratio = max(0, chars - SPARE) / max(1, truth_chars)
    return float(np.clip((TOO_LONG - ratio) / (TOO_LONG - LONG), 0.0, 1.0))
