"""Share of a quantity that is lost: hand-worked values, a slow reference, coverage by simulation, bounds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vlmrl.evaluate.blind_probe import relative_drop
from vlmrl.evaluate.estimates import UNIT_RANGE, Clusters, difference_interval, mean_interval

Bits = NDArray[np.float64]


def draw(rng: np.random.Generator, rows: int, normal: float, changed: float, shared: float) -> tuple[Bits, Bits]:
    """Paired rows, right with these chances; for this share of rows, one draw decides both."""
    one, other = rng.random(rows), rng.random(rows)
    other = np.where(rng.random(rows) < shared, one, other)
    return (one < normal).astype(float), (other < changed).astype(float)


def test_the_share_is_the_lost_part_of_the_mean() -> None:
    found = relative_drop([1, 1, 1, 0], [1, 0, 0, 0], None, UNIT_RANGE)
    assert found.mean == pytest.approx(2 / 3) and found.n == found.clusters == 4
    assert found.low < 2 / 3 < found.high <= 1


def test_it_is_not_defined_where_the_normal_mean_may_be_0() -> None:
    assert relative_drop([0] * 30, [0] * 29 + [1], None, UNIT_RANGE).n == 0
    assert relative_drop([], [], None, UNIT_RANGE).n == 0
    assert relative_drop([1, 1, 0], [0, 1, 0], [("a",)] * 3, UNIT_RANGE).n == 0  # one cluster: no interval
    with pytest.raises(ValueError, match="begin at 0"):
        relative_drop([1], [0], None, (-1.0, 1.0))


def test_without_any_loss_the_interval_is_that_of_the_difference() -> None:
    """20 rows, no row differs: nothing is known against a few rows that would."""
    values = [1.0] * 10 + [0.0] * 10
    found, difference = (
        relative_drop(values, values, None, UNIT_RANGE),
        difference_interval(values, values, None, UNIT_RANGE),
    )
    assert found.mean == 0 and found.low < difference.low < 0 < difference.high < found.high


def test_without_any_right_answer_the_lower_limit_is_that_of_the_changed_mean() -> None:
    """All is lost: the lower limit leaves room for right answers that 40 rows did not show.

    With changed mean 0 and limit s, normal mean 0.5 with distance t to its lower limit: R^2 (0.5^2 - t^2) = s^2.
    """
    normal = [1.0] * 20 + [0.0] * 20
    found = relative_drop(normal, [0.0] * 40, None, UNIT_RANGE)
    s = mean_interval([0.0] * 40, None, UNIT_RANGE).high
    t = 0.5 - mean_interval(normal, None, UNIT_RANGE).low
    assert found.mean == found.high == 1
    assert found.low == pytest.approx(1 - s / math.sqrt(0.25 - t**2)) and found.low < 0.85


def test_with_many_rows_it_is_the_interval_of_fieller_s_theorem() -> None:
    """Slow reference: all ratios R for which the mean of d - R a is within 1.96 standard errors of 0."""
    a, b = draw(np.random.default_rng(4), 20_000, 0.6, 0.35, 0.5)
    d = a - b
    ratios = np.linspace(0.3, 0.55, 5001)
    errors = np.array([(d - r * a).std(ddof=1) / math.sqrt(len(a)) for r in ratios])
    inside = ratios[np.abs(d.mean() - ratios * a.mean()) <= 1.96 * errors]
    found = relative_drop(a, b, None, UNIT_RANGE)
    assert (found.low, found.high) == pytest.approx((inside[0], inside[-1]), abs=4e-4)


def test_rows_that_share_images_widen_it() -> None:
    a, b = draw(np.random.default_rng(5), 60, 0.7, 0.4, 0.3)
    clusters: Clusters = [(i // 5,) for i in range(300)]
    together = relative_drop(np.repeat(a, 5), np.repeat(b, 5), clusters, UNIT_RANGE)
    alone = relative_drop(np.repeat(a, 5), np.repeat(b, 5), None, UNIT_RANGE)
    once = relative_drop(a, b, None, UNIT_RANGE)
    assert together.high - together.low > 1.7 * (alone.high - alone.low)
    assert (together.low, together.high) == pytest.approx((once.low, once.high), abs=0.05)


def test_another_range_scales() -> None:
    a, b = draw(np.random.default_rng(6), 80, 0.7, 0.4, 0.3)
    one, ten = relative_drop(a, b, None, UNIT_RANGE), relative_drop(10 * a, 10 * b, None, (0.0, 10.0))
    assert (ten.mean, ten.low, ten.high) == pytest.approx((one.mean, one.low, one.high))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60))
def test_the_estimate_is_inside_and_at_most_1(pairs: list[tuple[bool, bool]]) -> None:
    found = relative_drop([float(a) for a, _ in pairs], [float(b) for _, b in pairs], None, UNIT_RANGE)
    if found.n:
        assert found.low <= found.mean <= found.high <= 1 and math.isfinite(found.low)


@pytest.mark.parametrize(
    ("normal", "changed", "shared"), [(0.8, 0.5, 0.5), (0.5, 0.5, 0.5), (0.3, 0.2, 0.3), (0.8, 0.25, 0.0)]
)
def test_it_contains_the_true_share_in_93_to_97_percent_of_draws(normal: float, changed: float, shared: float) -> None:
    """400 draws of 100 rows: a standard error of 1.1 points, so 2 of them are allowed on either side."""
    rng = np.random.default_rng(11)
    truth = (normal - changed) / normal
    draws = [relative_drop(*draw(rng, 100, normal, changed, shared), None, UNIT_RANGE) for _ in range(400)]
    inside = np.mean([found.low <= truth <= found.high for found in draws])
    assert 0.93 - 0.022 <= inside <= 0.97 + 0.022
