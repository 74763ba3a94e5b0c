"""Screening of figures: drawing of their code, filters, and hashes by which equal figures are recognised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vlmrl.data.image_shards import stored_form
from vlmrl.data.images import decode_image, encode_png
from vlmrl.errors import DataError
from vlmrl.svg.draw import Drawing, DrawJob, pixels_digest
from vlmrl.svg.parse import SvgRefused, find_svg
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.vfig.code_text import code_hash, count_shapes, repetition
from vlmrl.tasks.vfig.figure_sources import SourceFigure
from vlmrl.tasks.vfig.plan import Filters, PictureSizes

WRONG = "wrong"
"""Kind of a rejected figure that cannot be read; figures of the other kinds are left out by a filter."""
COMPARED_SIDE = 32
"""Images are compared at this width and height in pixels, so that fonts and smoothing count little."""
FEW_BASIC = "few basic shapes"
"""Kind of the reason of figures that --min-basic leaves out."""
DOUBTFUL = 0.6
"""Difference of an image and the drawing of its code from which the pair is called doubtful."""
HASH_CHARS = 32


@dataclass(frozen=True)
class Screened:
    """Figure that passed.

    Args:
        svg: its code, from `<svg` to `</svg>`, unchanged.
        width, height: of its drawing in pixels.
        picture_hash, code_hash: equal figures have one of them in common.
        file: image file, PNG or as it came.
        difference: of its own image and the drawing, in [0, 1]; None = the image is the drawing.
    """

    figure: SourceFigure
    svg: str
    width: int
    height: int
    picture_hash: str
    code_hash: str
    file: bytes
    difference: float | None


@dataclass(frozen=True)
class Rejected:
    """Figure that is left out: a kind of reasons for counts, and the reason."""

    figure: SourceFigure
    kind: str
    reason: str


class _Reject(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def screen(
    figures: Sequence[SourceFigure], filters: Filters, sizes: PictureSizes, renderer: SvgRenderer
) -> list[Screened | Rejected]:
    """Return for each figure what is kept of it, or why it is left out.

    Args:
        renderer: its limit of pixels is that of `sizes`.
    """
    results: list[Screened | Rejected | None] = [None] * len(figures)
    codes: dict[int, str] = {}
    for number, figure in enumerate(figures):
        try:
            codes[number] = _checked_code(figure.text, filters)
        except _Reject as reject:
            results[number] = Rejected(figure, reject.kind, reject.reason)
    drawings = dict(zip(codes, renderer.draw([DrawJob(svg) for svg in codes.values()]), strict=True))
    small = [
        (number, sizes.enlarged(*_size(drawing)))
        for number, drawing in drawings.items()
        if isinstance(drawing, Drawing) and sizes.enlarged(*_size(drawing)) != _size(drawing)
    ]
    again = renderer.draw([DrawJob(codes[number], size) for number, size in small])
    drawings |= {number: drawing for (number, _), drawing in zip(small, again, strict=True)}
    for number, drawing in drawings.items():
        figure = figures[number]
        try:
            results[number] = _screened(figure, codes[number], drawing, filters, sizes)
        except _Reject as reject:
            results[number] = Rejected(figure, reject.kind, reject.reason)
    return [result for result in results if result is not None]


def _checked_code(text: str, filters: Filters) -> str:
    """Return the code in a text, unchanged. Raises: _Reject."""
    try:
        svg = find_svg(text)
        if filters.max_chars is not None and len(svg) > filters.max_chars:
            raise _Reject("long", f"the code has {len(svg):,} characters; the limit is {filters.max_chars:,}")
        if filters.repeats and (problem := repetition(svg)):
            raise _Reject("repeats itself", f"the code repeats itself: {problem}")
        counts = count_shapes(svg)
    except SvgRefused as error:
        raise _Reject(f"not drawn ({error.kind})", error.reason) from error
    share = counts.simple_share
    if filters.min_basic is not None and (share is None or share < filters.min_basic):
        reason = "no shapes" if share is None else f"{share:.0%} of the shapes are basic or lines"
        raise _Reject(FEW_BASIC, f"{reason}; at least {filters.min_basic:.0%} are wanted")
    if filters.max_complex is not None and counts.complex > filters.max_complex:
        reason = f"{counts.complex:,} paths and polygons; the limit is {filters.max_complex:,}"
        raise _Reject("many complex shapes", reason)
    return svg


def _screened(
    figure: SourceFigure, svg: str, drawing: Drawing | SvgRefused, filters: Filters, sizes: PictureSizes
) -> Screened:
    if isinstance(drawing, SvgRefused):
        raise _Reject(f"not drawn ({drawing.kind})", drawing.reason)
    if drawing.is_blank:
        raise _Reject("blank", "its drawing is blank")
    width, height = _size(drawing)
    _check_aspect(width, height, "its drawing", filters)
    if figure.image is None:
        from PIL import Image

        file, difference = encode_png(Image.fromarray(drawing.pixels)), None
    else:
        file, difference = _own_image(figure.image, drawing, filters, sizes)
    return Screened(figure, svg, width, height, picture_hash(drawing.pixels), code_hash(svg), file, difference)


def _own_image(data: bytes, drawing: Drawing, filters: Filters, sizes: PictureSizes) -> tuple[bytes, float]:
    """Return the file of an image that came with the code, and its difference to the drawing. Raises: _Reject."""
    try:
        image = decode_image(data)
        _check_aspect(*image.size, "its image", filters)
        if filters.min_image is not None and min(image.size) < filters.min_image:
            size = f"{image.size[0]} x {image.size[1]}"
            raise _Reject("small image", f"its image has {size} pixels; a side of {filters.min_image} is the least")
        pixels = np.asarray(image)
        if (pixels == pixels[0, 0]).all():
            raise _Reject("blank", "its image is blank")
        difference = picture_difference(pixels, drawing.pixels)
        if filters.max_difference is not None and difference > filters.max_difference:
            reason = f"its image differs from the drawing of its code by {difference:.2f} of 1"
            raise _Reject("other picture", f"{reason}; the limit is {filters.max_difference:g}")
        if image.size[0] * image.size[1] > sizes.max_pixels:
            data = stored_form(data, sizes.max_pixels)[0]
    except DataError as error:
        raise _Reject(WRONG, f"its image cannot be used: {error.message}") from error
    return data, difference


def _check_aspect(width: int, height: int, what: str, filters: Filters) -> None:
    ratio = max(width, height) / min(width, height)
    if filters.max_aspect is not None and ratio > filters.max_aspect:
        raise _Reject("long and thin", f"{what} has {width} x {height} pixels, a ratio above {filters.max_aspect:g}")


def _size(drawing: Drawing) -> tuple[int, int]:
    return drawing.pixels.shape[1], drawing.pixels.shape[0]


def picture_hash(pixels: np.ndarray) -> str:
    """Return a hash of a picture without its margins, (height, width, 3) uint8. It is not blank.

    A margin is a row or column at an edge in which all pixels have the colour of the corner at the top left.
    """
    differs = (pixels != pixels[0, 0]).any(axis=2)
    rows, columns = np.flatnonzero(differs.any(axis=1)), np.flatnonzero(differs.any(axis=0))
    inner = pixels[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1] if len(rows) else pixels[:1, :1]
    return pixels_digest(inner)[:HASH_CHARS]


def picture_difference(one: np.ndarray, other: np.ndarray) -> float:
    """Return how much two pictures differ, (height, width, 3) uint8 of any size: 0 = not at all, 1 = nothing is shared.

    It is the sum of the differences of grey values at 32 x 32 pixels, as a share of what both pictures show beside
    their background (the median grey value). So a wrong picture counts as wrong on a large white page, too.
    """
    grey, other_grey = _grey(one), _grey(other)
    shown = sum(float(np.abs(picture - np.median(picture)).sum()) for picture in (grey, other_grey))
    difference = float(np.abs(grey - other_grey).sum())
    return min(1.0, difference / shown) if shown > 0 else float(difference > 0)


def _grey(pixels: np.ndarray) -> Any:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels)).convert("L")
    return np.asarray(image.resize((COMPARED_SIDE, COMPARED_SIDE), Image.Resampling.BOX), dtype=np.float64)
