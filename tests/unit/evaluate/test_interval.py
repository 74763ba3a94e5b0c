"""Intervals: by hand, against scipy and slow loops, at the bounds, and how often they hold the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from evaluation_builders import random_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.evaluate import estimates
from vlmrl.evaluate.estimates import Units, difference_interval, excludes_zero, mean_interval, range_of, wilson

# What rows share


def test_images_that_occur_in_the_same_rows_are_one_unit_so_private_pairs_are_plain_rows():
    units = Units([("a", "b"), ("c", "d"), ("e",), ()], 4)
    assert units.count == 4
    assert sorted(units.unit_of) == [0, 1, 2, 3]


def test_an_image_twice_in_a_row_counts_once():
    assert len(Units([("a", "a"), ("a", "b"), ("b", "b")], 3).unit_of) == 4


def test_the_robust_variance_by_hand():
    # Rows (a, b), (b, c), (d, e) with influences 1, -2, 3. Rows 0 and 1 share b:
    # 1 + 4 + 9 + 2 * (1 * -2) = 10, below 14 of independent rows, which hold then. a, b, c apart, (d, e) one: M = 4.
    units = Units([("a", "b"), ("b", "c"), ("d", "e")], 3)
    assert units.count == 4
    assert units.variance(np.array([1.0, -2.0, 3.0])) == pytest.approx(14 / 9 * 4 / 3, rel=1e-12)
    # With influences 1, 2, -3: 14 + 2 * (1 * 2) = 18.
    assert units.variance(np.array([1.0, 2.0, -3.0])) == pytest.approx(18 / 9 * 4 / 3, rel=1e-12)


def test_rows_that_share_two_images_are_counted_once_in_the_robust_variance():
    # All three rows share something: (1 + 1 + 1)^2 / 9, and M = 3: a with c apart, b, c.
    units = Units([("a", "b"), ("b", "a"), ("a", "c")], 3)
    assert units.count == 3
    assert units.variance(np.ones(3)) == pytest.approx(1.0 * 3 / 2, rel=1e-12)


@pytest.mark.slow
@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=2, max_size=12), st.integers(0, 99))
def test_the_robust_variance_is_that_of_a_slow_loop_whatever_the_blocks(rows: list[list[int]], seed: int):
    units = Units(rows, len(rows))
    influence = np.random.default_rng(seed).normal(size=len(rows))
    shares = lambda p, q: p == q or bool(set(rows[p]) & set(rows[q]))  # noqa: E731
    together = sum(influence[p] * influence[q] for p in range(len(rows)) for q in range(len(rows)) if shares(p, q))
    for block in (1, 5, 10**6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(estimates, "BLOCK_NUMBERS", block)
            assert units._together(influence) == pytest.approx(together, abs=1e-9)


def test_degrees_of_freedom_by_hand():
    # Four units of equal squares: sum r^4 / (sum r^2)^2 = 4 / 16 = 1 / M: as many as there are, less one.
    assert Units(None, 4).freedom(np.array([1.0, -1.0, 1.0, -1.0])) == 3
    # One unit of 101 carries all: influences 1 and 100 times -0.01. Squares 1 and 100 * 1e-4 = 0.01: sum 1.01;
    # squared squares 1 + 100 * 1e-8 = 1.000001. 2 / (1.000001 / 1.0201 - 1 / 101) = 2.0610.
    lone = np.array([1.0, *[-0.01] * 100])
    assert Units(None, 101).freedom(lone) == pytest.approx(2 / (1.000001 / 1.0201 - 1 / 101), rel=1e-9)
    # Rows of one cluster are one unit: two clusters leave one degree, however many rows they have.
    assert Units([("a",)] * 5 + [("b",)] * 5, 10).freedom(np.array([1.0] * 5 + [-1.0] * 5)) == 1


# Wilson's score, and Poisson's limit beside the bounds


def test_wilson_by_hand():
    # 8 of 20, z^2 = 3.8415: centre (0.4 + 0.096036) / 1.192073 = 0.41611,
    # half = 1.95996 / 1.192073 * sqrt(0.012 + 0.0024009) = 0.19730.
    assert wilson(0.4, 20) == pytest.approx((0.21881, 0.61341), abs=1e-4)
    # One of ten: Poisson's limit is -ln(0.95) / 10; nine of ten: the mirror image.
    assert wilson(0.1, 10)[0] == pytest.approx(-math.log(0.95) / 10, rel=1e-9)
    assert wilson(0.9, 10) == pytest.approx([1 - x for x in reversed(wilson(0.1, 10))], abs=1e-12)


@pytest.mark.slow
@given(st.integers(1, 80), st.data())
def test_wilson_is_scipys_but_where_few_ones_or_zeros_were_seen(n: int, data: st.DataObject):
    from scipy.stats import binomtest

    k = data.draw(st.integers(0, n))
    reference = binomtest(k, n).proportion_ci(0.95, method="wilson")
    low, high = wilson(k / n, n)
    if k > 8 or k == 0:  # 3 + 7 * 30 / 50 for 80 rows
        assert low == pytest.approx(reference.low, abs=1e-9)
    if n - k > 8 or k == n:
        assert high == pytest.approx(reference.high, abs=1e-9)
    assert 0 <= low <= reference.low + 1e-12 and reference.high - 1e-12 <= high <= 1


def test_poissons_limit_holds_for_as_many_zeros_as_ones():
    """Three of 100 wrong: (1 - 0.97) * 100 is 3.0000000000000027, and still three."""
    for n, k in ((10, 3), (100, 3), (100, 10), (1000, 10)):
        low, high = wilson(k / n, n)
        assert wilson(1 - k / n, n) == pytest.approx((1 - high, 1 - low), abs=1e-9)
    # Ten of 1,000: the 5% limit of a Poisson count of ten is 5.4254, Wilson's own 5.4438.
    assert wilson(0.01, 1000)[0] == pytest.approx(5.4254e-3, abs=1e-7)


@pytest.mark.parametrize("n", [100, 107, 121, 149, 212, 352, 1000])
def test_the_coverage_of_a_share_near_its_bounds_is_at_least_93_percent(n: int):
    """Exact, at the worst share below 0.2; 0.926 with Poisson's limit for three ones alone (n = 121, share 0.0455)."""
    from scipy.stats import binom

    shares = np.linspace(0.0005, 0.2, 1600)
    ends = np.array([wilson(k / n, n) for k in range(n + 1)])
    held = (ends[:, :1] <= shares) & (shares <= ends[:, 1:])
    coverage = (binom.pmf(np.arange(n + 1)[:, None], n, shares) * held).sum(0)
    assert coverage.min() > 0.9295 and coverage.mean() < 0.97


@pytest.mark.parametrize("n", [10, 20, 50, 100, 200])
def test_the_coverage_of_a_share_of_independent_rows_is_the_nominal_one(n: int):
    """Exact, by the binomial distribution: Wilson's own falls to 0.84 (n = 10) and 0.92 (n = 200) close to 0 and 1."""
    from scipy.stats import binom

    shares = np.linspace(0.005, 0.995, 199)
    ends = [wilson(k / n, n) for k in range(n + 1)]
    held = np.array([(low <= shares) & (shares <= high) for low, high in ends])
    coverage = (binom.pmf(np.arange(n + 1)[:, None], n, shares) * held).sum(0)
    assert coverage.min() > 0.915 and coverage.max() < 0.999
    assert 0.949 < coverage.mean() < 0.97


# At the bounds


@pytest.mark.parametrize("clusters", [8, 20, 300])
def test_a_share_that_is_always_one_has_an_honest_interval(clusters: int):
    """Of n clusters: n / (n + z^2), close to the exact interval of Clopper and Pearson, 0.025^(1/n)."""
    from scipy.stats import binomtest

    ids = [(c,) for c in range(clusters) for _ in range(4)]
    found = mean_interval([1.0] * (4 * clusters), ids)
    assert found.high == 1.0 and (found.n, found.clusters) == (4 * clusters, clusters)
    assert found.low == pytest.approx(clusters / (clusters + 3.8415), abs=1e-4)
    exact = binomtest(clusters, clusters).proportion_ci(0.95, method="exact").low
    assert found.low == pytest.approx(exact, abs=0.4 / clusters)
    mirrored = mean_interval([0.0] * (4 * clusters), ids)
    assert (mirrored.low, mirrored.high) == pytest.approx((0.0, 1 - found.low), abs=1e-12)


def test_no_failure_among_many_pairs_of_few_images_is_weaker_news_than_among_as_many_rows():
    pairs = random_pairs(np.random.default_rng(0), 40, 400)
    # 40 images, two in each row: what 20 rows on their own say.
    assert mean_interval([0.0] * 400, pairs).high == pytest.approx(wilson(0.0, 20)[1], abs=1e-12)
    assert mean_interval([0.0] * 400, None).high == pytest.approx(wilson(0.0, 400)[1], abs=1e-12)


def test_rows_that_repeat_one_another_say_what_one_of_them_says():
    values = [1.0] * 14 + [0.0] * 6
    once = mean_interval(values, None)
    repeated = mean_interval([v for v in values for _ in range(5)], [(i,) for i in range(20) for _ in range(5)])
    assert (repeated.low, repeated.high) == pytest.approx((once.low, once.high), abs=1e-12)
    assert (once.low, once.high) == pytest.approx(wilson(0.7, 20), abs=1e-12)


def test_one_failure_more_never_makes_the_interval_of_a_share_higher():
    ends = [mean_interval([1.0] * (30 - k) + [0.0] * k, None) for k in range(31)]
    assert all(a.low > b.low and a.high > b.high for a, b in pairwise(ends[1:-1]))


def test_all_rows_alike_inside_the_range_leave_room_for_rows_unlike_them():
    # 20 rows, all 0.5: up to z^2 / (20 + z^2) = 0.1611 of all rows may be 0, or 1.
    found = mean_interval([0.5] * 20, None, (0.0, 1.0))
    assert (found.low, found.high) == pytest.approx((0.5 - 0.5 * 0.16113, 0.5 + 0.5 * 0.16113), abs=1e-5)
    # One row that is unlike the others carries all the variance: the room does not vanish for it.
    almost = mean_interval([0.5] * 19 + [0.51], None, (0.0, 1.0))
    assert almost.low < 0.43 and almost.high > 0.57


def test_one_cluster_or_one_row_has_no_interval():
    for found in (mean_interval([0.2, 0.4], [("a",), ("a",)]), mean_interval([1.0], None), mean_interval([7.0], None)):
        assert math.isnan(found.low) and math.isnan(found.high)


VALUES = st.lists(st.floats(0, 1), min_size=1, max_size=25)


@settings(max_examples=150)
@given(VALUES, st.integers(1, 6), st.floats(-50, 50), st.floats(0.01, 100))
def test_no_interval_leaves_its_range(values: list[float], apart: int, start: float, width: float):
    ids = [(i % apart, 100 + i % 3) for i in range(len(values))]
    bounds = (start, start + width)
    moved = [min(max(start + v * width, start), start + width) for v in values]
    found = mean_interval(moved, ids, bounds)
    assert found.mean == pytest.approx(np.mean(moved), abs=1e-9 * (abs(start) + width))
    if math.isfinite(found.low):
        assert bounds[0] <= found.low <= found.mean <= found.high <= bounds[1]
    other = difference_interval(moved, moved[::-1], ids, bounds)
    if math.isfinite(other.low):
        assert -width * (1 + 1e-12) <= other.low <= other.mean <= other.high <= width * (1 + 1e-12)


@given(VALUES)
def test_a_quantity_of_another_range_is_scaled(values: list[float]):
    one, ten = mean_interval(values, None, (0.0, 1.0)), mean_interval([10 * v for v in values], None, (0.0, 10.0))
    if math.isfinite(one.low):
        assert (ten.low, ten.high) == pytest.approx((10 * one.low, 10 * one.high), abs=1e-6)
        mirrored = mean_interval([1 - v for v in values], None, (0.0, 1.0))
        assert (mirrored.low, mirrored.high) == pytest.approx((1 - one.high, 1 - one.low), abs=1e-6)


def test_a_mean_close_to_a_bound_stays_below_it_and_is_no_surer_than_that_of_rows_at_the_bound():
    near_one = [1.0] * 60 + [0.95, 0.9, 0.8]
    found, at_one = mean_interval(near_one, None, (0.0, 1.0)), mean_interval([1.0] * 63, None)
    assert 0.93 < found.low < at_one.low < found.mean < found.high < 1.0
    rewards = mean_interval([0.0] * 10 + [0.3], None)
    assert 0.0 < rewards.low < rewards.mean < rewards.high < 1.0


# Ranges that nobody declared


def test_the_range_is_the_declared_one_else_zero_to_one_while_the_values_are():
    assert range_of((-1.0, 3.0), [0.0, 1.0]) == (-1.0, 3.0)
    assert range_of(None, [0.0, 1.0], [0.5]) == (0.0, 1.0)
    assert range_of(None, [0.2], [1.4]) is None
    assert range_of((0.0, math.inf), [2.0]) is None
    assert range_of((0.0, 1.0), [1.2]) is None, "a range that the values leave is none"
    assert range_of((0.0, 2.0), [2.0 + 1e-12]) == (0.0, 2.0)


def test_without_a_range_the_interval_is_students():
    from scipy import stats

    values = [10.0, 12.0] * 10
    found = mean_interval(values, None)
    half = stats.t.ppf(0.975, 19) * np.std(values, ddof=1) / math.sqrt(20)
    assert (found.low, found.high) == pytest.approx((11 - half, 11 + half), rel=1e-9)
    ids = [(i // 2,) for i in range(40)]
    doubled = mean_interval([v for v in values for _ in range(2)], ids)
    assert (doubled.low, doubled.high) == pytest.approx((found.low, found.high), rel=1e-9)
    assert math.isnan(mean_interval([5.0, 5.0, 5.0], None).low), "nothing varies: nothing is known of the spread"


def test_an_interval_that_holds_zero_or_is_not_there_excludes_nothing():
    assert excludes_zero(0.1, 0.2) and excludes_zero(-0.2, -0.1)
    assert not excludes_zero(-0.1, 0.1) and not excludes_zero(0.0, 0.1) and not excludes_zero(None, None)
    assert not excludes_zero(math.nan, math.nan)


# Coverage: worlds whose truth is known


def share_of_clusters(rng: np.random.Generator, clusters: int, rows: int, share: float, alike: float):
    """Zeros and ones, `rows` of each cluster, with correlation `alike` within a cluster (beta-binomial)."""
    if alike in (0.0, 1.0):
        chance = np.full(clusters, share) if alike == 0 else (rng.random(clusters) < share).astype(float)
    else:
        total = 1 / alike - 1
        chance = rng.beta(share * total, (1 - share) * total, clusters)
    return (rng.random((clusters, rows)) < chance[:, None]).astype(float).ravel()


def held(worlds: int, make, truth: float, ids: Sequence, bounds) -> float:
    found = [mean_interval(make(), ids, bounds) for _ in range(worlds)]
    return float(np.mean([f.low <= truth <= f.high for f in found]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clusters", "rows", "share", "alike"),
    [
        (10, 1, 0.8, 0.0), (10, 8, 0.6, 0.3), (20, 5, 0.95, 0.5), (60, 8, 0.9, 0.2), (60, 8, 0.99, 0.05),
        (1000, 3, 0.5, 1.0),
    ],
)  # fmt: skip
def test_intervals_of_shares_hold_the_truth_as_often_as_they_say(clusters, rows, share, alike):
    rng = np.random.default_rng(clusters * rows)
    ids = [(c,) for c in range(clusters) for _ in range(rows)]
    worlds = 100 if clusters == 1000 else 600
    told = held(worlds, lambda: share_of_clusters(rng, clusters, rows, share, alike), share, ids, None)
    assert 0.92 <= told <= 0.998


@pytest.mark.parametrize(("clusters", "alike"), [(10, 0.0), (40, 0.5), (200, 0.0)])
def test_intervals_of_skewed_rewards_hold_the_truth_as_often_as_they_say(clusters: int, alike: float):
    """Four of ten rows earn nothing, the others 0.6 to 1: the mean is 0.48."""
    rng = np.random.default_rng(clusters)

    def rewards():
        shared = np.repeat(rng.random(clusters), 4)
        own = rng.random(4 * clusters)
        u = np.where(rng.random(4 * clusters) < alike, shared, own)
        return np.where(u < 0.4, 0.0, 0.6 + 0.4 * (u - 0.4) / 0.6)

    ids = [(c,) for c in range(clusters) for _ in range(4)]
    assert 0.92 <= held(250, rewards, 0.48, ids, (0.0, 1.0)) <= 0.998


@pytest.mark.slow
def test_intervals_over_images_hold_the_truth_as_often_as_they_say_and_row_intervals_do_not():
    """A row is right when the effects of its two images plus noise of its own are above zero; the truth is 1/2."""
    rng = np.random.default_rng(17)
    told = np.zeros(2)
    for _ in range(150):
        pairs = random_pairs(rng, 80, 400)
        ability = rng.normal(size=80)
        right = [float(ability[i] + ability[j] + rng.normal() > 0) for i, j in pairs]
        for k, clusters in enumerate((pairs, None)):
            found = mean_interval(right, clusters)
            told[k] += found.low <= 0.5 <= found.high
    by_image, by_row = told / 150
    assert 0.91 <= by_image <= 0.985
    assert by_row < 0.75


def test_without_effects_of_images_the_intervals_are_not_wider_than_needed():
    rng = np.random.default_rng(18)
    ratios = []
    for _ in range(20):
        pairs, noise = random_pairs(rng, 200, 500), list(rng.random(size=500))
        wide, narrow = mean_interval(noise, pairs), mean_interval(noise, None)
        ratios.append((wide.high - wide.low) / (narrow.high - narrow.low))
    assert 0.95 <= np.mean(ratios) <= 1.2
