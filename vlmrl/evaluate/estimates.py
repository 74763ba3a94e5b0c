"""Means, differences, ratios, AUC and ECE with 95% intervals, for rows that share images. NumPy float64, no randomness.

Each function computes an estimate and the influence of every row on it; `evaluate/interval.py` computes the interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vlmrl.evaluate.interval import (
    EMPTY,
    UNIT_RANGE,
    Clusters,
    Evidence,
    Floats,
    Interval,
    Range,
    Units,
    interval_in_range,
    range_of,
    t_interval,
)
from vlmrl.evaluate.row_keys import RowKeys

ECE_BINS = 10


def mean_interval(
    values: ArrayLike, clusters: Clusters | Units | None, value_range: Range | None = None, *, length: bool = False
) -> Interval:
    """Return the mean of one number per row.

    Args:
        values: [N], finite.
        clusters: image ids of each row, or the units that were made of them; None = rows are independent.
        value_range: range of the quantity; None = none is declared (see `range_of`).
        length: the quantity is a length: Student's t, clipped at `value_range`.
    Raises: ValueError for NaN, infinities, or lengths that differ.
    Example: mean_interval([1, 0, 1, 1], None) -> mean 0.75, interval [0.204, 0.987].
    """
    values_N = _numbers(values)
    if not len(values_N):
        return EMPTY
    units, mean = _units(clusters, len(values_N)), float(values_N.mean())
    bounds = value_range if length else range_of(value_range, values_N)
    if bounds is None or length:
        return t_interval(mean, values_N - mean, units, bounds)
    binary = bool(np.isin(values_N, bounds).all())
    evidence = Evidence(units.independent, len(values_N) if binary else math.inf)
    return interval_in_range(mean, values_N - mean, units, bounds, evidence)


def difference_interval(
    a: ArrayLike, b: ArrayLike, clusters: Clusters | None, value_range: Range | None = None, *, length: bool = False
) -> Interval:
    """Return the mean of a - b on the same rows, in [-(high - low), high - low].

    Args:
        value_range: (low, high) of the quantity itself, not of the difference.
        length: as of `mean_interval`.
    Raises: ValueError for NaN, infinities, or lengths that differ.
    """
    a_N, b_N = _numbers(a), _numbers(b)
    if len(a_N) != len(b_N):
        raise ValueError(f"a paired difference needs the same rows: {len(a_N)} and {len(b_N)}")
    together = [clusters] if clusters is not None else None
    return pooled_difference_interval([(a_N, b_N)], together, value_range, length=length)


def pooled_difference_interval(
    runs: Sequence[tuple[ArrayLike, ArrayLike]],
    clusters: Sequence[Clusters] | None,
    value_range: Range | None = None,
    *,
    length: bool = False,
) -> Interval:
    """Return the mean of a - b over rows and runs (such as three seeds), with the same weight for every run.

    The runs are taken as given: the interval is about the test images, and not about seeds that were never tried. If
    runs have the same images under the same ids, their rows are dependent.

    Args:
        runs: for each run (a, b), both [N_run].
        clusters: for each run the image ids of its rows.
        value_range: range of the quantity itself.
        length: as of `mean_interval`.
    Example: one run of [1, 0] - [0, 0], another of [0, 0] - [0, 0], on the same two rows -> mean 0.25.
    """
    if clusters is not None and len(runs) != len(clusters):
        raise ValueError(f"{len(runs)} runs but {len(clusters)} lists of clusters")
    pairs = [(_numbers(a), _numbers(b)) for a, b in runs]
    counted = sum(len(a) > 0 for a, _ in pairs)
    if not counted:
        return EMPTY
    a_N, b_N = (np.concatenate([pair[side] for pair in pairs]) for side in (0, 1))
    # [N] with mean 1: every row of a single run has weight 1.
    weight_N = np.concatenate([np.full(len(a), len(a_N) / (counted * len(a))) for a, _ in pairs if len(a)])
    units = Units(None if clusters is None else [ids for run in clusters for ids in run], len(a_N))
    difference_N = a_N - b_N
    value = float((weight_N * difference_N).mean())
    influence_N = weight_N * (difference_N - value)
    bounds = value_range if length else range_of(value_range, a_N, b_N)
    width = math.inf if bounds is None else bounds[1] - bounds[0]
    if bounds is None or length:
        return t_interval(value, influence_N, units, (-width, width))
    return interval_in_range(value, influence_N, units, (-width, width), Evidence(units.independent * _kish(weight_N)))


def ratio_interval(numerators: ArrayLike, denominators: ArrayLike, clusters: Clusters | None) -> Interval:
    """Return sum of numerators / sum of denominators, in [0, 1]: a share among rows that are counted (precision, F1).

    Args:
        numerators: [N], each from 0 to its denominator.
    Returns: EMPTY when the sum of the denominators is 0.
    Raises: ValueError as `difference_interval`, and for a numerator outside of its range.
    """
    num_N, den_N = _numbers(numerators), _numbers(denominators)
    if len(num_N) != len(den_N):
        raise ValueError(f"a ratio needs the same rows: {len(num_N)} and {len(den_N)}")
    counted_N = den_N != 0
    if not counted_N.any():
        return EMPTY
    if ((num_N < 0) | (num_N > den_N)).any():
        raise ValueError("a ratio in [0, 1] needs numerators from 0 to their denominators")
    # Rows with denominator 0 are left out: they have no influence and are no evidence. [N] -> [counted rows]
    num_N, den_N = num_N[counted_N], den_N[counted_N]
    units = Units(_of_rows(clusters, counted_N), len(num_N))
    value = float(num_N.sum() / den_N.sum())
    influence_N = (num_N - value * den_N) / den_N.mean()
    binary = bool(np.isin(num_N, UNIT_RANGE).all() and (den_N == 1).all())
    evidence = Evidence(units.independent * _kish(den_N), len(num_N) if binary else math.inf)
    return interval_in_range(value, influence_N, units, UNIT_RANGE, evidence)


def auc_interval(labels: ArrayLike, scores: ArrayLike, clusters: Clusters | None) -> Interval:
    """Return the area under the ROC curve, in [0, 1].

    It is the chance that a positive row has the higher score than a negative one; ties count half.

    Args:
        labels: [N] 0 or 1.
        scores: [N], infinities allowed (a failed answer is ranked last).
    Returns: EMPTY unless both labels occur.
    Source: of the influences: DeLong, DeLong and Clarke-Pearson 1988.
    """
    labels_N, scores_N = _numbers(labels), np.asarray(scores, dtype=np.float64)
    if len(labels_N) != len(scores_N) or np.isnan(scores_N).any() or not np.isin(labels_N, UNIT_RANGE).all():
        raise ValueError("AUC needs one 0/1 label and one score (not NaN) per row")
    positive_N = labels_N == 1.0
    if positive_N.all() or not positive_N.any():
        return EMPTY
    placed_N = _placements(positive_N, scores_N)
    value = float(placed_N[positive_N].mean())
    share_N = np.where(positive_N, positive_N.mean(), 1 - positive_N.mean())
    # The evidence is at least that of the smaller class: an AUC varies no more than a share of its rows.
    of_class = [Units(_of_rows(clusters, mask), int(mask.sum())) for mask in (positive_N, ~positive_N)]
    evidence = Evidence(min(u.independent for u in of_class))
    return interval_in_range(value, (placed_N - value) / share_N, Units(clusters, len(labels_N)), UNIT_RANGE, evidence)


def ece_interval(
    labels: ArrayLike, confidences: ArrayLike, clusters: Clusters | None, *, bins: int = ECE_BINS
) -> Interval:
    """Return the expected calibration error, in [0, 1]; 0 is best.

    It is the mean distance over rows between probabilities and the shares that came true. Rows are put into bins of
    equal width by their probability, [0, 0.1), [0.1, 0.2), ..., [0.9, 1.0] for ten; ECE is the mean over rows of |mean
    label - mean probability| of the row's bin. With few rows per bin it is too high even for a calibrated model (its
    terms cannot be negative), and so is its interval.

    Args:
        labels: [N] 0 or 1.
        confidences: [N] probability of 1, in [0, 1].
    Source: Naeini, Cooper and Hauskrecht 2015, "Calibration Metrics"; Guo et al. 2017, eq. 3, for a binary label.
    Example: probabilities 0.92, 0.98, 0.31 for labels 1, 0, 0 -> (2 * |0.5 - 0.95| + 1 * |0 - 0.31|) / 3 = 0.4033.
    """
    labels_N, confidences_N = _numbers(labels), _numbers(confidences)
    if len(labels_N) != len(confidences_N) or not np.isin(labels_N, UNIT_RANGE).all():
        raise ValueError("ECE needs one 0/1 label and one probability per row")
    if ((confidences_N < 0) | (confidences_N > 1)).any() or bins < 1:
        raise ValueError("ECE needs probabilities from 0 to 1, and at least one bin")
    if not len(labels_N):
        return EMPTY
    bin_N = np.minimum((confidences_N * bins).astype(np.int64), bins - 1)
    gap_N = labels_N - confidences_N
    gap_C = np.bincount(bin_N, gap_N, minlength=bins)
    value = float(np.abs(gap_C).sum() / len(labels_N))
    units = Units(clusters, len(labels_N))
    influence_N = gap_N * np.sign(gap_C)[bin_N] - value
    return interval_in_range(value, influence_N, units, UNIT_RANGE, Evidence(units.independent))


def _units(clusters: Clusters | Units | None, num_rows: int) -> Units:
    return clusters if isinstance(clusters, Units) else Units(clusters, num_rows)


def _of_rows(clusters: Clusters | None, use_N: NDArray[np.bool_]) -> Clusters | None:
    """Return the clusters of the rows where `use_N` is true."""
    if clusters is None or isinstance(clusters, RowKeys):
        return clusters if clusters is None else clusters.take(use_N)
    return [c for c, use in zip(clusters, use_N, strict=True) if use]


def _kish(weight_N: Floats) -> float:
    """Return the effective share of rows with unequal weights: (sum w)^2 / (N sum w^2); 1 for equal weights."""
    return float(weight_N.sum() ** 2 / (len(weight_N) * np.square(weight_N).sum()))


def _placements(positive_N: NDArray[np.bool_], scores_N: Floats) -> Floats:
    """Return the share of the other class that each row beats, [N].

    A positive row beats the rows below it, a negative row those above it. Ties count half.
    """
    placed_N = np.empty(len(scores_N))
    for own_N, wins_above in ((positive_N, True), (~positive_N, False)):
        others = np.sort(scores_N[~own_N])
        below = np.searchsorted(others, scores_N[own_N], "left")
        beaten = (below + np.searchsorted(others, scores_N[own_N], "right")) / (2 * len(others))
        placed_N[own_N] = beaten if wins_above else 1.0 - beaten
    return placed_N


def _numbers(values: ArrayLike) -> Floats:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or not np.isfinite(numbers).all():
        raise ValueError("expected a list of finite numbers")
    return numbers
