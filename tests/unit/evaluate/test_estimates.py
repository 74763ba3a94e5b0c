"""Estimates over rows that share images: by hand, against scikit-learn, and what their intervals are made of."""

from __future__ import annotations

import math

import numpy as np
import pytest
from evaluation_builders import random_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from vlmrl.evaluate.estimates import (
    EMPTY,
    _placements,
    auc_interval,
    difference_interval,
    ece_interval,
    mean_interval,
    pooled_difference_interval,
    ratio_interval,
)

# Means and differences


def test_rows_that_share_nothing_give_the_interval_of_independent_rows():
    values = list(np.random.default_rng(0).random(size=80))
    alone = mean_interval(values, [(f"x{i}", f"y{i}") for i in range(80)])
    assert alone == mean_interval(values, None)


def test_one_image_a_row_gives_the_cluster_robust_interval():
    rng = np.random.default_rng(3)
    effect = rng.normal(size=50)
    clusters = [(i,) for i in range(50) for _ in range(8)]
    values = [float(effect[c] + 0.1 * rng.normal()) for (c,) in clusters]
    found = mean_interval(values, clusters)
    means = np.array(values).reshape(50, 8).mean(1)
    assert found.high - found.low == pytest.approx(2 * 2.0096 * means.std(ddof=1) / math.sqrt(50), rel=0.03)
    alone = mean_interval(values, None)
    assert found.high - found.low > 2.5 * (alone.high - alone.low)


def test_no_rows_give_the_empty_interval():
    assert mean_interval([], None) is EMPTY
    assert difference_interval([], [], []) is EMPTY
    assert auc_interval([], [], None) is EMPTY
    assert ece_interval([], [], None) is EMPTY
    assert pooled_difference_interval([([], [])], [[]]) is EMPTY
    assert ratio_interval([], [], None) is EMPTY


@pytest.mark.parametrize("values", [[1.0, math.nan], [1.0, math.inf], [[1.0], [2.0]]])
def test_numbers_that_are_not_finite_or_not_a_list_are_refused(values: list):
    with pytest.raises(ValueError, match="finite"):
        mean_interval(values, None)


def test_lengths_that_differ_are_refused():
    with pytest.raises(ValueError, match="2 rows but clusters for 1"):
        mean_interval([1.0, 2.0], [("a",)])
    with pytest.raises(ValueError, match="same rows"):
        difference_interval([1.0], [1.0, 2.0], None)


def test_a_difference_has_the_interval_of_the_row_differences_in_its_own_range():
    rng = np.random.default_rng(4)
    pairs = random_pairs(rng, 30, 100)
    a, b = rng.random(100), rng.random(100)
    found = difference_interval(list(a), list(b), pairs)
    alone = mean_interval(list(a - b), pairs, (-1.0, 1.0))
    assert (found.mean, found.low, found.high) == pytest.approx((alone.mean, alone.low, alone.high), abs=1e-12)


def test_pairing_removes_what_is_common_to_both():
    rng = np.random.default_rng(5)
    hard = 0.8 * rng.random(300)
    found = difference_interval(list(hard + 0.1 + 0.01 * rng.random(300)), list(hard), None)
    assert found.low > 0.104 and found.high < 0.106
    apart = mean_interval(list(hard), None)
    assert apart.high - apart.low > 20 * (found.high - found.low)


def test_identical_answers_differ_by_zero_and_the_interval_says_of_how_many_rows_that_was_seen():
    found = difference_interval([0.0, 1.0, 1.0] * 400, [0.0, 1.0, 1.0] * 400, None)
    assert found.mean == 0.0 and -found.low == found.high == pytest.approx(3.8415 / 1203.8415, abs=1e-6)


def test_few_rows_on_which_two_models_differ_are_judged_as_carefully_as_an_exact_test_would():
    """Of 1,200 rows k are won and none lost. The sign test's two-sided p is 2 / 2^k: 0.125 of 4, 0.016 of 7."""
    for wins, clear in ((3, False), (4, False), (7, True), (30, True)):
        found = difference_interval([1.0] * wins + [0.0] * (1200 - wins), [0.0] * 1200, None)
        assert (found.low > 0) == clear, wins


def test_pooled_runs_count_alike_and_move_together():
    rng = np.random.default_rng(6)
    pairs = random_pairs(rng, 60, 300)
    before = [rng.random(300) for _ in range(3)]
    after = [np.clip(x + rng.normal(0.1, 0.2, 300), 0, 1) for x in before]
    pooled = pooled_difference_interval(list(zip(after, before, strict=True)), [pairs] * 3)
    averaged = difference_interval(list(np.mean(after, axis=0)), list(np.mean(before, axis=0)), pairs)
    assert pooled.mean == pytest.approx(averaged.mean, abs=1e-12)
    assert pooled.high - pooled.low == pytest.approx(averaged.high - averaged.low, rel=0.05)
    # Pretending that the runs had different images claims more than there is when images have effects of their own.
    effect = rng.normal(size=60)
    shared = [0.2 * np.array([effect[i] + effect[j] for i, j in pairs])] * 3
    zeros = [np.zeros(300)] * 3
    together = pooled_difference_interval(list(zip(shared, zeros, strict=True)), [pairs] * 3)
    apart = pooled_difference_interval(
        list(zip(shared, zeros, strict=True)), [[((k, i), (k, j)) for i, j in pairs] for k in range(3)]
    )
    assert together.mean == pytest.approx(apart.mean, abs=1e-12)
    assert together.high - together.low > 1.6 * (apart.high - apart.low)


def test_pooled_runs_of_unequal_length_have_equal_say():
    runs = [([1.0] * 90, [0.0] * 90), ([0.0] * 10, [0.0] * 10)]
    found = pooled_difference_interval(runs, [[(i,) for i in range(90)], [(i,) for i in range(10)]])
    assert found.mean == pytest.approx(0.5, abs=1e-12)


# Ratios


def test_a_ratio_is_sum_over_sum():
    found = ratio_interval([1.0, 0.0, 2.0], [2.0, 1.0, 2.0], None)
    assert found.mean == pytest.approx(0.6, abs=1e-12)
    assert 0 <= found.low <= 0.6 <= found.high <= 1
    assert ratio_interval([0.0], [0.0], None) is EMPTY


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=30))
def test_a_share_among_counted_rows_has_the_interval_of_these_rows_alone(rows: list[tuple[bool, bool]]):
    hits, said = [float(a and b) for a, b in rows], [float(b) for _, b in rows]
    ids = [(i // 3,) for i in range(len(rows))]
    counted = [i for i, s in enumerate(said) if s]
    found = ratio_interval(hits, said, ids)
    if not counted:
        assert found is EMPTY
        return
    alone = mean_interval([hits[i] for i in counted], [ids[i] for i in counted])
    assert (found.mean, found.n, found.clusters) == pytest.approx((alone.mean, alone.n, alone.clusters))
    assert (found.low, found.high) == pytest.approx((alone.low, alone.high), abs=1e-9, nan_ok=True)


def test_a_ratio_outside_of_its_range_is_refused():
    with pytest.raises(ValueError, match="numerators from 0"):
        ratio_interval([2.0], [1.0], None)


# AUC


@settings(max_examples=40)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=40))
def test_auc_agrees_with_scikit_learn_ties_included(rows: list[tuple[bool, int]]):
    labels, scores = [float(y) for y, _ in rows], [s / 5 for _, s in rows]
    found = auc_interval(labels, scores, None)
    if len(set(labels)) < 2:
        assert found is EMPTY
        return
    from sklearn.metrics import roc_auc_score

    assert found.mean == pytest.approx(roc_auc_score(labels, scores), abs=1e-12)
    assert 0 <= found.low <= found.mean <= found.high <= 1


def test_auc_by_hand():
    # Positives 0.9, 0.5; negatives 0.5, 0.1: (1 + 1 + 0.5 + 1) / 4.
    assert auc_interval([1, 1, 0, 0], [0.9, 0.5, 0.5, 0.1], None).mean == 0.875


def test_infinite_scores_rank_last_and_first():
    assert auc_interval([1, 0], [-math.inf, math.inf], None).mean == 0.0
    assert auc_interval([1, 0], [-math.inf, -math.inf], None).mean == 0.5


def test_a_perfect_ranking_of_few_positives_is_as_uncertain_as_so_few_rows():
    found = auc_interval([1] * 10 + [0] * 90, [0.9] * 10 + [0.1] * 90, None)
    assert (found.mean, found.high) == (1.0, 1.0)
    assert found.low == pytest.approx(10 / 13.8415, abs=1e-4)


def test_the_interval_of_auc_is_close_to_delongs():
    rng = np.random.default_rng(8)
    labels = (rng.random(600) < 0.4).astype(float)
    scores = rng.normal(size=600) + labels
    found = auc_interval(list(labels), list(scores), None)
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative[None]).astype(float)
    variance = wins.mean(1).var(ddof=1) / len(positive) + wins.mean(0).var(ddof=1) / len(negative)
    assert found.high - found.low == pytest.approx(2 * 1.96 * math.sqrt(variance), rel=0.05)


def test_the_placements_of_a_class_average_to_auc():
    rng = np.random.default_rng(9)
    scores, positive = rng.integers(0, 6, size=40) / 5, rng.random(40) < 0.4
    placed = _placements(positive, scores)
    by_hand = [
        np.mean([(a > b) + 0.5 * (a == b) if p else (b > a) + 0.5 * (a == b) for b in scores[positive != p]])
        for a, p in zip(scores, positive, strict=True)
    ]
    assert placed.tolist() == pytest.approx(by_hand, abs=1e-12)
    assert placed[positive].mean() == pytest.approx(placed[~positive].mean(), abs=1e-12)


def test_auc_intervals_hold_the_truth_as_often_as_they_say():
    """Scores of the classes are normal, one standard deviation apart: AUC is Phi(1 / sqrt(2)) = 0.76025."""
    rng, held = np.random.default_rng(10), 0
    for _ in range(200):
        labels = np.repeat([0.0, 1.0], [40, 30])
        found = auc_interval(labels, rng.normal(size=70) + labels, None)
        held += found.low <= 0.76025 <= found.high
    assert 0.92 <= held / 200 <= 0.995


# Calibration


def test_ece_by_hand():
    # Bin [0.9, 1]: mean label 0.5, mean probability 0.95, 2 rows; bin [0.3, 0.4): 0 and 0.31, 1 row.
    assert ece_interval([1, 0, 0], [0.92, 0.98, 0.31], None).mean == pytest.approx((2 * 0.45 + 0.31) / 3)
    assert ece_interval([1, 0], [0.5, 0.5], None).mean == 0.0
    # The edges of bins belong to the upper one, 1 to the last: 0.1 and 0.19 share one, 0.2 does not.
    assert ece_interval([1, 0, 0], [0.1, 0.19, 0.2], None).mean == pytest.approx((1 - 0.29 + 0.2) / 3)
    assert ece_interval([1, 1], [0.95, 1.0], None).mean == pytest.approx(0.025)
    assert ece_interval([1, 0], [0.2, 0.8], None, bins=1).mean == 0.0


@pytest.mark.parametrize(("labels", "said"), [([1, 2], [0.1, 0.2]), ([1], [0.1, 0.2]), ([1], [1.1]), ([0], [-0.1])])
def test_ece_refuses_what_is_no_label_or_no_probability(labels, said):
    with pytest.raises(ValueError, match="ECE needs"):
        ece_interval(labels, said, None)


def test_the_interval_of_ece_holds_the_estimate_in_its_range():
    rng = np.random.default_rng(3)
    said = rng.uniform(size=400)
    found = ece_interval((rng.uniform(size=400) < said).astype(float), said, None)
    assert 0 < found.low <= found.mean <= found.high < 0.15


def test_ece_intervals_grow_with_what_rows_share():
    rng = np.random.default_rng(4)
    truth, said = np.repeat(rng.integers(0, 2, 40), 5), np.repeat(rng.uniform(size=40), 5)
    alone = ece_interval(truth, said, None)
    shared = ece_interval(truth, said, [(str(i // 5),) for i in range(200)])
    assert shared.mean == alone.mean and shared.high - shared.low > 1.3 * (alone.high - alone.low)
