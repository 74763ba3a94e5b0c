"""Tests of the differences that a comparison shows, and the number of rows that would show a given one. NumPy float64.

- p-values: McNemar's exact test where each row is right or wrong and rows share nothing; else a sign-flip permutation
  test over groups of rows that share clusters. Both give the chance of a difference at least as large in size, if A and
  B were exchangeable.
- Paired bootstrap: percentiles of the mean difference over resampled clusters.
- Power: the exact power of McNemar's test, or the normal approximation for values that are not only right or wrong.
- Holm's correction of several p-values.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vlmrl.evaluate.estimates import Clusters, Floats, Units
from vlmrl.evaluate.paired import LEVEL, PairedColumn
from vlmrl.evaluate.repeated import BEGINNINGS
from vlmrl.evaluate.set_metrics import LEAST_UNITS, row_counts

POWER = 0.8
"""Chance to find a difference, for the number of rows needed."""
POINTS = 0.02
"""Difference for which the number of rows needed is shown: two points, as a share of the metric's range."""
FLIPS = 10_000
RESAMPLES = 2_000
SEED = 20_120_401
MOST_NUMBERS = 40_000_000
"""Maximum number of random numbers for a test; with more groups there are fewer flips or resamples, at least 400."""
BLOCK = 4_000_000
"""Maximum number of random numbers that are in memory at a time."""
MCNEMAR = "exact McNemar"
SIGN_FLIP = "sign-flip permutation"
MOST_ROWS = 10**8
"""Largest number of rows that `rows_needed` returns; above it, the result is None."""


@dataclass(frozen=True)
class TestResult:
    """Test of a paired difference.

    Args:
        method: MCNEMAR or SIGN_FLIP.
        p: two-sided, in (0, 1].
        only_a, only_b: rows that only A, or only B, has right; None if rows are not right or wrong.
        groups: number of groups of rows that share nothing with others.
    """

    __test__ = False  # not a test of pytest's

    method: str
    p: float
    only_a: int | None
    only_b: int | None
    groups: int


def mcnemar_exact(only_a: int, only_b: int) -> float:
    """Return the two-sided p-value of McNemar's exact test: 1 if no row tells A from B.

    Args:
        only_a, only_b: rows that only A, or only B, has right.
    Source: McNemar 1947; the exact binomial form.
    Example: 1 and 7 -> 2 * (1 + 8) / 2^8 = 0.0703.
    """
    from scipy.stats import binomtest

    return 1.0 if only_a + only_b == 0 else float(binomtest(min(only_a, only_b), only_a + only_b, 0.5).pvalue)


def paired_test(before: ArrayLike, after: ArrayLike, clusters: Clusters | None) -> TestResult:
    """Return the test that after and before have the same mean.

    McNemar's exact test needs values 0 and 1 and independent rows. In the sign-flip test, rows that share a cluster,
    directly or through other rows, are one group. The difference of a group has either sign with equal chance. For
    independent rows of 0 and 1 both tests are the same.

    Args:
        before, after: values of A and of B, [N].
        clusters: ids of what rows share; None = rows are independent.
    """
    a_N, b_N = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    group_N = groups_of(clusters, len(a_N))
    count = int(group_N.max()) + 1 if len(group_N) else 0
    is_binary = bool(np.isin(a_N, (0.0, 1.0)).all() and np.isin(b_N, (0.0, 1.0)).all())
    only_a, only_b = (int((a_N > b_N).sum()), int((b_N > a_N).sum())) if is_binary else (None, None)
    if only_a is not None and only_b is not None and count == len(a_N):
        return TestResult(MCNEMAR, mcnemar_exact(only_a, only_b), only_a, only_b, count)
    sum_G = np.bincount(group_N, b_N - a_N, minlength=count).astype(np.float64)
    return TestResult(SIGN_FLIP, _sign_flip(sum_G), only_a, only_b, count)


def groups_of(clusters: Clusters | None, num_rows: int) -> NDArray[np.int64]:
    """Return the group of each row, [N]: rows are in one group if they share a cluster, directly or through others."""
    if clusters is None:
        return np.arange(num_rows)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    units = Units(clusters, num_rows)
    size = num_rows + units.count  # rows first, then units
    edges = (np.ones(len(units.rows_in)), (units.rows_in, num_rows + units.unit_of))
    _, label = connected_components(coo_array(edges, shape=(size, size)), directed=False)
    _, group_N = np.unique(label[:num_rows], return_inverse=True)
    return group_N.astype(np.int64)


def _sign_flip(sum_G: Floats) -> float:
    """Return the share of FLIPS random signs with a sum at least as far from 0, the given signs counted as one more."""
    sum_G = sum_G[sum_G != 0]
    if not len(sum_G):
        return 1.0
    observed = abs(float(sum_G.sum()))
    slack = 1e-9 * float(np.abs(sum_G).sum())  # sums of equal terms in another order
    rng = np.random.Generator(np.random.PCG64(SEED))
    flips = max(400, min(FLIPS, MOST_NUMBERS // len(sum_G)))
    hits, done = 0, 0
    while done < flips:
        block = min(flips - done, max(1, BLOCK // len(sum_G)))
        signs = rng.integers(0, 2, (block, len(sum_G)), dtype=np.int8)
        hits += int((np.abs(2.0 * (signs @ sum_G) - sum_G.sum()) >= observed - slack).sum())
        done += block
    return (1 + hits) / (1 + flips)


def bootstrap_interval(before: ArrayLike, after: ArrayLike, clusters: Clusters | None) -> tuple[float, float] | None:
    """Return the 2.5th and 97.5th percentile of the mean of after - before over resampled clusters.

    Pairs stay together. Rows that show several images are resampled as in `evaluate/set_metrics.py`.

    Returns: None for fewer than LEAST_UNITS clusters: percentiles are too narrow then.
    """
    difference_N = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    units = Units(clusters, len(difference_N))
    if units.count < LEAST_UNITS:
        return None
    means = _resampled_means(units, difference_N)
    low, high = np.nanquantile(means, (LEVEL / 2, 1 - LEVEL / 2))
    return float(low), float(high)


def _resampled_means(units: Units, difference_N: Floats) -> list[float]:
    """Return the mean difference of each resample, [R]; NaN for one without rows."""
    one_each = len(units.unit_of) == units.num_rows  # one unit per row: the sums of units are enough
    if one_each:
        sums_M = np.bincount(units.unit_of, difference_N, minlength=units.count)
        pairs = np.stack([sums_M, np.bincount(units.unit_of, minlength=units.count)], axis=1)
        # Units with equal sums are drawn together: [M, 2] -> [kinds, 2]; three kinds for rows that are right or wrong.
        kinds, counts = np.unique(pairs, axis=0, return_counts=True)
        chances = counts / units.count
    else:
        kinds, chances = np.empty((0, 2)), np.full(units.count, 1 / units.count)
    rng = np.random.Generator(np.random.PCG64(SEED))
    number = max(400, min(RESAMPLES, MOST_NUMBERS // (len(chances) if one_each else len(units.unit_of))))
    means: list[float] = []
    while len(means) < number:
        block = min(number - len(means), max(1, BLOCK // len(chances)))
        drawn_RK = rng.multinomial(units.count, chances, size=block)
        if one_each:
            means += (drawn_RK @ kinds[:, 0] / (drawn_RK @ kinds[:, 1])).tolist()
        else:
            rows = (row_counts(units, drawn_M) for drawn_M in drawn_RK)
            means += [float(n_N @ difference_N / n_N.sum()) if n_N.any() else math.nan for n_N in rows]
    return means


def exact_power(rows: int, difference: float, discordant: float) -> float:
    """Return the chance that McNemar's exact test finds a difference at LEVEL, in [0, 1].

    The number of rows on which A and B disagree is binomial, and so is the number of those that B has right. The power
    is the sum over all of these numbers.

    Args:
        rows: independent rows.
        difference: accuracy of B minus that of A.
        discordant: share of rows that only one of them has right, at least |difference|.
    Raises: ValueError if |difference| > discordant, or discordant is not in [0, 1].
    """
    from scipy.stats import binom

    if not abs(difference) <= discordant <= 1:
        raise ValueError(f"a difference of {difference:g} cannot come from {discordant:g} of the rows")
    if discordant == 0 or rows == 0:
        return 0.0
    low, high = binom.ppf((1e-12, 1 - 1e-12), rows, discordant)
    tells = np.arange(int(low), int(high) + 1)
    chance = (discordant + difference) / (2 * discordant)
    limit = binom.ppf(LEVEL / 2, tells, 0.5)
    limit = np.where(binom.cdf(limit, tells, 0.5) > LEVEL / 2, limit - 1, limit)  # reject at this number, or fewer
    rejects = binom.cdf(limit, tells, chance) + binom.sf(tells - limit - 1, tells, chance)
    return float((binom.pmf(tells, rows, discordant) * np.where(limit >= 0, rejects, 0.0)).sum())


def rows_needed(difference: float, discordant: float, design_effect: float = 1.0) -> int | None:
    """Return the number of rows at which McNemar's exact test finds a difference with the chance POWER.

    Args:
        difference: accuracy of B minus that of A, not 0.
        discordant: share of rows that only one of them has right; raised to |difference| if it is lower.
        design_effect: variance of the measured difference, divided by that of independent rows; it multiplies the rows.
    Returns: None above MOST_ROWS.
    Source: power by enumeration (`exact_power`), by bisection from the approximation of Connor (1987).
    Example: 2 points where 20% of the rows tell A from B -> about 4,000 rows.
    """
    from scipy.stats import norm

    discordant = min(1.0, max(discordant, abs(difference)))
    z_level, z_power = (float(z) for z in norm.ppf((1 - LEVEL / 2, POWER)))
    spread = z_level * math.sqrt(discordant) + z_power * math.sqrt(discordant - difference**2)
    approximate = spread**2 / difference**2
    if approximate > MOST_ROWS:
        return None
    least, most = 0, math.ceil(approximate)
    while exact_power(most, difference, discordant) < POWER:
        least, most = most, math.ceil(1.1 * most) + 1
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if exact_power(middle, difference, discordant) < POWER else (least, middle)
    return math.ceil(most * design_effect)


def rows_needed_for_mean(difference: float, variance: float, design_effect: float = 1.0) -> int | None:
    """Return the number of rows at which a paired z test finds a mean difference with the chance POWER.

    Args:
        difference: of the means, not 0.
        variance: of the rows' differences.
    Returns: None above MOST_ROWS, and if nothing varies.
    Source: n = (z_0.975 + z_0.8)^2 * variance / difference^2.
    """
    from scipy.stats import norm

    z = float(norm.ppf(1 - LEVEL / 2) + norm.ppf(POWER))
    rows = z**2 * variance / difference**2 * design_effect
    return math.ceil(rows) if 0 < rows <= MOST_ROWS else None


def design_effect(before: ArrayLike, after: ArrayLike, clusters: Clusters | None) -> float:
    """Return how many times larger the variance of the mean difference is than that of independent rows; at least 1."""
    difference_N = np.asarray(after, dtype=np.float64) - np.asarray(before, dtype=np.float64)
    influence_N = difference_N - difference_N.mean()
    units = Units(clusters, len(influence_N))
    if units.count < 2 or not influence_N.any():
        return 1.0
    independent = Units(None, len(influence_N))
    return max(1.0, units.variance(influence_N) / independent.variance(influence_N))


def power_of(
    before: ArrayLike, after: ArrayLike, clusters: Clusters | None, width: float = 1.0, points: float = POINTS
) -> dict[str, Any] | None:
    """Return how many rows like these would show a difference, and how often A and B disagree on these.

    Args:
        before, after: values of A and of B, [N].
        width: of the metric's range.
        points: the difference, as a share of the range.
    Returns: {"points", "rows", "power", "level", "discordant", "design_effect", "method"}; "rows" is None where no
        number of rows can be told, "discordant" if rows are not only right or wrong. None without rows.
    """
    a_N, b_N = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    if not len(a_N):
        return None
    effect, difference = design_effect(a_N, b_N, clusters), points * width
    if np.isin(a_N, (0.0, 1.0)).all() and np.isin(b_N, (0.0, 1.0)).all():
        discordant: float | None = float((a_N != b_N).mean())
        rows, method = rows_needed(difference, discordant, effect), "exact power of McNemar's exact test"
    else:
        discordant, method = None, "normal approximation"
        rows = rows_needed_for_mean(difference, float((b_N - a_N).var(ddof=1)) if len(a_N) > 1 else 0.0, effect)
    return {
        "points": points,
        "rows": rows,
        "power": POWER,
        "level": LEVEL,
        "discordant": discordant,
        "design_effect": effect,
        "method": f"{method}, rows that share images counted by their design effect" if effect > 1 else method,
    }


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values corrected for being several, in the same order; each at most 1.

    The chance of one or more false findings at 0.05 stays at most 0.05, however the tests depend on each other.

    Source: Holm 1979.
    Example: 0.01, 0.04, 0.03 -> 0.03, 0.06, 0.06.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


LEADING = ("accuracy", "reward")
"""Metrics for which the number of rows needed is shown: the first that there is."""
TEST_METHODS = (
    "p-values, two-sided: McNemar's exact test for rows that are right or wrong and share nothing, else a sign-flip "
    "permutation test of rows that share images together; p (Holm) is corrected for all comparisons of the same metric "
    "on rows of the same role (test, held out, validation, training)"
)


def leading_metrics(names: Collection[str]) -> list[str]:
    """Return the metrics that are shown first: accuracy, else reward, and pass@k, maj@k and mean@k."""
    return [n for n in LEADING if n in names][:1] + [n for n in names if n.startswith(BEGINNINGS)]


def is_tested(metric: str) -> bool:
    """Return whether a metric is tested: the reward, the accuracy, and pass@k, maj@k and mean@k."""
    return metric in LEADING or metric.startswith(BEGINNINGS)


def tests_of(columns: Mapping[str, PairedColumn]) -> dict[str, dict[str, Any]]:
    """Return metric -> {"method", "p", "only_a", "only_b", "groups", "bootstrap": [low, high] or None}."""
    tests = {}
    for name, (before, after, clusters, _) in columns.items():
        if is_tested(name):
            ends = bootstrap_interval(before, after, clusters)
            result = asdict(paired_test(before, after, clusters))
            tests[name] = {**result, "bootstrap": None if ends is None else list(ends)}
    return tests


def rows_needed_of(columns: Mapping[str, PairedColumn]) -> dict[str, Any] | None:
    """Return the power of the accuracy, else of the reward, with its "metric"; None if its range is not known."""
    for name in LEADING:
        if name in columns:
            before, after, clusters, declared = columns[name]
            power = power_of(before, after, clusters, declared[1] - declared[0]) if declared else None
            return None if power is None else {"metric": name, **power}
    return None


def correct_for_many(tests: Iterable[tuple[str, str, dict[str, Any]]]) -> None:
    """Write "p_holm" and "comparisons" into each test: Holm's correction over tests of the same metric and role.

    Args:
        tests: (role of the rows, metric, test) of every evaluation and every pair that one command compares.
    """
    families: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for role, metric, test in tests:
        families.setdefault((role, metric), []).append(test)
    for family in families.values():
        for test, p in zip(family, holm([t["p"] for t in family]), strict=True):
            test |= {"p_holm": p, "comparisons": len(family)}


def words_of_test(metric: str, test: Mapping[str, Any]) -> str:
    """Return a test in words: `accuracy: exact McNemar p = 0.0119 (only A right on 41 rows, only B on 65); ...`."""
    alone = (
        "" if test["only_a"] is None else f" (only A right on {test['only_a']:,} rows, only B on {test['only_b']:,})"
    )
    text = f"{metric}: {test['method']} p = {test['p']:.3g}{alone}"
    if test.get("comparisons", 1) > 1:
        text += f", {test['p_holm']:.3g} with Holm's correction for {test['comparisons']} comparisons"
    if test["bootstrap"] is not None:
        low, high = test["bootstrap"]
        text += f"; paired bootstrap [{low:+.4f}, {high:+.4f}]"
    return text


def words_of_power(power: Mapping[str, Any]) -> str:
    """Return the number of rows needed in words."""
    begin = f"to see {100 * power['points']:g} points of {power['metric']} with {power['power']:.0%} chance"
    if power["rows"] is None:
        return f"{begin}: not known from rows that all differ by the same amount"
    apart = "" if power["discordant"] is None else f"; A and B disagree on {power['discordant']:.1%}"
    return f"{begin}: {power['rows']:,} rows like these ({power['method']}{apart})"
