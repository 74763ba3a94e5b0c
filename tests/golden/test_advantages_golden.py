"""Hand-worked advantages. The arithmetic is beside each number."""

from __future__ import annotations

import math

import pytest
from one_group import group_advantages

from vlmrl.algo.advantages import ESTIMATORS, is_dead
from vlmrl.algo.algorithms import ALGORITHMS

ALL = [True] * 4


def test_group_mean_is_the_score_minus_the_mean():
    # mean of 1, 0, 0.5, 0.5 = 2 / 4 = 0.5
    assert group_advantages([1.0, 0.0, 0.5, 0.5], ALL, "group_mean") == [0.5, -0.5, 0.0, 0.0]


def test_group_mean_std_divides_by_the_unbiased_spread_plus_a_millionth():
    # scores 3, 1, 1, 3: mean 2, deviations +-1, sum of squares 4, over n - 1 = 3: std = sqrt(4 / 3) = 1.1547005
    # advantage = 1 / (1.1547005 + 0.000001) = 0.8660246...; with the biased spread it would be 1 / 1.000001
    spread = math.sqrt(4 / 3) + 1e-6
    assert group_advantages([3.0, 1.0, 1.0, 3.0], ALL, "group_mean_std") == pytest.approx(
        [1 / spread, -1 / spread, -1 / spread, 1 / spread], rel=1e-12
    )
    assert 1 / spread == pytest.approx(0.8660246, abs=1e-7)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # 1 - (0 + 0.5 + 0.1) / 3 = 0.8;  0 - (1 + 0.5 + 0.1) / 3 = -0.533333
    # 0.5 - (1 + 0 + 0.1) / 3 = 0.133333;  0.1 - (1 + 0 + 0.5) / 3 = -0.4
    expected = [0.8, -1.6 / 3, 0.4 / 3, -0.4]
    assert group_advantages([1.0, 0.0, 0.5, 0.1], ALL, "leave_one_out") == pytest.approx(expected, rel=1e-12)


def test_a_sample_that_is_not_included_changes_no_baseline_and_gets_exactly_zero():
    # without the third: scores 1, 0, 0: mean 1 / 3
    given = group_advantages([1.0, 0.0, float("nan"), 0.0], [True, True, False, True], "group_mean")
    assert given == pytest.approx([2 / 3, -1 / 3, 0.0, -1 / 3], rel=1e-12)
    assert given[2] == 0.0
    # leave one out over three: 1 - 0 = 1;  0 - (1 + 0) / 2 = -0.5
    assert group_advantages([1.0, 0.0, 9.0, 0.0], [True, True, False, True], "leave_one_out") == pytest.approx(
        [1.0, -0.5, 0.0, -0.5], rel=1e-12
    )


@pytest.mark.parametrize("row", [name for name, row in ALGORITHMS.items() if not row.needs_critic])
@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3, 1e-300, -0.3, 1e16 + 2, 0.0])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 49])
def test_equal_scores_give_exactly_zero_under_every_row_without_a_critic(row: str, value: float, count: int):
    # The mean of seven 0.1 is 0.09999999999999999, so the plain formulas would give 1e-17 or, over the spread, 1e-11.
    assert group_advantages([value] * count, [True] * count, ALGORITHMS[row].advantage) == [0.0] * count


@pytest.mark.parametrize("estimator", [e for e in ESTIMATORS if e != "gae"])
def test_equal_included_scores_are_dead_whatever_the_others_are(estimator: str):
    assert group_advantages([0.1, 0.9, 0.1, 0.1], [True, False, True, True], estimator) == [0.0] * 4
    assert group_advantages([0.1, 0.9], [True, False], estimator) == [0.0, 0.0]
    assert group_advantages([], [], estimator) == []
    assert group_advantages([1.0, 2.0], [False, False], estimator) == [0.0, 0.0]


@pytest.mark.parametrize(
    "estimator", [e for e in ESTIMATORS if e not in ("best_of_group", "none", "zero", "gae", "optimal_token")]
)
def test_advantages_add_up_to_zero_and_keep_the_order_of_the_scores(estimator: str):
    scores = [0.3, 1.7, -2.0, 0.30000001, 5.0]
    found = group_advantages(scores, [True] * 5, estimator)
    assert math.fsum(found) == pytest.approx(0.0, abs=1e-12)
    assert sorted(range(5), key=lambda i: scores[i]) == sorted(range(5), key=lambda i: found[i])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_is_an_error_and_never_an_advantage(bad: float):
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, bad], [True, True], "group_mean")


def test_an_unknown_estimator_is_an_error_even_for_a_dead_group():
    with pytest.raises(KeyError):
        group_advantages([1.0, 1.0], [True, True], "group_median")


def test_dead_means_all_equal_or_fewer_than_two():
    assert is_dead([]) and is_dead([1.0]) and is_dead([0.1] * 7)
    assert not is_dead([0.1, 0.1, 0.1000001])
