"""Similarity of two pictures of figures, without a model: ink, edges and structure. An empty picture earns nothing.

Most of a figure is background. Measures such as SSIM over the whole picture give an empty white picture 0.9 beside a
figure on white. Here the background of the truth is known, a page with a frame or shades too, and only what differs
from it counts: the page alone earns nothing.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

WINDOW = 7
"""Side of the window of SSIM, in pixels."""
SCALES = (1, 2, 4)
"""Sides of the blocks of pixels that are averaged, for structure and ink: a small shift costs less at the larger
ones."""
LEAST_INK = 12
"""Smallest difference from the background, of 255, that is ink."""
EDGE = 24.0
"""Smallest step of the brightness that is an edge, of 255."""
TOLERANCE = 0.01
"""Distance of two edges that count as equal, in diagonals of the picture."""


class PictureScore(NamedTuple):
    """Similarity of two pictures, all in [0, 1].

    Args:
        value: mean of the others, without those in which the bare page has 1: they do not tell a figure from it.
        ink: share of the ink that both have at the same place in the same colour.
        edges: F1 of the edges that have a counterpart nearby, above that of the page alone.
        structure: SSIM of the brightness where either has ink, over several scales; 0 for an empty picture.
    """

    value: float
    ink: float
    edges: float
    structure: float


class TruePicture:
    """Picture of a truth, with what does not depend on the response worked out once.

    Args:
        picture: (height, width, 3) uint8 RGB.
        page: what the truth's background alone looks like, of the same size; None, of one colour, or all of the truth =
            the truth's most frequent colour.
    """

    def __init__(self, picture: np.ndarray, page: np.ndarray | None = None) -> None:
        self._picture, self._page = picture, page

    def similarity(self, drawn: np.ndarray) -> PictureScore:
        """Return how similar a picture is to this one: 1 for equal pictures, 0 for the page or for a single colour.

        Args:
            drawn: (height, width, 3) uint8 RGB of the same size.
        Raises: ValueError for another size.
        """
        truth = self._picture
        if truth.shape != drawn.shape:
            raise ValueError(f"pictures of different sizes: {truth.shape} and {drawn.shape}")
        if (truth == drawn).all():
            return PictureScore(1.0, 1.0, 1.0, 1.0)
        if (drawn == drawn[0, 0]).all():
            return PictureScore(0.0, 0.0, 0.0, 0.0)
        a, b, empty = truth.astype(np.float64), drawn.astype(np.float64), self._empty()
        bare_edges, bare_structure = self._bare
        ink = _ink(a, b, empty)
        edges = _above(_edges(_grey(a), _grey(b)), bare_edges)
        structure = _above(_structure(a, b, empty), bare_structure)
        values = [value for value in (ink, edges, structure) if value is not None]
        return PictureScore(sum(values) / len(values), ink, edges or 0.0, structure or 0.0)

    @cached_property
    def _bare(self) -> tuple[float, float]:
        """Edges and structure of the bare page beside this picture."""
        a, empty = self._picture.astype(np.float64), self._empty()
        return _edges(_grey(a), _grey(empty)), _structure(a, empty, empty)

    def _empty(self) -> np.ndarray:
        # Not kept: many truths are remembered, and as floats a page has up to 2 MB.
        page, truth = self._page, self._picture
        if page is None or (page == page[0, 0]).all() or (page == truth).all():
            return np.broadcast_to(background(truth), truth.shape)
        return page.astype(np.float64)


def _above(value: float, bare: float) -> float | None:
    """Return how far a value is from that of the bare page towards 1, in [0, 1]; None if the bare page has 1."""
    return max(0.0, (value - bare) / (1 - bare)) if bare < 1 else None


def background(picture: np.ndarray) -> np.ndarray:
    """Return the most frequent colour, (3,) float64."""
    flat = picture.reshape(-1, 3).astype(np.int64)
    codes, counts = np.unique(flat @ (65536, 256, 1), return_counts=True)
    code = int(codes[counts.argmax()])
    return np.array((code >> 16, code >> 8 & 255, code & 255), np.float64)


def _grey(picture: np.ndarray) -> np.ndarray:
    # Not as a product of matrices: its last digits depend on the number of threads.
    return 0.299 * picture[:, :, 0] + 0.587 * picture[:, :, 1] + 0.114 * picture[:, :, 2]


def _shrunk(picture: np.ndarray, side: int) -> np.ndarray:
    """Return the means of blocks of side x side pixels. The last blocks may be smaller."""
    if side == 1:
        return picture
    rows, columns = (np.arange(0, n, side) for n in picture.shape[:2])
    total = np.add.reduceat(np.add.reduceat(picture, rows, axis=0), columns, axis=1)
    heights: np.ndarray = np.diff(np.append(rows, picture.shape[0]))
    widths: np.ndarray = np.diff(np.append(columns, picture.shape[1]))
    return total / np.outer(heights, widths).reshape(*total.shape[:2], *[1] * (picture.ndim - 2))


def _ink(a: np.ndarray, b: np.ndarray, empty: np.ndarray) -> float:
    """Return 1 - the difference of the pictures / (ink of one + ink of the other), a mean over scales.

    Source: the similarity of Bray and Curtis (1957), of ink as the difference from the background.
    """
    values = []
    for side in SCALES:
        ground = _shrunk(empty, side)
        x, y = _shrunk(a, side) - ground, _shrunk(b, side) - ground
        total = float(np.abs(x).sum() + np.abs(y).sum())
        values.append(1.0 - float(np.abs(x - y).sum()) / total if total > 0 else 1.0)
    return max(0.0, sum(values) / len(values))


def _edges(a: np.ndarray, b: np.ndarray) -> float:
    first, second = _edge_map(a), _edge_map(b)
    counts = int(first.sum()), int(second.sum())
    if not any(counts):
        return 1.0
    if not all(counts):
        return 0.0
    reach = max(1, round(TOLERANCE * float(np.hypot(*a.shape))))
    recall = float((first & _grown(second, reach)).sum()) / counts[0]
    precision = float((second & _grown(first, reach)).sum()) / counts[1]
    return 2 * recall * precision / (recall + precision) if recall + precision else 0.0


def _edge_map(grey: np.ndarray) -> np.ndarray:
    edges = np.zeros(grey.shape, bool)
    edges[:, 1:] |= np.abs(np.diff(grey, axis=1)) >= EDGE
    edges[1:] |= np.abs(np.diff(grey, axis=0)) >= EDGE
    return edges


def _grown(mask: np.ndarray, reach: int) -> np.ndarray:
    """Return the pixels within a square of `reach` pixels around those of a mask."""
    padded = np.pad(mask.astype(np.int32), reach)
    return window_sums(padded, 2 * reach + 1) > 0


def window_sums(values: np.ndarray, side: int) -> np.ndarray:
    """Return the sums over all windows of side x side that lie within, (height - side + 1, width - side + 1, ...)."""
    total = np.cumsum(np.cumsum(values, axis=0), axis=1)
    total = np.pad(total, ((1, 0), (1, 0), *[(0, 0)] * (values.ndim - 2)))
    return total[side:, side:] - total[:-side, side:] - total[side:, :-side] + total[:-side, :-side]


def ssim_map(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the structural similarity of all windows, with the sample covariance. Values are in 0..255, float64."""
    count = WINDOW * WINDOW
    mean_a, mean_b = window_sums(a, WINDOW) / count, window_sums(b, WINDOW) / count
    unbiased = count / (count - 1)
    var_a = unbiased * (window_sums(a * a, WINDOW) / count - mean_a**2)
    var_b = unbiased * (window_sums(b * b, WINDOW) / count - mean_b**2)
    both = unbiased * (window_sums(a * b, WINDOW) / count - mean_a * mean_b)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    return (2 * mean_a * mean_b + c1) * (2 * both + c2) / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))


def ssim(a: np.ndarray, b: np.ndarray) -> float:
    """Return the structural similarity of two pictures, in [-1, 1]: the mean over channels and windows of 7 x 7.

    Args:
        a, b: (height, width, 3) uint8 of one size, at least 7 x 7.
    Raises: ValueError for other sizes.
    Source: Wang et al. (2004); the same numbers as scikit-image's `structural_similarity` with its defaults.
    """
    if a.shape != b.shape or min(a.shape[:2]) < WINDOW:
        raise ValueError(f"pictures of {a.shape} and {b.shape}: SSIM needs one size, at least {WINDOW} x {WINDOW}")
    return float(ssim_map(a.astype(np.float64), b.astype(np.float64)).mean())


def _structure(a: np.ndarray, b: np.ndarray, empty: np.ndarray) -> float:
    """Return the SSIM of the brightness where either picture has ink, a mean over scales."""
    values = []
    for side in SCALES:
        x, y, ground = _shrunk(a, side), _shrunk(b, side), _shrunk(empty, side)
        if min(x.shape[:2]) < WINDOW:
            break
        has_ink = (np.abs(x - ground).max(axis=2) >= LEAST_INK) | (np.abs(y - ground).max(axis=2) >= LEAST_INK)
        near = window_sums(has_ink.astype(np.int32), WINDOW) > 0
        if near.any():
            similar = ssim_map(_grey(x), _grey(y))
            values.append(float(similar[near].mean()))
    return max(0.0, sum(values) / len(values)) if values else 1.0 - float(np.abs(a - b).mean()) / 255
