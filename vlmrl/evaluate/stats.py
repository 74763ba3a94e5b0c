"""Means, differences, ratios and AUC with 95% intervals that resample images, not rows. NumPy float64, seeded.

Rows of a pair task share images: two pairs with one scan in common are not two independent observations, and intervals
that resample rows are too narrow. Here one replicate draws the images with replacement; a row counts as often as the
product of how often its distinct images were drawn (the vertex bootstrap of Snijders and Borgatti 1999; for arrays the
pigeonhole bootstrap of Owen 2007). For rows of one image each this is the cluster bootstrap, for rows that share
nothing the ordinary bootstrap of rows: images that occur in exactly the same rows count as one unit.

The product counts noise that belongs to a single pair three times (the variance of a product of two Poisson(1) counts).
Therefore the replicates are drawn in towards the estimate until their variance is the dyadic-robust one (Aronow, Samii
and Assenova 2015, eq. 4): the sum of e_p * e_q over all rows p, q that share an image, e = influence of a row; never
below the variance of independent rows. With few units the percentile interval is widened as in Hesterberg 2015,
section 4.1.2, by sqrt(m / (m - 1)) * t(m - 1) / z.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Clusters = Sequence[Sequence[Hashable]]
"""For every row the ids of its images; the same id twice in a row counts once. A row without ids stands alone."""

REPLICATES = 2000
Z_95 = 1.959963984540054
FEW_UNITS = 30
FEW_EVENTS = 10
"""With fewer units, or fewer zeros or ones than this, a share (values 0 and 1 only) gets a Wilson interval."""
ECE_BINS = 10
CHUNK_NUMBERS = 4_000_000
"""Most weights held at once: replicates x rows."""


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its 95% interval. `n` = rows it is made of; all three numbers are NaN when n = 0."""

    mean: float
    low: float
    high: float
    n: int = 0


EMPTY = Interval(math.nan, math.nan, math.nan, 0)


def bootstrap_mean(
    values: ArrayLike, clusters: Clusters | None, seed: int = 0, *, replicates: int = REPLICATES,
    bounds: tuple[float, float] | None = None,
) -> Interval:  # fmt: skip
    """Mean of one number a row.

    Args:
        values: [N], finite.
        clusters: image ids of each row; None = rows are independent.
        bounds: range that the mean cannot leave; the interval is cut to it.
    Raises: ValueError for NaN, infinities or lengths that differ.
    Example: bootstrap_mean([1, 0, 1, 1], None) -> mean 0.75, Wilson interval [0.301, 0.954].
    """
    values_N = _numbers(values)
    if not len(values_N):
        return EMPTY
    units = Units(clusters, len(values_N))
    mean = float(values_N.mean())
    ones = float(values_N.sum())
    if np.isin(values_N, (0.0, 1.0)).all() and (
        units.independent < FEW_UNITS or min(ones, len(values_N) - ones) < FEW_EVENTS
    ):
        return _share(values_N, units)

    def statistic(weights_RN: Floats) -> Floats:
        return weights_RN @ values_N / weights_RN.sum(1)

    return _interval(mean, statistic, values_N - mean, units, seed, replicates, bounds)


def paired_bootstrap(
    a: ArrayLike, b: ArrayLike, clusters: Clusters | None, seed: int = 0, *, replicates: int = REPLICATES
) -> Interval:
    """Mean of a - b on the same rows: what one model has over another, row by row.

    Raises: ValueError for NaN, infinities or lengths that differ.
    """
    a_N, b_N = _numbers(a), _numbers(b)
    if len(a_N) != len(b_N):
        raise ValueError(f"a paired difference needs the same rows: {len(a_N)} and {len(b_N)}")
    if not len(a_N):
        return EMPTY
    units, difference_N = Units(clusters, len(a_N)), a_N - b_N
    mean = float(difference_N.mean())

    def statistic(weights_RN: Floats) -> Floats:
        return weights_RN @ difference_N / weights_RN.sum(1)

    return _interval(mean, statistic, difference_N - mean, units, seed, replicates, None)


def pooled_bootstrap(
    runs: Sequence[ArrayLike], clusters: Sequence[Clusters], seed: int = 0, *, replicates: int = REPLICATES
) -> Interval:
    """Mean over rows and runs (say, differences of three seeds): images are resampled jointly, for all runs at once.

    The runs are given; the interval is about the test images, not about seeds that were never tried. Each run counts
    alike, whatever its number of rows. Where runs have the same images under the same ids, their rows move together.

    Args:
        runs: for each run [N_run] values.    clusters: for each run the image ids of its rows.
    Example: runs [[1, 0], [0, 0]] on the same two rows -> mean 0.25.
    """
    if len(runs) != len(clusters):
        raise ValueError(f"{len(runs)} runs but {len(clusters)} lists of clusters")
    parts = [_numbers(values) for values in runs]
    if not any(len(p) for p in parts):
        return EMPTY
    values_N = np.concatenate(parts)
    share_N = np.concatenate([np.full(len(p), 1.0 / len(p)) for p in parts if len(p)])
    together = [ids for run in clusters for ids in run]
    return _ratio(values_N * share_N, share_N, Units(together, len(values_N)), seed, replicates, None)


def bootstrap_ratio(
    numerators: ArrayLike, denominators: ArrayLike, clusters: Clusters | None, seed: int = 0, *,
    replicates: int = REPLICATES, bounds: tuple[float, float] | None = None,
) -> Interval:  # fmt: skip
    """Sum of numerators / sum of denominators: a share among rows that are themselves counted (precision, F1, ...).

    Returns: EMPTY when the denominators add up to 0.    Raises: ValueError as `paired_bootstrap`.
    """
    num_N, den_N = _numbers(numerators), _numbers(denominators)
    if len(num_N) != len(den_N):
        raise ValueError(f"a ratio needs the same rows: {len(num_N)} and {len(den_N)}")
    if not len(num_N) or den_N.sum() == 0:
        return EMPTY
    return _ratio(num_N, den_N, Units(clusters, len(num_N)), seed, replicates, bounds)


def bootstrap_auc(
    labels: ArrayLike, scores: ArrayLike, clusters: Clusters | None, seed: int = 0, *, replicates: int = REPLICATES
) -> Interval:
    """Area under the ROC curve: the chance that a positive row has the higher score; ties count half. Range [0, 1].

    Args:
        labels: [N] 0 or 1.    scores: [N], infinities allowed (a failed answer is ranked last).
    Returns: EMPTY unless both labels occur.
    """
    labels_N, scores_N = _numbers(labels), np.asarray(scores, dtype=np.float64)
    if len(labels_N) != len(scores_N) or np.isnan(scores_N).any() or not np.isin(labels_N, (0.0, 1.0)).all():
        raise ValueError("AUC needs one 0/1 label and one score (not NaN) a row")
    positive_N = labels_N == 1.0
    if positive_N.all() or not positive_N.any():
        return EMPTY
    order_N = np.argsort(scores_N, kind="stable")
    starts_U = np.flatnonzero(np.r_[True, np.diff(_ranks(scores_N[order_N])) > 0])

    def statistic(weights_RN: Floats) -> Floats:
        return _weighted_auc(weights_RN[:, order_N], positive_N[order_N], starts_U)

    value = float(statistic(np.ones((1, len(labels_N))))[0])
    influence_N = _auc_influence(positive_N, scores_N, value)
    return _interval(value, statistic, influence_N, Units(clusters, len(labels_N)), seed, replicates, (0.0, 1.0))


def bootstrap_ece(
    labels: ArrayLike, confidences: ArrayLike, clusters: Clusters | None, seed: int = 0, *, bins: int = ECE_BINS,
    replicates: int = REPLICATES,
) -> Interval:  # fmt: skip
    """Expected calibration error: how far probabilities are, on average over rows, from the shares that came true.

    Rows are put into bins of equal width by their probability, [0, 0.1), [0.1, 0.2), ..., [0.9, 1.0] for ten; ECE is
    the mean over rows of |mean label - mean probability| of the row's bin. Range [0, 1], 0 is best. With few rows a bin
    it is too high even for a calibrated model (its terms cannot be negative), and so are the bootstrap's replicates.

    Args:
        labels: [N] 0 or 1.    confidences: [N] probability of 1, in [0, 1].
    Source: Naeini, Cooper and Hauskrecht 2015, "Calibration Metrics"; Guo et al. 2017, eq. 3, for a binary label.
    Example: probabilities 0.92, 0.98, 0.31 for labels 1, 0, 0 -> (2 * |0.5 - 0.95| + 1 * |0 - 0.31|) / 3 = 0.4033.
    """
    labels_N, confidences_N = _numbers(labels), _numbers(confidences)
    if len(labels_N) != len(confidences_N) or not np.isin(labels_N, (0.0, 1.0)).all():
        raise ValueError("ECE needs one 0/1 label and one probability a row")
    if ((confidences_N < 0) | (confidences_N > 1)).any() or bins < 1:
        raise ValueError("ECE needs probabilities from 0 to 1, and at least one bin")
    if not len(labels_N):
        return EMPTY
    bin_N = np.minimum((confidences_N * bins).astype(np.int64), bins - 1)
    gap_NC = np.zeros((len(labels_N), bins))
    gap_NC[np.arange(len(labels_N)), bin_N] = labels_N - confidences_N

    def statistic(weights_RN: Floats) -> Floats:
        return np.abs(weights_RN @ gap_NC).sum(1) / weights_RN.sum(1)

    signs_C = np.sign(gap_NC.sum(0))
    value = float(np.abs(gap_NC.sum(0)).sum() / len(labels_N))
    influence_N = gap_NC @ signs_C - value
    return _interval(value, statistic, influence_N, Units(clusters, len(labels_N)), seed, replicates, (0.0, 1.0))


def wilson(successes: float, n: float) -> Interval:
    """Wilson's 95% interval of a share: honest for few rows and for 0 or all successes.

    Args: successes in [0, n]; n may be a fractional effective size.
    Example: 0 of 10 -> [0, 0.278].
    """
    if n <= 0:
        return EMPTY
    p, z2 = successes / n, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(p, low, high, round(n))


class Units:
    """What is resampled: images, joined where they occur in exactly the same rows.

    Attributes:
        count: M, number of units.
        independent: about how many rows' worth of independent information there is: M / (units a row), at most N.
        rows_in, unit_of: the row and the unit of every (row, unit) incidence; sorted by row.
    """

    def __init__(self, clusters: Clusters | None, num_rows: int) -> None:
        if clusters is not None and len(clusters) != num_rows:
            raise ValueError(f"{num_rows} rows but clusters for {len(clusters)}")
        self.num_rows = num_rows
        members: dict[Hashable, list[int]] = {}
        for row, ids in enumerate(clusters or ()):
            for key in dict.fromkeys(ids):
                members.setdefault(key, []).append(row)
        covered = {row for rows in members.values() for row in rows}
        unique = dict.fromkeys([tuple(rows) for rows in members.values()])
        unique.update(dict.fromkeys((row,) for row in range(num_rows) if row not in covered))
        self.count = len(unique)
        pairs = sorted((row, unit) for unit, rows in enumerate(unique) for row in rows)
        self.rows_in = np.array([row for row, _ in pairs], dtype=np.int64)
        self.unit_of = np.array([unit for _, unit in pairs], dtype=np.int64)
        self.starts = np.searchsorted(self.rows_in, np.arange(num_rows))
        self.independent = min(num_rows, self.count * num_rows / len(pairs))

    def weights(self, seed: int, replicates: int) -> Iterator[Floats]:
        """Blocks [R, N] of row weights, `replicates` rows of them in all."""
        rng = np.random.default_rng(seed)
        size = max(1, min(replicates, CHUNK_NUMBERS // max(1, len(self.unit_of))))
        for start in range(0, replicates, size):
            rows = min(size, replicates - start)
            drawn_RM = rng.multinomial(self.count, np.full(self.count, 1.0 / self.count), size=rows).astype(np.float64)
            yield np.multiply.reduceat(drawn_RM[:, self.unit_of], self.starts, axis=1)

    def robust_variance(self, influence_N: Floats) -> float:
        """Variance of the mean of row influences when rows that share a unit are dependent in any way."""
        own = float(np.square(influence_N).sum())
        if self.count == self.num_rows == len(self.unit_of):
            return own / self.num_rows**2
        from scipy.sparse import csr_array

        shape = (self.num_rows, self.count)
        incidence = csr_array((np.ones(len(self.unit_of)), (self.rows_in, self.unit_of)), shape=shape)
        shared = incidence @ incidence.T
        shared.data[:] = 1.0
        together = float(influence_N @ (shared @ influence_N))
        return max(together, own) / self.num_rows**2


def _interval(
    value: float, statistic: Callable[[Floats], Floats], influence_N: Floats, units: Units, seed: int, replicates: int,
    bounds: tuple[float, float] | None,
) -> Interval:  # fmt: skip
    """Percentiles of the replicates, drawn in to the robust variance and widened for few units."""
    n = units.num_rows
    if units.count < 2:
        low, high = bounds or (math.nan, math.nan)
        return Interval(value, low, high, n)
    with np.errstate(invalid="ignore", divide="ignore"):
        found = np.concatenate([statistic(weights_RN) for weights_RN in units.weights(seed, replicates)])
    found = found[np.isfinite(found)]
    spread = float(found.var()) if len(found) else 0.0
    target = units.robust_variance(influence_N) * units.count / (units.count - 1)
    # Only ever drawn in: where the replicates have the smaller variance they are taken as they are.
    narrow = min(1.0, math.sqrt(target / (spread * units.count / (units.count - 1)))) if spread > 0 else 1.0
    scale = narrow * _small_sample_factor(units.independent)
    low, high = (
        (value + (float(q) - value) * scale for q in np.quantile(found, (0.025, 0.975)))
        if len(found)
        else (value, value)
    )
    if bounds is not None:
        low, high = max(low, bounds[0]), min(high, bounds[1])
    return Interval(value, min(low, value), max(high, value), n)


def _small_sample_factor(units: float) -> float:
    """sqrt(m / (m - 1)) * t / z for m units; 1 in the limit. Example: m = 16 -> 1.123."""
    from scipy.special import stdtrit

    m = max(units, 2.0)
    return math.sqrt(m / (m - 1)) * float(stdtrit(m - 1, 0.975)) / Z_95


def _share(values_N: Floats, units: Units) -> Interval:
    """Wilson's interval of 0/1 values at the size that independent rows of the same precision would have."""
    mean, n = float(values_N.mean()), len(values_N)
    variance = units.robust_variance(values_N - mean)
    size = min(float(n), mean * (1 - mean) / variance) if variance > 0 else units.independent
    found = wilson(mean * size, size)
    return Interval(mean, min(found.low, mean), max(found.high, mean), n)


def _ratio(
    num_N: Floats, den_N: Floats, units: Units, seed: int, replicates: int, bounds: tuple[float, float] | None
) -> Interval:
    value = float(num_N.sum() / den_N.sum())

    def statistic(weights_RN: Floats) -> Floats:
        return (weights_RN @ num_N) / (weights_RN @ den_N)

    influence_N = (num_N - value * den_N) / den_N.mean()
    return _interval(value, statistic, influence_N, units, seed, replicates, bounds)


def _weighted_auc(weights_RN: Floats, positive_N: NDArray[np.bool_], starts_U: NDArray[np.int64]) -> Floats:
    """AUC of every replicate. Columns in order of rising score; `starts_U` = first column of each distinct score."""
    positive_RU = np.add.reduceat(weights_RN * positive_N, starts_U, axis=1)
    negative_RU = np.add.reduceat(weights_RN * ~positive_N, starts_U, axis=1)
    below_RU = np.cumsum(negative_RU, axis=1) - 0.5 * negative_RU
    return (positive_RU * below_RU).sum(1) / (positive_RU.sum(1) * negative_RU.sum(1))


def _auc_influence(positive_N: NDArray[np.bool_], scores_N: Floats, value: float) -> Floats:
    """Influence of each row on AUC: its placement in the other class minus AUC, over its class share (DeLong 1988)."""
    influence_N = np.empty(len(scores_N))
    for own_N, sign in ((positive_N, 1.0), (~positive_N, -1.0)):
        others = np.sort(scores_N[~own_N])
        below = np.searchsorted(others, scores_N[own_N], "left")
        placed = (below + np.searchsorted(others, scores_N[own_N], "right")) / (2 * len(others))
        beaten = placed if sign > 0 else 1.0 - placed
        influence_N[own_N] = (beaten - value) / own_N.mean()
    return influence_N


def _ranks(sorted_N: Floats) -> Floats:
    """Dense rank of sorted scores: differences are exact zeros for ties, infinities included."""
    return np.unique(sorted_N, return_inverse=True)[1].astype(np.float64)


def _numbers(values: ArrayLike) -> Floats:
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise ValueError("expected a list of finite numbers")
    return found
