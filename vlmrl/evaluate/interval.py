"""95% intervals of estimates over rows that share images: Wilson's score at the clusters' effective sample size.

Two rows that show the same image are not two independent observations. The images that rows share are their clusters.
An interval is computed in three steps:

1. The variance of the estimate, robust to any dependence of rows that share a cluster. It is the sum of e_p * e_q over
all rows p, q that share one, e = influence of a row (Aronow, Samii and Assenova 2015, eq. 4; for rows of one cluster
each this is the usual cluster-robust variance). It is never below that of independent rows.
2. The effective sample size: the number of independent draws of 0 and 1 with the same mean that would have this
variance, lowered for few clusters by Student's t (Korn and Graubard 1998). The degrees of freedom come from the number
of clusters that carry the variance (Satterthwaite's, from the fourth moment of the clusters' influences). The size is
never below the number of independent clusters: nothing in [0, 1] varies more than a coin of the same mean.
3. Wilson's score interval at that size (Wilson 1927), with the Poisson limit of Brown, Cai and DasGupta (2001, section
4.1.1) near 0 and 1. Dean and Pagano (2015) and Franco et al. (2019) find Wilson's at the effective size the best of
the usual intervals for clustered shares.

A quantity of another range is scaled to [0, 1] first, a paired difference of it to [-(b - a), b - a]; so no interval
leaves the range. A quantity without a range gets step 1 with Student's t. So does a length: its range is a limit far
from most values, and Wilson's interval would treat it as a coin of 0 and that limit. With a single cluster there is no
interval, because it says nothing about others. `tests/unit/evaluate/test_interval.py` simulates how often the intervals
contain the true value.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vlmrl.evaluate.row_keys import RowKeys, incidence_of

Floats = NDArray[np.float64]
Clusters = Sequence[Sequence[Hashable]]
"""Image ids of every row; the same id twice in a row counts once. A row without ids is a cluster of its own. `RowKeys`
holds the ids of many rows in little memory."""
Range = tuple[float, float]

METHOD = (
    "Wilson's score interval at the effective sample size of rows that share images; "
    "Student's t where no range is known, and of lengths"
)
"""Method of all intervals of quantities with a range, as shown to people."""
NO_INTERVAL = "one cluster of rows, too few for a metric of the whole split, or a length that is the same everywhere"
"""Reasons for which a metric has no interval, as shown to people."""
Z_95 = 1.959963984540054
NEAR_BOUND = (3.0, 10.0)
"""With at most so many effective zeros (or ones), Poisson's limit replaces Wilson's next to that bound, if it is wider.

The first number is for up to 50 effective rows, the second for 100 and more; between them it grows evenly. With 3 for
any number of rows, as in the source, exact coverage falls to 0.926 at 4 to 6 expected ones; with 10 it is 0.93.
"""
FEW_CARRY = 4.0
"""With fewer degrees of freedom, one or two clusters carry all the variance: rows unlike all others may be unseen."""
ROUNDING = 1e-9
"""Share of its range by which a value may be outside."""
NO_SPREAD = 1e-12
"""Influences of a quantity in [0, 1] below this are rounding errors: all rows are alike."""
UNIT_RANGE: Range = (0.0, 1.0)
BLOCK_NUMBERS = 4_000_000
"""Maximum number of pairs of rows with a common cluster that are in memory at a time."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Estimate with its 95% interval.

    Args:
        mean: the estimate; NaN when n = 0.
        low, high: the interval; NaN if there is none (one cluster, or no spread and no range to judge by).
        n: number of rows.
        clusters: number of distinct clusters of these rows.
    """

    mean: float
    low: float
    high: float
    n: int = 0
    clusters: int = 0


EMPTY = Interval(math.nan, math.nan, math.nan, 0)


def excludes_zero(low: float | None, high: float | None) -> bool:
    """Return whether zero is outside of an interval (None or NaN = there is none). Every verdict uses this rule."""
    return low is not None and high is not None and (low > 0 or high < 0)


def range_of(declared: Range | None, *values: ArrayLike) -> Range | None:
    """Return the range of a quantity.

    It is the declared range if that is finite and contains all values, else [0, 1] if that contains them, else None.

    Example: no range declared, values 0.2 and 1.0 -> (0, 1); 0.2 and 1.4 -> None.
    """
    numbers = np.concatenate([np.asarray(v, dtype=np.float64).ravel() for v in values])
    for low, high in (*([declared] if declared else []), UNIT_RANGE):
        slack = ROUNDING * (high - low)
        finite = math.isfinite(low) and math.isfinite(high) and low < high
        if finite and bool(((numbers >= low - slack) & (numbers <= high + slack)).all()):
            return low, high
    return None


def wilson(share: float, n: float) -> Range:
    """Return Wilson's 95% score interval of a share.

    If few zeros or ones were seen (NEAR_BOUND), Poisson's limit is used next to that bound.

    Args:
        share: in [0, 1].
        n: > 0; may be a fractional effective size.
    Source: Wilson 1927; the limits next to the bounds: Brown, Cai and DasGupta 2001, section 4.1.1.
    Example: 0 of 10 -> [0, 0.278]; 1 of 10 -> [0.005, 0.404], where Wilson's own lower limit is 0.018.
    """
    from scipy.special import gammaincinv

    p, z2 = share, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    low = 0.0 if p <= 0 else max(0.0, centre - half)
    high = 1.0 if p >= 1 else min(1.0, centre + half)
    ones, zeros = p * n, (1 - p) * n
    most = float(np.interp(n, (50, 100), NEAR_BOUND)) * (1 + ROUNDING)  # (1 - 0.97) * 100 is more than 3 by rounding
    if 0 < ones <= most:
        low = min(low, float(gammaincinv(ones, 0.05)) / n)
    if 0 < zeros <= most:
        high = max(high, 1 - float(gammaincinv(zeros, 0.05)) / n)
    return min(low, p), max(high, p)


class Evidence(NamedTuple):
    """Bounds of an effective sample size: at least the independent clusters, at most the rows of 0 and 1."""

    least: float
    most: float = math.inf


class Units:
    """Clusters of rows; those that occur in exactly the same rows are joined to one unit.

    Attributes:
        count: M, number of units.
        independent: lower bound of the number of independent rows, approximately: M / (units per row), at most N.
        rows_in, unit_of: the row and the unit of every (row, unit) incidence; sorted by row.
    """

    def __init__(self, clusters: Clusters | None, num_rows: int) -> None:
        if clusters is not None and len(clusters) != num_rows:
            raise ValueError(f"{num_rows} rows but clusters for {len(clusters)}")
        self.num_rows = num_rows
        keys = clusters if isinstance(clusters, RowKeys) else RowKeys.of(clusters or [()] * num_rows)
        self.rows_in, self.unit_of, self.count = incidence_of(keys)
        self.independent = min(num_rows, self.count * num_rows / max(1, len(self.rows_in)))

    def variance(self, influence_N: Floats) -> float:
        """Return the variance of the mean of row influences, where rows that share a unit may depend on each other.

        It is never below that of independent rows, and corrected for few units by M / (M - 1). Any kind of dependence
        is allowed.
        """
        own = float(np.square(influence_N).sum())
        return max(self._together(influence_N), own) / self.num_rows**2 * self.count / (self.count - 1)

    def freedom(self, influence_N: Floats) -> float:
        """Return the degrees of freedom of `variance`: at most those of the independent units, at least 1.

        They are 2 / (sum r^4 / (sum r^2)^2 - 1 / M), r = summed influence of a unit: about M for normal influences,
        about 2 if one unit carries everything.

        Source: Satterthwaite 1946.
        """
        square_M = np.square(np.bincount(self.unit_of, influence_N[self.rows_in], minlength=self.count))
        most = max(1.0, self.independent - 1)
        total = float(square_M.sum())
        excess = float(np.square(square_M).sum()) / total**2 - 1 / self.count if total > 0 else 0.0
        return most if excess <= 0 else min(most, max(1.0, 2 / excess))

    def _together(self, influence_N: Floats) -> float:
        """Return the sum of e_p * e_q over all rows p, q that share a unit; each pair of rows counts once."""
        if len(self.unit_of) == self.num_rows:  # one unit per row
            return float(np.square(np.bincount(self.unit_of, influence_N, minlength=self.count)).sum())
        from scipy.sparse import csr_array

        shape = (self.num_rows, self.count)
        incidence = csr_array((np.ones(len(self.unit_of)), (self.rows_in, self.unit_of)), shape=shape)
        rows_of_unit = np.bincount(self.unit_of, minlength=self.count)
        neighbours = np.bincount(self.rows_in, rows_of_unit[self.unit_of], minlength=self.num_rows)
        block_of_row = (np.cumsum(neighbours) // BLOCK_NUMBERS).astype(np.int64)
        total = 0.0
        for start in np.flatnonzero(np.diff(block_of_row, prepend=-1)):
            stop = int(np.searchsorted(block_of_row, block_of_row[start], "right"))
            # [rows of the block, N]: number of common units, then 1 for each pair that has any.
            shared = incidence[start:stop] @ incidence.T
            shared.data[:] = 1.0
            total += float(influence_N[start:stop] @ (shared @ influence_N))
        return total


def interval_in_range(value: float, influence_N: Floats, units: Units, bounds: Range, evidence: Evidence) -> Interval:
    """Return the interval of an estimate in `bounds`; see the module's docstring.

    Args:
        influence_N: what each row adds to the estimate, with mean 0: for a mean, value of the row - mean.
        bounds: range of the estimate.
    Returns: low and high are NaN for a single unit.
    """
    from scipy.special import stdtrit

    n, (start, end) = units.num_rows, bounds
    if units.count < 2:
        return Interval(value, math.nan, math.nan, n, units.count)
    width = end - start
    share = min(1.0, max(0.0, (value - start) / width))
    small_N = influence_N / width
    least = max(evidence.least, 1.0)
    # Rows unlike all that were seen may have this share of all rows: Wilson's limit for 0 of `least`.
    unseen = Z_95**2 / (least + Z_95**2)
    around = (share - unseen * share, share + unseen * (1 - share))
    if float(np.abs(small_N).max()) < NO_SPREAD:
        low, high = around
    else:
        freedom = units.freedom(small_N)
        ratio = Z_95 / float(stdtrit(freedom, 0.975))
        size = share * (1 - share) / units.variance(small_N) * ratio**2
        low, high = wilson(share, min(max(size, least), evidence.most))
        if freedom < FEW_CARRY and evidence.most == math.inf:
            low, high = min(low, around[0]), max(high, around[1])
    low, high = start + width * low, start + width * high
    return Interval(value, max(start, min(low, value)), min(end, max(high, value)), n, units.count)


def t_interval(value: float, influence_N: Floats, units: Units, bounds: Range | None = None) -> Interval:
    """Return Student's t interval from the robust variance; NaN if nothing varies.

    It is for a quantity without a known range, or whose range says little about its spread (a length): `bounds` only
    clips.
    """
    from scipy.special import stdtrit

    if units.count < 2 or not np.any(influence_N):
        return Interval(value, math.nan, math.nan, units.num_rows, units.count)
    half = float(stdtrit(units.freedom(influence_N), 0.975)) * math.sqrt(units.variance(influence_N))
    least, most = bounds or (-math.inf, math.inf)
    low, high = min(max(value - half, least), value), max(min(value + half, most), value)
    return Interval(value, low, high, units.num_rows, units.count)
