"""Means, differences, ratios, AUC and ECE with 95% intervals, for rows that share images. NumPy float64, no randomness.

Two rows that show the same image are not two independent observations. The images that rows share are their clusters.
Each function computes an estimate and the influence of every row on it. The interval is computed in three steps:

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
from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

Integers = NDArray[np.int64]


class RowKeys(Sequence[tuple[int, ...]]):
    """Cluster ids of rows, as integers: equal ids are equal integers.

    Args:
        starts_N1: [N + 1] place of the first id of each row in `keys_K`, and its length at the end.
        keys_K: [K] the ids, row by row.
    """

    def __init__(self, starts_N1: Integers, keys_K: Integers) -> None:
        self.starts_N1, self.keys_K = starts_N1, keys_K

    @classmethod
    def of(cls, clusters: Iterable[Sequence[Hashable]]) -> RowKeys:
        """Return the ids of rows, numbered in the order in which they appear."""
        numbers: dict[Hashable, int] = {}
        starts, keys = array("q", [0]), array("q")
        for ids in clusters:
            keys.extend(numbers.setdefault(key, len(numbers)) for key in ids)
            starts.append(len(keys))
        return cls(as_numbers(starts), as_numbers(keys))

    def __len__(self) -> int:
        return len(self.starts_N1) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[int, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | Sequence[tuple[int, ...]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        return tuple(self.keys_K[self.starts_N1[number] : self.starts_N1[number + 1]].tolist())

    def take(self, use_N: NDArray[np.bool_]) -> RowKeys:
        """Return the ids of the rows where `use_N` is true."""
        counts_N = np.diff(self.starts_N1)
        starts = np.concatenate([[0], np.cumsum(counts_N[use_N])]).astype(np.int64)
        return RowKeys(starts, self.keys_K[np.repeat(use_N, counts_N)])


class Incidence(NamedTuple):
    """Rows and units: the row and the unit of every pair, sorted by row, and the number of units."""

    rows_in: Integers
    unit_of: Integers
    count: int


def as_numbers(values: array[int]) -> Integers:
    """Return the numbers of an array, without a copy."""
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.zeros(0, dtype=np.int64)


def incidence_of(keys: RowKeys) -> Incidence:
    """Return the units of rows: ids that occur in exactly the same rows are one unit; a row without ids is its own.

    Units are numbered in the order in which their ids first appear; then come the rows without ids.
    """
    num_rows, counts_N = len(keys), np.diff(keys.starts_N1)
    row_K = np.repeat(np.arange(num_rows, dtype=np.int64), counts_N)
    order_K = np.lexsort((row_K, keys.keys_K))  # stable: within an id and a row, in the order of the row
    key_K, row_K = keys.keys_K[order_K], row_K[order_K]
    # An id that is twice in a row counts once. [K] -> [P] pairs of an id and a row
    is_new_K = np.ones(len(key_K), dtype=bool)
    is_new_K[1:] = (key_K[1:] != key_K[:-1]) | (row_K[1:] != row_K[:-1])
    key_P, row_P, place_P = key_K[is_new_K], row_K[is_new_K], order_K[is_new_K]
    # [P] -> [G] ids: begin of each id's pairs
    begin_G = np.flatnonzero(np.concatenate([[True], key_P[1:] != key_P[:-1]])) if len(key_P) else np.zeros(0, np.int64)
    own_rows = np.flatnonzero(counts_N == 0)
    if not len(begin_G):
        return Incidence(own_rows, np.arange(len(own_rows), dtype=np.int64), len(own_rows))
    size_G = np.diff(np.concatenate([begin_G, [len(key_P)]]))
    # Ids of the same rows have the same two sums of 64-bit hashes; others have equal sums with a chance of 2^-128.
    sums_G3 = np.stack([size_G.astype(np.uint64), *(np.add.reduceat(_hashed(row_P, s), begin_G) for s in (1, 2))], 1)
    _, unit_G = np.unique(sums_G3, axis=0, return_inverse=True)
    first_G = np.minimum.reduceat(place_P, begin_G)
    by_first_G = np.argsort(first_G)  # ids in the order in which they appear
    # [G] -> [M]: the first id of each unit, in that order
    _, chosen = np.unique(unit_G.ravel()[by_first_G], return_index=True)
    group_M = by_first_G[np.sort(chosen)]
    counts_M = size_G[group_M]
    offset = np.arange(counts_M.sum()) - np.repeat(np.cumsum(counts_M) - counts_M, counts_M)
    rows = np.concatenate([row_P[np.repeat(begin_G[group_M], counts_M) + offset], own_rows])
    own_units = np.arange(len(group_M), len(group_M) + len(own_rows))
    units = np.concatenate([np.repeat(np.arange(len(group_M)), counts_M), own_units])
    sorted_pairs = np.lexsort((units, rows))
    return Incidence(rows[sorted_pairs], units[sorted_pairs], len(group_M) + len(own_rows))


def _hashed(values: Integers, salt: int) -> NDArray[np.uint64]:
    """Return well mixed 64-bit hashes of integers (splitmix64, Steele, Lea and Flood 2014)."""
    with np.errstate(over="ignore"):
        x = values.astype(np.uint64) + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


Floats = NDArray[np.float64]
Clusters = Sequence[Sequence[Hashable]]
"""Image ids of every row; the same id twice in a row counts once. A row without ids is a cluster of its own. `RowKeys`
holds the ids of many rows in little memory."""
Range = tuple[float, float]

METHOD = (
    "Wilson's score interval, and next to 0 and 1 Poisson's limit where it is wider, at the effective sample size of "
    "rows that share images; "
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
    """Return whether zero is outside of an interval (None or NaN = there is none). Every comparison uses this rule."""
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

        It is corrected for few units by M / (M - 1).
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
    units, mean = clusters if isinstance(clusters, Units) else Units(clusters, (len(values_N))), float(values_N.mean())
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
    ids = clusters[0] if clusters and len(clusters) == 1 else clusters and [ids for run in clusters for ids in run]
    units = Units(ids, len(a_N))
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
