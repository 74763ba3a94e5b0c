"""Plan of a dataset of figures: sources, filters, sizes. This module loads neither numpy nor the renderer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vlmrl.data.parallel_parts import Progress
from vlmrl.tasks.vfig.drawn.figure import DrawnSettings
from vlmrl.tasks.vfig.figure_sources import FigureSource


@dataclass(frozen=True)
class Filters:
    """Filters of figures. None = the filter is off.

    Args:
        min_basic: smallest share of basic shapes and lines among all shapes, in [0, 1].
        max_complex: largest number of paths and polygons.
        max_chars: largest number of characters of the code.
        repeats: whether code that repeats itself is left out.
        max_aspect: largest ratio of the longer to the shorter side of a picture.
        min_image: smallest shorter side in pixels of an image that comes with the code.
        max_difference: largest difference of such an image and the drawing of the code, in [0, 1].
    """

    min_basic: float | None = None
    max_complex: int | None = None
    max_chars: int | None = None
    repeats: bool = False
    max_aspect: float | None = None
    min_image: int | None = None
    max_difference: float | None = None


@dataclass(frozen=True)
class PictureSizes:
    """Sizes of pictures, the same for all uses of a dataset.

    A drawing has the size that the code declares. It is scaled down to `max_pixels`, or up until its shorter side has
    `min_side` pixels. An image that comes with the code is scaled down, too.
    """

    max_pixels: int
    min_side: int

    def enlarged(self, width: int, height: int) -> tuple[int, int]:
        """Return the size to which a smaller drawing is scaled up; the same size if it is large enough."""
        scale = min(self.min_side / min(width, height), math.sqrt(self.max_pixels / (width * height)))
        if scale <= 1:
            return width, height
        return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


@dataclass(frozen=True)
class Plan:
    """Figures to collect, and how.

    Args:
        sources: figures to train on.
        filters: of `sources`.
        drawn, drawn_bench: numbers of drawn training rows and benchmark rows.
        drawn_settings, drawn_filters, seed: of drawn figures.
        benches: figures of the split `test`. They pass no filter: only what cannot be drawn is left out.
        beside: folders of datasets that are used together with this one.
        val_share: share of the figures that is in validation.
        max_bad: largest share of the rows of a source that cannot be read.
        workers: processes that draw; None = one per core.
    """

    sources: Sequence[FigureSource]
    filters: Filters
    sizes: PictureSizes
    drawn: int = 0
    drawn_bench: int = 0
    drawn_settings: DrawnSettings = field(default_factory=DrawnSettings)
    drawn_filters: Filters = field(default_factory=Filters)
    seed: int = 0
    benches: Sequence[FigureSource] = ()
    beside: Sequence[Path] = ()
    val_share: float = 0.1
    max_bad: float = 0.0
    workers: int | None = None
    progress: Progress | None = None
