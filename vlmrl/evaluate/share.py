"""Share of a quantity that is lost: (normal - changed) / normal on the same rows, with a 95% interval.

The interval comes from three intervals that have good limits near their bounds: those of the two means and of their
paired difference. Their distances from the estimates take the place of standard errors in Fieller's equation (the
"method of variance estimates recovery"). The equation is solved for difference / normal and for 1 - changed / normal.
These are the same number, but the first equation knows no uncertainty where no row differs, and the second none where
the changed mean is 0. So the wider of both limits counts.

Sources: Fieller 1954; Donner and Zou 2012 and Tang et al. 2013 for ratios of paired shares.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from vlmrl.evaluate.estimates import difference_interval, mean_interval
from vlmrl.evaluate.interval import EMPTY, Clusters, Floats, Interval, Range, Units


class _Estimate(NamedTuple):
    """Estimate, its interval, and the influence of each row, [N]."""

    value: float
    low: float
    high: float
    influence_N: Floats


def lost_share(normal: ArrayLike, changed: ArrayLike, clusters: Clusters | None, value_range: Range) -> Interval:
    """Return (mean of normal - mean of changed) / mean of normal, on the same rows.

    Args:
        normal, changed: [N], finite, at least 0.
        clusters: image ids of each row; None = rows are independent.
        value_range: range of the quantity, which begins at 0.
    Returns: at most 1, and below 0 if the changed mean is larger. EMPTY where it is not defined: the interval of the
        normal mean contains 0, or there is none.
    Raises: ValueError for a range that does not begin at 0.
    Example: normal 1, 1, 1, 0 and changed 1, 0, 0, 0 -> (3 - 1) / 3 = 0.667.
    """
    if value_range[0] != 0:
        raise ValueError(f"a share of a quantity in {value_range}: the range must begin at 0")
    a_N, b_N = np.asarray(normal, dtype=np.float64), np.asarray(changed, dtype=np.float64)
    whole = mean_interval(a_N, clusters, value_range)
    if not len(a_N) or not whole.low > 0:
        return EMPTY
    units = Units(clusters, len(a_N))
    one = _estimate(whole, a_N)
    rest = _estimate(mean_interval(b_N, clusters, value_range), b_N)
    lost = _estimate(difference_interval(a_N, b_N, clusters, value_range), a_N - b_N)
    low, high = _ratio_limits(lost, one, units)
    rest_low, rest_high = _ratio_limits(rest, one, units)
    value = lost.value / one.value
    low, high = min(low, 1 - rest_high, value), max(high, 1 - rest_low, value)
    return Interval(value, low, min(1.0, high), len(a_N), units.count)


def _estimate(interval: Interval, values_N: Floats) -> _Estimate:
    return _Estimate(interval.mean, interval.low, interval.high, values_N - interval.mean)


def _correlation(a_N: Floats, b_N: Floats, units: Units) -> float:
    """Return the correlation of two means whose rows have these influences; 0 if one of them does not vary."""
    spread = math.sqrt(units.variance(a_N) * units.variance(b_N))
    if not spread > 0:
        return 0.0
    covariance = (units.variance(a_N + b_N) - units.variance(a_N - b_N)) / 4
    return min(1.0, max(-1.0, covariance / spread))


def _ratio_limits(top: _Estimate, bottom: _Estimate, units: Units) -> tuple[float, float]:
    """Return the limits of top / bottom. The lower limit of `bottom` is above 0.

    A limit R solves (top - R * bottom)^2 = s^2 + R^2 t^2 - 2 c R s t, with the distances s, t of the estimates from
    their limits and their correlation c. Which of the limits of `bottom` counts depends on the sign of R, which is that
    of the limit of `top`.
    """
    c = _correlation(top.influence_N, bottom.influence_N, units)

    def limit(s: float, t: float, upper: bool, positive: bool) -> float:
        square = bottom.value**2 - t**2
        half = top.value * bottom.value - c * s * t
        constant = top.value**2 - s**2
        root = math.sqrt(max(0.0, half**2 - square * constant))
        if upper:
            return (half + root) / square if positive else _quotient(constant, half - root)
        return _quotient(constant, half + root) if positive or half + root > 0 else (half - root) / square

    low_positive, high_positive = top.low > 0, top.high > 0
    below, above = bottom.value - bottom.low, bottom.high - bottom.value
    low = limit(top.value - top.low, above if low_positive else below, False, low_positive)
    high = limit(top.high - top.value, below if high_positive else above, True, high_positive)
    return low, high


def _quotient(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0
