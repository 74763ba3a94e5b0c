"""The result of the sync check: worked by hand. Two real processes: tests/ranks/test_shared_update.py."""

from __future__ import annotations

import math

import pytest

from vlmrl.train.rl import EngineGap, engines_off, gap_metrics


def engines(*gaps: list[float]) -> list[EngineGap]:
    return [EngineGap(tuple(g), (f"row {k}",)) for k, g in enumerate(gaps)]


def test_a_few_wild_tokens_stop_nothing_however_wild():
    wild = [0.01] * 13 + [5.0, 80.0, math.inf]
    assert engines_off(engines(wild, [0.01] * 16), 0.1) == []
    assert engines_off(engines(wild), 0.1) == []


def test_an_engine_that_is_off_does_not_hide_among_those_that_are_not():
    """One of eight: 16 of 128 tokens, which the median over all does not see."""
    good = [[0.01] * 16] * 7
    assert engines_off(engines(*good, [0.5] * 9 + [0.01] * 7), 0.1) == [7]
    assert engines_off(engines([0.5] * 8, *good), 0.1) == [0]


def test_few_tokens_of_one_engine_condemn_nobody_alone():
    assert engines_off(engines([0.01] * 16, [0.5] * 7), 0.1) == []
    assert engines_off(engines([0.01] * 16, []), 0.1) == []


def test_experts_that_rounding_changes_on_every_rank_stop_nothing():
    """Mixture of experts: 7 of 16 tokens of each of 4 ranks took other experts; 28 of 64, and the median is 0.01."""
    ranks = engines(*[[0.01] * 9 + [3.0] * 7] * 4)
    assert engines_off(ranks, 0.1) == []
    assert gap_metrics(ranks)["policy/sync_gap_median"] == 0.01
    # A rank with 9 of 16 is off: with the right weights most tokens agree.
    assert engines_off(engines(*[[0.01] * 9 + [3.0] * 7] * 3, [0.01] * 7 + [3.0] * 9), 0.1) == [3]


def test_when_most_tokens_are_off_all_engines_are():
    # 6 of 10 tokens: median 0.5; the process without prompts is not named
    assert engines_off(engines([0.5] * 3 + [0.01] * 2, [0.5] * 3 + [0.01] * 2, []), 0.1) == [0, 1]
    # 5 of 8: median 0.5; the second process, whose own is 0.01, is not named
    assert engines_off(engines([0.5] * 5, [0.01] * 3), 0.1) == [0]
    # two tokens of four, one of each process: the median is between them, 0.15, and no own one is above
    assert engines_off(engines([0.0, 0.2], [0.1, 0.2]), 0.13) == [1]
    assert engines_off(engines([0.0, 0.26], [0.0, 0.26]), 0.129) == [0, 1]


def test_the_limit_itself_is_allowed_and_nothing_is_no_gap():
    assert engines_off(engines([0.1] * 8), 0.1) == []
    assert engines_off(engines([0.1001] * 8), 0.1) == [0]
    assert engines_off(engines([math.inf] * 8), 1e9) == [0]
    assert engines_off(engines([], []), 0.1) == []
    assert set(gap_metrics(engines([], [])).values()) == {0.0}


def test_metrics_over_all_tokens():
    # 1, 2 | 3, 10: median 2.5, mean 4, largest 10
    assert gap_metrics(engines([1.0, 2.0], [3.0, 10.0])) == {
        "policy/sync_gap_median": pytest.approx(2.5),
        "policy/sync_gap_mean": pytest.approx(4.0),
        "policy/sync_gap_max": 10.0,
    }
