"""Rows of the task figures: drawn from the code of sources, split by what they show, or drawn at random."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from PIL import Image

from vlmrl.errors import DataError
from vlmrl.svg.draw import Drawing, DrawJob, draw_svg
from vlmrl.svg.limits import SvgLimits, SvgRefused
from vlmrl.svg.renderer import SvgRenderer
from vlmrl.tasks.drawn_scene import Drawn, draw_rows
from vlmrl.tasks.own_prep import LeftOut, NewRow
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings, draw_figure
from vlmrl.tasks.vfig.filters import Filters
from vlmrl.tasks.vfig.sources import Candidate
from vlmrl.tasks.vfig.truth import make_truth

TRAIN, START, VALIDATION, TEST = "train", "start", "validation", "test"
MOST_PIXELS = 1_048_576
"""Largest number of pixels of a picture. Larger figures are drawn smaller."""
BATCH = 64
PAGE = '<rect width="64" height="64" fill="white" stroke="gray" stroke-width="4"/>'
"""Page of simple figures: without a frame a tiny model cannot tell how far a shape is from the edge."""
DRAWN = "drawn"
"""Label of figures that are drawn at random."""


@dataclass(frozen=True)
class Shares:
    """Shares of the figures that are cut off train.

    Args:
        validation: share for validation, in [0, 1).
        start: share of the others for supervised training before reinforcement learning, in [0, 1).
    """

    validation: float = 0.1
    start: float = 0.0


@dataclass(frozen=True)
class _Figure:
    candidate: Candidate
    png: bytes
    digest: str


def source_rows(
    sources: Iterable[Candidate],
    bench: Iterable[Candidate],
    filters: Filters,
    shares: Shares,
    workers: int | None = None,
) -> dict[str, list[NewRow | LeftOut]]:
    """Return split -> the rows of sources. Figures with equal pictures are one figure: it is in one split alone.

    The split of a figure depends on its picture alone, so that it is the same in every dataset: what one dataset trains
    on, another one does not validate on. Figures of the bench become the split test, and are left out elsewhere.

    Raises: DataError if no figure is left for training.
    """
    splits: dict[str, list[NewRow | LeftOut]] = {TRAIN: [], START: [], VALIDATION: [], TEST: []}
    places: dict[str, str] = {}
    with SvgRenderer(workers or os.cpu_count() or 1, SvgLimits(pixels=MOST_PIXELS)) as renderer:
        for is_bench, candidates in ((True, bench), (False, sources)):
            for figure in _drawn(candidates, Filters(0.0, 0, filters.max_chars) if is_bench else filters, renderer):
                if isinstance(figure, LeftOut):
                    splits[TEST if is_bench else TRAIN].append(figure)
                    continue
                split = TEST if is_bench else split_of(figure.digest, shares)
                origin = figure.candidate.origin
                if figure.digest in places:
                    reason = f"it shows the same as {places[figure.digest]}"
                    splits[split].append(LeftOut(origin, reason))
                    continue
                places[figure.digest] = f"{origin}, which is in the bench" if is_bench else origin
                truth = make_truth(figure.candidate.svg or "", figure.candidate.label)
                splits[split].append(NewRow(truth, [figure.png], {}, origin=origin))
    if not any(isinstance(row, NewRow) for row in splits[TRAIN]):
        reasons = [row.reason for row in splits[TRAIN] if isinstance(row, LeftOut)]
        first = f"; the first one: {reasons[0]}" if reasons else ""
        raise DataError(f"no figure is left for training{first}", hint="see the sources, the filters and --val-share")
    return {name: rows for name, rows in splits.items() if any(isinstance(row, NewRow) for row in rows)}


def split_of(digest: str, shares: Shares) -> str:
    """Return the split of a figure by the sha256 of its picture."""
    place = int(digest[:12], 16) / 16**12
    if place < shares.validation:
        return VALIDATION
    return START if int(digest[12:24], 16) / 16**12 < shares.start else TRAIN


def _drawn(candidates: Iterable[Candidate], filters: Filters, renderer: SvgRenderer) -> Iterator[_Figure | LeftOut]:
    """Yield the figures that pass the filters and can be drawn, and the others with the reason."""
    waiting = iter(candidates)
    while batch := list(islice(waiting, BATCH)):
        reasons = [_reason(candidate, filters) for candidate in batch]
        passed = [candidate for candidate, reason in zip(batch, reasons, strict=True) if not reason]
        drawings = iter(renderer.draw([DrawJob(candidate.svg or "") for candidate in passed]))
        for candidate, reason in zip(batch, reasons, strict=True):
            yield LeftOut(candidate.origin, reason) if reason else _figure(candidate, next(drawings), filters)


def _reason(candidate: Candidate, filters: Filters) -> str:
    if candidate.svg is None:
        return candidate.problem
    try:
        return filters.reason(candidate.svg)
    except SvgRefused as error:
        return error.reason


def _figure(candidate: Candidate, drawing: Drawing | SvgRefused, filters: Filters) -> _Figure | LeftOut:
    if isinstance(drawing, SvgRefused):
        return LeftOut(candidate.origin, f"it cannot be drawn: {drawing.reason}")
    if drawing.is_blank:
        return LeftOut(candidate.origin, "its picture is empty")
    height, width = drawing.pixels.shape[:2]
    if max(height, width) > filters.max_aspect * min(height, width):
        return LeftOut(candidate.origin, f"its picture of {width} x {height} pixels is too narrow")
    return _Figure(candidate, png_of(drawing.pixels), drawing.digest)


def png_of(pixels: np.ndarray) -> bytes:
    """Return a picture, (height, width, 3) uint8 RGB, as PNG."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def drawn_rows(counts: Mapping[str, int], settings: DrawnSettings, seed: int) -> dict[str, list[NewRow]]:
    """Return split -> figures drawn at random. No picture is there twice."""
    return draw_rows("figures", counts, seed, partial(_draw, settings), hint="ask for fewer figures")


def _draw(settings: DrawnSettings, number: int, rng: random.Random) -> Drawn:
    figure = draw_figure(rng, settings)
    svg = figure.svg.replace(">", f">{PAGE}", 1) if settings.simple else figure.svg
    picture = draw_svg(DrawJob(svg)).pixels
    return Drawn(Image.fromarray(picture), make_truth(svg, DRAWN), {})
