"""Advantages of a score that is the sum of several rewards, normalised part by part (GDPO): worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.algo.advantages import STD_EPSILON
from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.algo.credit import RewardWeights, scored_group, step_advantages
from vlmrl.types import INAPPLICABLE, Score

GDPO = replace(next(row for row in ALGORITHMS.values() if row.advantage == "part_by_part"), scale="none")


def advantages(parts: list[dict[str, float | None]], weights: list[RewardWeights]) -> list[float]:
    scores = [Score(0.0, p) if p else Score(math.nan, {}, error=INAPPLICABLE) for p in parts]
    group = scored_group(scores, ["stop"] * len(parts), [1] * len(parts), GDPO, max_tokens=8, weights=weights)
    return [float(a[0]) for a in step_advantages([group], GDPO)[0]]


def test_each_part_is_normalised_and_weighted_by_its_reward():
    weights = [RewardWeights("a", 2.0, {"a": 1.0}), RewardWeights("b", 0.5, {})]
    found = advantages([{"a": 1.0, "b.x": 0.0, "b.y": 4.0}, {"a": 0.0, "b.x": 0.0, "b.y": 2.0}], weights)
    # a: mean 0.5, unbiased deviation 1 / sqrt 2: +-0.5 / 0.7071 = +-0.7071, times 2. b.x: equal, 0.
    # b.y: +-1 / sqrt 2 = +-0.7071, times 0.5 (a reward without weights of its own: each of its parts has weight 1).
    assert found == pytest.approx([2.5 * 0.70710678, -2.5 * 0.70710678], abs=1e-5)


def test_a_part_that_does_not_apply_gives_its_weight_to_its_own_reward_alone():
    weights = [RewardWeights("a", 1.0, {"a.x": 0.5, "a.y": 0.5}), RewardWeights("b", 1.0, {"b": 1.0})]
    parts: list[dict[str, float | None]] = [
        {"a.x": 1.0, "a.y": None, "b": 1.0},
        {"a.x": 0.0, "a.y": None, "b": None},
    ]
    # a.x: +-0.7071 with the weight of a.y, 0.5 + 0.5. b: one value alone is normalised to 0, and adds nothing anywhere.
    assert advantages(parts, weights) == pytest.approx([0.70710678, -0.70710678], abs=1e-5)


def test_a_closed_gate_counts_as_zero_and_none_does_not():
    judge = RewardWeights("judge", 1.0, {"judge": 1.0}, "judge.gate")
    parts: list[dict[str, float | None]] = [
        {"judge.gate": 1.0, "judge": 1.0},
        {"judge.gate": 0.0, "judge": None},
        {"judge.gate": 1.0, "judge": None},
    ]
    # 1 and 0 (closed): mean 0.5, deviation 0.7071; the third has no value: its advantage is 0.
    assert advantages(parts, [judge]) == pytest.approx([0.70710678, -0.70710678, 0.0], abs=1e-5)
    # The part of the gate itself has no weight, even in a reward without weights of its own.
    assert judge.among(["judge.gate", "judge"]) == {"judge": 1.0}
    assert RewardWeights("judge", 1.0, {}, "judge.gate").among(["judge.gate", "judge.x"]) == {"judge.x": 1.0}


@given(
    st.integers(1, 3).flatmap(
        lambda p: st.tuples(
            st.lists(st.floats(-2, 2), min_size=p, max_size=p),
            st.lists(
                st.lists(st.none() | st.integers(-3, 3).map(float), min_size=p, max_size=p), min_size=2, max_size=6
            ),
        )
    )
)
def test_the_rule_is_trls_normalize_then_sum(case):
    """TRL: nansum over the functions of weight * (reward - nanmean) / (nanstd + epsilon), within each group."""
    weights, rows = case
    rewards = [RewardWeights(f"f{i}", w, {f"f{i}": 1.0}) for i, w in enumerate(weights)]
    found = advantages([{f"f{i}": v for i, v in enumerate(row)} for row in rows], rewards)
    table = np.array([[math.nan if v is None else v for v in row] for row in rows])
    expected = np.zeros(len(rows))
    for i, weight in enumerate(weights):
        column = table[:, i]
        there = column[~np.isnan(column)]
        if len(there) > 1 and there.std() > 0:
            expected += np.nan_to_num(weight * (column - there.mean()) / (there.std(ddof=1) + STD_EPSILON))
    assert found == pytest.approx(expected.tolist(), abs=1e-9)
