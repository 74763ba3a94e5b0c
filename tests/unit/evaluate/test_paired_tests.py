"""Tests of paired differences: by hand, against scipy and enumeration, and the power against a slow simulation."""

from __future__ import annotations

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, false_discovery_control, permutation_test

from vlmrl.evaluate import significance
from vlmrl.evaluate.significance import (
    MCNEMAR,
    SIGN_FLIP,
    bootstrap_interval,
    design_effect,
    exact_power,
    groups_of,
    holm,
    mcnemar_exact,
    paired_test,
    power_of,
    rows_needed,
    rows_needed_for_mean,
)


def test_mcnemar_by_hand():
    # Of 8 rows that tell, 1 speaks for A: 2 * (C(8, 0) + C(8, 1)) / 2^8 = 18 / 256.
    assert mcnemar_exact(1, 7) == mcnemar_exact(7, 1) == pytest.approx(18 / 256, abs=1e-15)
    assert mcnemar_exact(0, 5) == pytest.approx(2 / 32, abs=1e-15)
    assert mcnemar_exact(0, 0) == mcnemar_exact(3, 3) == 1.0


@given(st.integers(0, 6), st.integers(0, 6))
def test_mcnemar_counts_all_signs(only_a: int, only_b: int):
    total, far = 2 ** (only_a + only_b), abs(only_a - only_b)
    hits = sum(abs(sum(signs)) >= far for signs in itertools.product((-1, 1), repeat=only_a + only_b))
    assert mcnemar_exact(only_a, only_b) == pytest.approx(hits / total, abs=1e-12)


def test_rows_of_right_and_wrong_get_mcnemars_test():
    found = paired_test([1, 0, 0, 0, 0, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1, 0], None)
    assert (found.method, found.only_a, found.only_b, found.groups) == (MCNEMAR, 1, 7, 10)
    assert found.p == pytest.approx(18 / 256)
    own_images = paired_test([1, 0, 0], [0, 1, 1], [("a", "b"), ("c",), ()])
    assert (own_images.method, own_images.groups) == (MCNEMAR, 3)


def test_rows_that_share_images_count_together():
    # Three groups, each of which speaks for B by 2: of 8 signs 2 are as far: p = 1/4, whatever the 6 rows.
    ids = [("a",), ("a", "b"), ("c",), ("c",), ("e",), ("e",)]
    found = paired_test([0] * 6, [1] * 6, ids)
    assert (found.method, found.only_a, found.only_b, found.groups) == (SIGN_FLIP, 0, 6, 3)
    assert found.p == pytest.approx(1 / 4, abs=0.02)
    assert paired_test([0] * 6, [1] * 6, None).p == pytest.approx(2 / 64)
    assert paired_test([0.5] * 6, [0.5] * 6, None).p == 1.0


def test_groups_are_joined_through_other_rows():
    # Rows 0 and 2 share nothing, but both share with row 1. Rows 3 and 4 have no image of others.
    groups = groups_of([("a",), ("a", "b"), ("b",), ("c",), ()], 5)
    assert len({*groups[:3]}) == 1 and len({*groups}) == 3


def test_the_sign_flip_test_is_scipys():
    rng = np.random.default_rng(3)
    a, b = rng.normal(size=12), rng.normal(0.5, size=12)
    exact = permutation_test(
        (b - a,), lambda x, axis: x.mean(axis=axis), permutation_type="samples", n_resamples=np.inf, vectorized=True
    ).pvalue
    # 10,000 flips: standard error at most 0.005.
    assert paired_test(a, b, None).p == pytest.approx(exact, abs=0.02)
    assert paired_test(a, b, None) == paired_test(a, b, None), "the flips are the same each time"


def test_sums_in_blocks_are_those_of_one_block(monkeypatch):
    values = np.random.default_rng(0).normal(size=(2, 30))
    whole, ends = paired_test(*values, None).p, bootstrap_interval(*values, None)
    monkeypatch.setattr(significance, "BLOCK", 30 * 128)
    assert paired_test(*values, None).p == pytest.approx(whole, abs=0.02)
    assert bootstrap_interval(*values, None) == pytest.approx(ends, abs=0.05)


def test_the_bootstrap_has_the_spread_of_the_mean():
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 400))
    low, high = bootstrap_interval(a, b, None) or (math.nan, math.nan)
    half = 1.96 * (b - a).std() / 20
    assert (low, high) == pytest.approx(((b - a).mean() - half, (b - a).mean() + half), abs=0.1 * half)
    # Each row twice: as much as one of them says. Rows of two images that they share with nobody: plain rows.
    twice = [(i // 2,) for i in range(800)]
    assert bootstrap_interval(np.repeat(a, 2), np.repeat(b, 2), twice) == pytest.approx((low, high), abs=0.1 * half)
    pairs = [(f"{i // 2}-left", f"{i // 2}-right") for i in range(800)]
    assert bootstrap_interval(np.repeat(a, 2), np.repeat(b, 2), pairs) == pytest.approx((low, high), abs=0.1 * half)
    assert bootstrap_interval([0.0] * 9, [1.0] * 9, None) is None


def test_the_bootstrap_of_rows_of_several_images_is_wider():
    rng = np.random.default_rng(6)
    effect = rng.normal(size=30)
    pairs = [tuple(int(i) for i in rng.choice(30, 2, replace=False)) for _ in range(200)]
    b = np.array([effect[i] + effect[j] for i, j in pairs])
    wide, narrow = bootstrap_interval(np.zeros(200), b, pairs), bootstrap_interval(np.zeros(200), b, None)
    assert wide and narrow and wide[1] - wide[0] > 1.5 * (narrow[1] - narrow[0])


@cache
def slow_p(only_a: int, only_b: int) -> float:
    return 1.0 if only_a + only_b == 0 else binomtest(only_a, only_a + only_b, 0.5).pvalue


def simulated_power(rows: int, difference: float, discordant: float, worlds: int) -> float:
    """Rows one by one: only B right, only A right, or both alike; then the test."""
    rng = np.random.default_rng(rows)
    chances = [(discordant + difference) / 2, (discordant - difference) / 2, 1 - discordant]
    counts = rng.multinomial(rows, chances, size=worlds)
    return float(np.mean([slow_p(int(a), int(b)) <= 0.05 for b, a, _ in counts]))


@pytest.mark.parametrize(
    ("rows", "difference", "discordant"), [(40, 0.2, 0.4), (150, 0.1, 0.2), (60, -0.3, 0.3), (200, 0.0, 0.3)]
)
def test_the_power_is_that_of_a_slow_simulation(rows: int, difference: float, discordant: float):
    # 4,000 worlds: standard error at most 0.008.
    assert exact_power(rows, difference, discordant) == pytest.approx(
        simulated_power(rows, difference, discordant, 4000), abs=0.03
    )


def test_the_power_by_hand():
    # All of 6 rows tell, B has each right with chance 0.9: only 6 of 6 and 0 of 6 reach p = 2/64.
    assert exact_power(6, 0.8, 1.0) == pytest.approx(0.9**6 + 0.1**6, abs=1e-12)
    assert exact_power(5, 0.8, 1.0) == 0.0, "five of five is p = 2/32: never below 0.05"
    assert exact_power(100, 0.0, 0.0) == 0.0
    with pytest.raises(ValueError, match="cannot come from"):
        exact_power(10, 0.2, 0.1)


@pytest.mark.parametrize(("difference", "discordant"), [(0.1, 0.2), (0.2, 0.5)])
def test_the_rows_needed_have_the_power_by_simulation(difference: float, discordant: float):
    rows = rows_needed(difference, discordant)
    assert rows is not None
    assert simulated_power(rows, difference, discordant, 4000) == pytest.approx(0.8, abs=0.03)
    # Connor 1987, the normal approximation: a little less than the exact test needs.
    connor = (1.96 * math.sqrt(discordant) + 0.8416 * math.sqrt(discordant - difference**2)) ** 2 / difference**2
    assert connor < rows < 1.15 * connor


def test_rows_that_say_the_same_twice_are_needed_twice():
    rng = np.random.default_rng(8)
    a = (rng.random(600) < 0.5).astype(float)
    b = np.where(rng.random(600) < 0.3, (rng.random(600) < 0.6).astype(float), a)
    once, ids = power_of(a, b, None), [(i // 2,) for i in range(1200)]
    twice = power_of(np.repeat(a, 2), np.repeat(b, 2), ids)
    assert once and twice and once["design_effect"] == 1.0
    assert (
        twice["design_effect"] == pytest.approx(2.0, rel=0.01) == design_effect(np.repeat(a, 2), np.repeat(b, 2), ids)
    )
    assert twice["rows"] == pytest.approx(2 * once["rows"], rel=0.01)
    assert once["discordant"] == twice["discordant"] == (a != b).mean()
    assert once["rows"] == rows_needed(0.02, float((a != b).mean()))


def test_models_that_never_disagree_need_rows_that_do():
    # Nothing tells A from B here; at least 2 of 100 rows must, if B is better by 2 points.
    assert rows_needed(0.02, 0.0) == rows_needed(0.02, 0.02)
    assert power_of([], [], None) is None
    assert rows_needed(1e-9, 0.5) is None


def test_the_rows_needed_for_graded_values():
    # (1.96 + 0.8416)^2 * 0.04 / 0.02^2 = 784.9.
    assert rows_needed_for_mean(0.02, 0.04) == 785
    assert rows_needed_for_mean(0.02, 0.04, 2.0) == 1570 and rows_needed_for_mean(0.02, 0.0) is None
    found = power_of([0.2, 0.4, 0.6], [0.4, 0.4, 0.4], None, width=2.0)
    # Differences 0.2, 0, -0.2: variance 0.04; 2% of a range of 2 is 0.04.
    assert found is not None and found["rows"] == 197 and found["discordant"] is None
    # By simulation: normal differences, z test.
    rng = np.random.default_rng(1)
    means = rng.normal(0.02, 0.2, (2000, 785)).mean(1)
    assert np.mean(np.abs(means) > 1.96 * 0.2 / math.sqrt(785)) == pytest.approx(0.8, abs=0.03)


def test_holm_by_hand():
    # Sorted 0.01, 0.03, 0.04: times 3, 2, 1: 0.03, 0.06, 0.04 -> never below an earlier one.
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == [] and holm([0.02]) == [0.02]


@settings(max_examples=100)
@given(st.lists(st.floats(0.0001, 1), min_size=1, max_size=8))
def test_holm_is_at_least_the_p_value_and_the_false_discovery_rate_and_at_most_bonferroni(p_values):
    corrected = holm(p_values)
    fdr = false_discovery_control(p_values)
    for p, h, b in zip(p_values, corrected, fdr, strict=True):
        assert p <= h <= min(1.0, len(p_values) * p) + 1e-12 and h >= b - 1e-12


def test_holm_keeps_the_chance_of_any_false_finding():
    rng = np.random.default_rng(4)
    worlds = rng.random((2000, 6))
    assert np.mean([min(holm(list(p))) <= 0.05 for p in worlds]) == pytest.approx(0.05, abs=0.02)
    assert np.mean(worlds.min(1) <= 0.05) > 0.2
