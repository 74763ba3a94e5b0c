"""Intervals: by hand, against scipy and scikit-learn, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.evaluate.stats import (
    EMPTY,
    Units,
    bootstrap_auc,
    bootstrap_ece,
    bootstrap_mean,
    bootstrap_ratio,
    paired_bootstrap,
    pooled_bootstrap,
    wilson,
)


def random_pairs(rng: np.random.Generator, images: int, rows: int) -> list[tuple[int, int]]:
    return [tuple(int(i) for i in rng.choice(images, 2, replace=False)) for _ in range(rows)]  # type: ignore[misc]


# What is resampled


def test_a_row_weighs_the_product_of_its_images_multiplicities():
    units = Units([("a", "b"), ("b", "c"), ("a", "c")], 3)
    weights = next(units.weights(seed=3, replicates=50))
    # Three images are drawn three times; with counts (na, nb, nc) the rows weigh na * nb, nb * nc, na * nc.
    drawn = np.random.default_rng(3).multinomial(3, [1 / 3] * 3, size=50)
    assert weights.tolist() == [[a * b, b * c, a * c] for a, b, c in drawn.tolist()]


def test_images_that_occur_in_the_same_rows_are_one_unit_so_private_pairs_are_plain_rows():
    units = Units([("a", "b"), ("c", "d"), ("e",), ()], 4)
    assert units.count == 4
    assert sorted(units.unit_of) == [0, 1, 2, 3]


def test_an_image_twice_in_a_row_counts_once():
    same = Units([("a", "a"), ("a", "b"), ("b", "b")], 3)
    assert len(same.unit_of) == 4


def test_rows_that_share_nothing_give_the_interval_of_independent_rows():
    values = list(np.random.default_rng(0).normal(size=80))
    alone = bootstrap_mean(values, [(f"x{i}", f"y{i}") for i in range(80)], 7)
    assert alone == bootstrap_mean(values, None, 7)


def test_the_robust_variance_by_hand():
    # Rows (a, b), (b, c), (d, e) with influences 1, -2, 3. Rows 0 and 1 share b:
    # 1 + 4 + 9 + 2 * (1 * -2) = 10, over 3^2. It is not below that of independent rows, 14 / 9.
    units = Units([("a", "b"), ("b", "c"), ("d", "e")], 3)
    assert units.robust_variance(np.array([1.0, -2.0, 3.0])) == pytest.approx(14 / 9, rel=1e-12)
    # With influences 1, 2, -3: 14 + 2 * (1 * 2) = 18 over 9 = 2.
    assert units.robust_variance(np.array([1.0, 2.0, -3.0])) == pytest.approx(2.0, rel=1e-12)


def test_rows_that_share_two_images_are_counted_once_in_the_robust_variance():
    units = Units([("a", "b"), ("b", "a"), ("a", "c")], 3)
    # All share something: (1 + 1 + 1)^2 / 9 = 1.
    assert units.robust_variance(np.ones(3)) == pytest.approx(1.0, rel=1e-12)


# Means


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    rng = np.random.default_rng(1)
    values, pairs = list(rng.normal(size=200)), random_pairs(rng, 40, 200)
    assert bootstrap_mean(values, pairs, 5) == bootstrap_mean(values, pairs, 5)
    assert bootstrap_mean(values, pairs, 5) != bootstrap_mean(values, pairs, 6)


def test_for_independent_rows_the_interval_is_close_to_the_t_interval():
    from scipy import stats

    values = np.random.default_rng(2).normal(3.0, 2.0, size=400)
    found = bootstrap_mean(list(values), None, 0, replicates=5000)
    half = stats.t.ppf(0.975, 399) * values.std(ddof=1) / 20
    assert found.mean == pytest.approx(values.mean(), rel=1e-12)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.03)


def test_one_image_a_row_gives_the_cluster_bootstrap():
    rng = np.random.default_rng(3)
    effect = rng.normal(size=50)
    clusters = [(i,) for i in range(50) for _ in range(8)]
    values = [float(effect[c] + 0.1 * rng.normal()) for (c,) in clusters]
    found = bootstrap_mean(values, clusters, 0, replicates=10_000)
    means = np.array(values).reshape(50, 8).mean(1)
    expected = 2 * 1.96 * means.std(ddof=1) / math.sqrt(50)
    assert found.high - found.low == pytest.approx(expected, rel=0.06)
    assert found.high - found.low > 2.5 * (bootstrap_mean(values, None, 0).high - bootstrap_mean(values, None, 0).low)


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(0, 3))
def test_the_interval_holds_the_mean(values: list[float], seed: int):
    pairs = [(i % 4, 4 + i % 3) for i in range(len(values))]
    found = bootstrap_mean(values, pairs, seed, replicates=50)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    if math.isfinite(found.low):
        assert found.low <= found.mean <= found.high


def test_the_interval_is_cut_to_the_bounds():
    values = [0.99, 0.98, 1.0, 0.2, 0.97]
    assert bootstrap_mean(values, None, 0).high > 1.0
    assert bootstrap_mean(values, None, 0, bounds=(0.0, 1.0)).high == 1.0


def test_one_image_alone_says_nothing_about_other_images():
    found = bootstrap_mean([0.2, 0.4], [("a",), ("a",)], 0)
    assert found.mean == pytest.approx(0.3, rel=1e-12)
    assert math.isnan(found.low) and math.isnan(found.high)


def test_no_rows_give_the_empty_interval():
    assert bootstrap_mean([], None) is EMPTY
    assert paired_bootstrap([], [], []) is EMPTY
    assert bootstrap_auc([], [], None) is EMPTY
    assert pooled_bootstrap([[]], [[]]) is EMPTY
    assert bootstrap_ratio([], [], None) is EMPTY


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, math.inf], [[1.0], [2.0]]])
def test_numbers_that_are_not_finite_or_not_a_list_are_refused(values: list):
    with pytest.raises(ValueError, match="finite"):
        bootstrap_mean(values, None)


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="2 rows but clusters for 1"):
        bootstrap_mean([1.0, 2.0], [("a",)])
    with pytest.raises(ValueError, match="same rows"):
        paired_bootstrap([1.0], [1.0, 2.0], None)


# Shares


def test_wilson_by_hand():
    # 8 of 10, z^2 = 3.8415: centre (0.8 + 0.19207) / 1.38415 = 0.71675,
    # half = 1.95996 / 1.38415 * sqrt(0.016 + 0.0096037) = 0.22657.
    found = wilson(8, 10)
    assert (found.low, found.high) == pytest.approx((0.49016, 0.94332), abs=1e-4)


@given(st.integers(1, 60), st.data())
def test_wilson_agrees_with_scipy(n: int, data: st.DataObject):
    from scipy.stats import binomtest

    k = data.draw(st.integers(0, n))
    reference = binomtest(k, n).proportion_ci(0.95, method="wilson")
    found = wilson(k, n)
    assert (found.low, found.high) == pytest.approx((reference.low, reference.high), abs=1e-9)


def test_a_share_that_is_always_one_has_an_honest_interval():
    found = bootstrap_mean([1.0] * 10, None)
    assert found.high == 1.0
    assert found.low == pytest.approx(1 - wilson(0, 10).high, abs=1e-12)


def test_no_failure_among_many_pairs_of_few_images_is_weaker_news_than_among_as_many_rows():
    rng = np.random.default_rng(0)
    pairs = random_pairs(rng, 40, 400)
    assert bootstrap_mean([0.0] * 400, pairs).high == pytest.approx(wilson(0, 20).high, abs=1e-12)
    assert bootstrap_mean([0.0] * 400, None).high == pytest.approx(wilson(0, 400).high, abs=1e-12)


# Differences


def test_a_paired_difference_is_the_mean_of_the_row_differences():
    rng = np.random.default_rng(4)
    pairs = random_pairs(rng, 30, 100)
    a, b = rng.random(100), rng.random(100)
    found = paired_bootstrap(list(a), list(b), pairs, 9)
    alone = bootstrap_mean(list(a - b), pairs, 9)
    assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high), abs=1e-12)


def test_pairing_removes_what_is_common_to_both():
    rng = np.random.default_rng(5)
    hard = rng.normal(size=300)
    found = paired_bootstrap(list(hard + 0.1), list(hard), None, 0)
    assert (found.low, found.high) == pytest.approx((0.1, 0.1), abs=1e-9)


def test_identical_answers_differ_by_exactly_zero():
    found = paired_bootstrap([0.0, 1.0, 1.0], [0.0, 1.0, 1.0], None)
    assert (found.mean, found.low, found.high) == (0.0, 0.0, 0.0)


def test_pooled_runs_count_alike_and_move_together():
    rng = np.random.default_rng(6)
    pairs = random_pairs(rng, 60, 300)
    runs = [rng.normal(size=300) + shift for shift in (0.0, 0.3, 0.6)]
    pooled = pooled_bootstrap([list(r) for r in runs], [pairs] * 3, 1)
    averaged = bootstrap_mean(list(np.mean(runs, axis=0)), pairs, 1)
    assert pooled.mean == pytest.approx(averaged.mean, abs=1e-12)
    assert pooled.high - pooled.low == pytest.approx(averaged.high - averaged.low, rel=0.05)
    # Pretending that the runs had different images would claim three times the data.
    apart = pooled_bootstrap([list(r) for r in runs], [[(k, *p) for p in pairs] for k in range(3)], 1)
    assert pooled.mean == pytest.approx(apart.mean, abs=1e-12)


def test_pooled_runs_of_unequal_length_have_equal_say():
    found = pooled_bootstrap([[1.0] * 90, [0.0] * 10], [[(i,) for i in range(90)], [(i,) for i in range(10)]])
    assert found.mean == pytest.approx(0.5, abs=1e-12)


# Ratios and AUC


def test_a_ratio_is_sum_over_sum():
    found = bootstrap_ratio([1.0, 0.0, 2.0], [2.0, 1.0, 2.0], None)
    assert found.mean == pytest.approx(0.6, abs=1e-12)
    assert found.low <= 0.6 <= found.high
    assert bootstrap_ratio([0.0], [0.0], None) is EMPTY


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_auc_agrees_with_scikit_learn_ties_included(rows: list[tuple[bool, int]]):
    labels, scores = [float(y) for y, _ in rows], [s / 5 for _, s in rows]
    found = bootstrap_auc(labels, scores, None, replicates=20)
    if len(set(labels)) < 2:
        assert found is EMPTY
        return
    from sklearn.metrics import roc_auc_score

    assert found.mean == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)


def test_auc_by_hand():
    # Positives 0.9, 0.5; negatives 0.5, 0.1: (1 + 1 + 0.5 + 1) / 4.
    assert bootstrap_auc([1, 1, 0, 0], [0.9, 0.5, 0.5, 0.1], None).mean == 0.875


def test_infinite_scores_rank_last_and_first():
    assert bootstrap_auc([1, 0], [-math.inf, math.inf], None).mean == 0.0
    assert bootstrap_auc([1, 0], [-math.inf, -math.inf], None).mean == 0.5


def test_the_weighted_auc_of_a_replicate_is_that_of_the_repeated_rows():
    from sklearn.metrics import roc_auc_score

    from vlmrl.evaluate.stats import _weighted_auc

    scores, labels = np.array([0.1, 0.2, 0.2, 0.7, 0.9]), np.array([False, True, False, True, False])
    weights = np.array([[1.0, 2.0, 3.0, 0.0, 1.0]])
    found = _weighted_auc(weights, labels, np.array([0, 1, 3, 4]))
    again = roc_auc_score(labels.repeat(weights[0].astype(int)), scores.repeat(weights[0].astype(int)))
    assert found[0] == pytest.approx(again, abs=1e-12)


def test_the_interval_of_auc_is_close_to_delongs():
    rng = np.random.default_rng(8)
    labels = (rng.random(600) < 0.4).astype(float)
    scores = rng.normal(size=600) + labels
    found = bootstrap_auc(list(labels), list(scores), None, 0, replicates=5000)
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative[None]).astype(float)
    variance = wins.mean(1).var(ddof=1) / len(positive) + wins.mean(0).var(ddof=1) / len(negative)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.05)


# Coverage


def coverage(images: int, rows: int, effect: float, worlds: int) -> tuple[float, float]:
    """Share of simulated test sets whose interval holds the truth: resampling images, and resampling rows.

    A row is right when the effects of its two images plus noise of its own are above zero; the truth is 1/2.
    """
    rng = np.random.default_rng(17)
    held = np.zeros(2)
    for world in range(worlds):
        pairs = random_pairs(rng, images, rows)
        ability = rng.normal(size=images) * effect
        right = [float(ability[i] + ability[j] + rng.normal() > 0) for i, j in pairs]
        for k, clusters in enumerate((pairs, None)):
            found = bootstrap_mean(right, clusters, world, replicates=300)
            held[k] += found.low <= 0.5 <= found.high
    return float(held[0] / worlds), float(held[1] / worlds)


@pytest.mark.slow
def test_intervals_over_images_hold_the_truth_as_often_as_they_say_and_row_intervals_do_not():
    by_image, by_row = coverage(images=80, rows=400, effect=1.0, worlds=200)
    assert 0.91 <= by_image <= 0.985
    assert by_row < 0.75


@pytest.mark.slow
def test_without_effects_of_images_the_intervals_are_not_wider_than_needed():
    # The product of multiplicities alone would be wider by sqrt(3) here.
    rng = np.random.default_rng(18)
    ratios = []
    for world in range(20):
        pairs = random_pairs(rng, 200, 500)
        noise = list(rng.normal(size=500))
        wide, narrow = bootstrap_mean(noise, pairs, world), bootstrap_mean(noise, None, world)
        ratios.append((wide.high - wide.low) / (narrow.high - narrow.low))
    assert 0.95 <= np.mean(ratios) <= 1.2


def test_the_influence_of_a_row_on_auc_is_its_derivative():
    from vlmrl.evaluate.stats import _auc_influence, _weighted_auc

    rng = np.random.default_rng(9)
    scores = np.sort(rng.integers(0, 6, size=20) / 5)
    positive = rng.random(20) < 0.4
    starts = np.flatnonzero(np.r_[True, np.diff(scores) > 0])
    ones = np.ones((1, 20))
    value = _weighted_auc(ones, positive, starts)[0]
    influence = _auc_influence(positive, scores, value)
    for row in range(20):
        more = ones.copy()
        more[0, row] += 1e-6
        slope = (_weighted_auc(more, positive, starts)[0] - value) / 1e-6 * 20
        assert influence[row] == pytest.approx(slope, abs=1e-4)


def test_ece_by_hand():
    # Bin [0.9, 1]: mean label 0.5, mean probability 0.95, 2 rows; bin [0.3, 0.4): 0 and 0.31, 1 row.
    assert bootstrap_ece([1, 0, 0], [0.92, 0.98, 0.31], None).mean == pytest.approx((2 * 0.45 + 0.31) / 3)
    assert bootstrap_ece([1, 0], [0.5, 0.5], None).mean == 0.0
    # The edges of bins belong to the upper one, 1 to the last: 0.1 and 0.19 share one, 0.2 does not.
    assert bootstrap_ece([1, 0, 0], [0.1, 0.19, 0.2], None).mean == pytest.approx((1 - 0.29 + 0.2) / 3)
    assert bootstrap_ece([1, 1], [0.95, 1.0], None).mean == pytest.approx(0.025)
    assert bootstrap_ece([1, 0], [0.2, 0.8], None, bins=1).mean == 0.0


@pytest.mark.parametrize(("labels", "said"), [([1, 2], [0.1, 0.2]), ([1], [0.1, 0.2]), ([1], [1.1]), ([0], [-0.1])])
def test_ece_refuses_what_is_no_label_or_no_probability(labels, said):
    with pytest.raises(ValueError, match="ECE needs"):
        bootstrap_ece(labels, said, None)


def test_ece_of_nothing_is_empty_and_its_interval_holds_the_estimate():
    assert bootstrap_ece([], [], None).n == 0
    rng = np.random.default_rng(3)
    said = rng.uniform(size=400)
    found = bootstrap_ece((rng.uniform(size=400) < said).astype(float), said, None, 1)
    assert 0 < found.low <= found.mean <= found.high < 0.15


def test_ece_intervals_grow_with_what_rows_share():
    rng = np.random.default_rng(4)
    truth, said = np.repeat(rng.integers(0, 2, 40), 5), np.repeat(rng.uniform(size=40), 5)
    alone = bootstrap_ece(truth, said, None, 1)
    shared = bootstrap_ece(truth, said, [(str(i // 5),) for i in range(200)], 1)
    assert shared.mean == alone.mean and shared.high - shared.low > 1.3 * (alone.high - alone.low)
