"""Drawing of SVG text in this process. Hostile text belongs into a worker: see renderer.py."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from vlmrl.svg.build import Images, build_scene
from vlmrl.svg.limits import SvgLimits, SvgRefused, Work
from vlmrl.svg.paint import paint
from vlmrl.svg.parse import parse_svg
from vlmrl.svg.scene import Scene

Drawer = Literal["vlmrl", "cairosvg"]
"""Painter: vlmrl's own painter, or cairosvg, for the sake of a published reward."""
FONT_SAMPLE = '<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><text y="9">a\u2713</text></svg>'
"""SVG text whose drawing loads the fonts: one letter is not in the first of them."""


@dataclass(frozen=True)
class DrawJob:
    """SVG text to draw.

    Args:
        svg: the text.
        size: width and height of the picture in pixels; None = what the document declares, scaled down to the limit.
    """

    svg: str
    size: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class Drawing:
    """Picture of an SVG text.

    Args:
        pixels: (height, width, 3) uint8 RGB, on white.
        digest: sha256 of size and pixels, 64 hexadecimal digits. Equal texts have equal pictures on every machine that
            has the same versions of cairo and of vlmrl's fonts.
        seconds: time of drawing.
    """

    pixels: np.ndarray
    digest: str
    seconds: float

    @property
    def is_blank(self) -> bool:
        """Whether all pixels are equal."""
        return bool((self.pixels == self.pixels[0, 0]).all())


def draw_svg(job: DrawJob, limits: SvgLimits | None = None, *, images: Images = "refuse") -> Drawing:
    """Return the picture of an SVG text.

    Raises: SvgRefused for text that is no SVG, is forbidden, or is beyond a limit of content. Time and memory have
        limits in a worker alone.
    """
    limits, begin = limits or SvgLimits(), time.perf_counter()
    if job.size is not None:
        _check_size(job.size, limits)
    scene = build_scene(parse_svg(job.svg, limits), limits, images=images, size=job.size)
    pixels = paint(scene, *(job.size or own_size(scene, limits)), Work(limits.steps))
    return Drawing(pixels, pixels_digest(pixels), time.perf_counter() - begin)


def _check_size(size: tuple[int, int], limits: SvgLimits) -> None:
    if min(size) < 1 or size[0] * size[1] > limits.pixels:
        raise SvgRefused("limit", f"a picture of {size[0]:,} x {size[1]:,} pixels is beyond {limits.pixels:,} pixels")


def own_size(scene: Scene, limits: SvgLimits) -> tuple[int, int]:
    """Return the size that a document declares, in whole pixels, scaled down to the limit."""
    scale = min(1.0, math.sqrt(limits.pixels / max(1.0, scene.width * scene.height)))
    width, height = (max(1, math.floor(side * scale + 0.5)) for side in (scene.width, scene.height))
    if width * height > limits.pixels:  # rounded up
        width, height = min(width, limits.pixels), max(1, min(height, limits.pixels // min(width, limits.pixels)))
    return width, height


def pixels_digest(pixels: np.ndarray) -> str:
    """Return the sha256 of size and pixels of a picture, (height, width, 3) uint8."""
    digest = hashlib.sha256(repr(pixels.shape).encode())
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.hexdigest()
