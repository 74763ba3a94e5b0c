"""Hand-worked advantages of a whole step: baselines, scales of the batch, token returns; the arithmetic is beside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinyworld import near

from vlmrl.algo.advantages import SCALES, ScoredGroup, batch_advantages, gae, rewards_to_go, visual_weights, whiten
from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.algo.credit import (
    next_kl_coef,
    overlong_penalty,
    passes_filter,
    scored_group,
    shaped_score,
    spread,
    step_advantages,
)
from vlmrl.types import Score


def group(*scores: float, **more) -> ScoredGroup:
    return ScoredGroup(scores, [True] * len(scores), **more)


def numbers(found) -> list[list[float]]:
    """One number a sample."""
    assert all(len(a) == 1 for samples in found for a in samples)
    return [[float(a[0]) for a in samples] for samples in found]


def test_the_length_weighted_baseline():
    # lengths 3, 1: baseline (3 x 1 + 1 x 0) / 4 = 0.75 -> 0.25, -0.75
    near(numbers(batch_advantages([group(1.0, 0.0, lengths=[3, 1])], "length_weighted")), [[0.25, -0.75]])


def test_the_best_of_a_group_gets_what_it_adds_over_the_second():
    near(numbers(batch_advantages([group(0.2, 1.0, 0.6)], "best_of_group")), [[0.0, 0.4, 0.0]])
    # two best: neither adds anything
    near(numbers(batch_advantages([group(1.0, 0.0, 1.0)], "best_of_group")), [[0.0, 0.0, 0.0]])
    # as the row has it, over the std of 0.2, 1, 0.6: deviations -0.4, 0.4, 0: sqrt(0.32 / 2) = 0.4 -> 0.4 / 0.400001
    near(numbers(step_advantages([group(0.2, 1.0, 0.6)], ALGORITHMS["pass_at_k"])), [[0.0, 0.4 / 0.400001, 0.0]])


def energies(*lists: list[float]) -> list[np.ndarray]:
    return [np.array(x) for x in lists]


def test_the_optimal_token_baseline():
    # first tokens: weights 0.5, 1.5, 2: baseline (0.5 x 1 + 1.5 x 0 + 2 x 0.5) / 4 = 0.375
    # second: paths 0.5 + 0.5 = 1 and 2 + 1 = 3; the second sample has ended: (1 x 1 + 3 x 0.5) / 4 = 0.625
    # third: the third sample alone: 0
    made = group(1.0, 0.0, 0.5, lengths=[2, 1, 3], energies=energies([0.5, 0.5], [1.5], [2.0, 1.0, 9.0]))
    near(batch_advantages([made], "optimal_token")[0], [[0.625, 0.375], [-0.375], [0.125, -0.125, 0.0]])
    (row,) = step_advantages([made], ALGORITHMS["otb"])
    near(row, [[0.625, 0.375], [-0.375], [0.125, -0.125, 0.0]])


def test_the_optimal_token_baseline_takes_the_rewards_from_each_token_on():
    # penalties 0.5, 0.25 of the first sample: returns 1 - 0.75 = 0.25, then 1 - 0.25 = 0.75; the second: 0, 0
    # energies 1 each: weights 1, 1 then 2, 2: baselines 0.125 and 0.375
    made = group(1.0, 0.0, lengths=[2, 2], energies=energies([1.0, 1.0], [1.0, 1.0]),
                 penalties=[np.array([0.5, 0.25]), np.zeros(2)])  # fmt: skip
    near(batch_advantages([made], "optimal_token")[0], [[0.125, 0.375], [-0.125, -0.375]])
    # gamma 0.5: returns 0.5 - 0.5 x 0.25 = ... of the first: t2 = 0.75, t1 = -0.5 + 0.375 = -0.125
    near(batch_advantages([made], "optimal_token", gamma=0.5)[0], [[-0.0625, 0.375], [0.0625, -0.375]])


def test_the_optimal_token_baseline_leaves_out_what_is_not_included_and_needs_energies():
    made = ScoredGroup([1.0, math.nan, 0.0], [True, False, True], [1, 1, 1], energies=energies([1.0], [50.0], [3.0]))
    near(batch_advantages([made], "optimal_token")[0], [[0.75], [0.0], [-0.25]])
    with pytest.raises(ValueError, match="energy"):
        batch_advantages([group(1.0, 0.0)], "optimal_token")
    # a sample without tokens, and tokens of which all samples were certain: 0, not NaN
    made = group(1.0, 0.0, lengths=[0, 2], energies=energies([], [0.0, 2.0]))
    near(batch_advantages([made], "optimal_token")[0], [[0.0], [0.0, 0.0]])


@given(data=st.data())
def test_the_optimal_token_baseline_of_a_position_is_a_weighted_mean(data):
    """So the advantages, times the energies of the paths, add up to 0 at each position; and equal scores give 0."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=4))
    numbers_ = st.floats(0.01, 2.0)
    own = [np.array(data.draw(st.lists(numbers_, min_size=n, max_size=n))) for n in sizes]
    scores = data.draw(st.lists(st.sampled_from([0.0, 0.1, 1.0]), min_size=len(sizes), max_size=len(sizes)))
    found = batch_advantages([group(*scores, lengths=sizes, energies=own)], "optimal_token")[0]
    if len(set(scores)) == 1:
        assert all(not a.any() for a in found)
        return
    for t in range(max(sizes)):
        reach = [i for i, n in enumerate(sizes) if n > t]
        assert sum(found[i][t] * own[i][: t + 1].sum() for i in reach) == pytest.approx(0.0, abs=1e-12)
        for i in reach:
            assert found[i][t] - found[reach[0]][t] == pytest.approx(scores[i] - scores[reach[0]], abs=1e-12)


def test_the_greedy_baseline():
    near(numbers(batch_advantages([group(1.0, 0.0, greedy=0.25)], "greedy")), [[0.75, -0.25]])
    # one sample a prompt is enough
    near(numbers(batch_advantages([group(1.0, greedy=0.25)], "greedy")), [[0.75]])
    with pytest.raises(ValueError, match="greedy"):
        batch_advantages([group(1.0, 0.0)], "greedy")


def test_without_a_baseline_the_advantage_is_the_score():
    near(numbers(batch_advantages([group(1.0, 0.25), group(3.0)], "none")), [[1.0, 0.25], [3.0]])


def test_gdpo_normalises_each_part_then_the_sum_over_the_batch():
    # group 1: part a = 1, 0 -> +-0.5 / (sqrt(0.5) + 1e-6) = +-h; part b = 0, 0 -> 0. Weighted 2 and 1: +-2 h
    # group 2: part a = 0, 0 -> 0; part b = 4, 2 -> +-1 / (sqrt(2) + 1e-6) = +-g: weighted +-g
    h, g = 0.5 / (math.sqrt(0.5) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    first = group(2.0, 0.0, parts=[[1, 0], [0, 0]], weights=[2, 1])
    second = group(4.0, 2.0, parts=[[0, 4], [0, 2]], weights=[2, 1])
    near(numbers(batch_advantages([first], "part_by_part", scale="none")), [[2 * h, -2 * h]])
    # the batch: mean 0, unbiased std sqrt((2 (2h)^2 + 2 g^2) / 3)
    std = math.sqrt((2 * (2 * h) ** 2 + 2 * g**2) / 3) + 1e-6
    found = numbers(step_advantages([first, second], ALGORITHMS["gdpo"]))
    near(found, [[2 * h / std, -2 * h / std], [g / std, -g / std]])
    # numbers: h = 0.7071058, 2 h = 1.4142116, g = 0.7071063; std = sqrt((4 + 1) / 3) = 1.29099
    assert found[0][0] == pytest.approx(1.4142 / 1.29099, rel=1e-4)


def test_gdpo_a_part_that_does_not_apply_leaves_its_weight_to_the_others():
    # sample 3 has no part b: its a counts (1 + 1) / 1 = 2-fold. a = 1, 0, 0.5: mean 0.5, std 0.5 -> 1, -1, 0 (nearly)
    # b = 0, 1 over samples 1 and 2: -h, h with h = 0.5 / (sqrt(0.5) + 1e-6)
    one, h = 0.5 / 0.500001, 0.5 / (math.sqrt(0.5) + 1e-6)
    parts = [[1, 0], [0, 1], [0.5, None]]
    found = numbers(batch_advantages([group(1, 1, 1, parts=parts, weights=[1, 1])], "part_by_part", scale="none"))
    near(found, [[one - h, h - one, 0.0]])
    parts = [[1, 0], [0, 1], [2.0, None]]  # a: mean 1, std 1 -> 0, -1, 1: sample 3 gets 2 x 1
    found = numbers(batch_advantages([group(1, 1, 1, parts=parts, weights=[1, 1])], "part_by_part", scale="none"))
    near(found, [[-h, h - 1 / 1.000001, 2 / 1.000001]])


def test_gdpo_centres_over_the_batch():
    # the last example: -h, h - 1, 2 (nearly): mean 1 / 3, not 0, since the third counts double
    h, one = 0.5 / (math.sqrt(0.5) + 1e-6), 1 / 1.000001
    raw = [-h, h - one, 2 * one]
    std = math.sqrt(sum((x - one / 3) ** 2 for x in raw) / 2) + 1e-6
    made = group(1, 1, 2, parts=[[1, 0], [0, 1], [2.0, None]], weights=[1, 1])
    near(numbers(step_advantages([made], ALGORITHMS["gdpo"])), [[(x - one / 3) / std for x in raw]])


def test_gdpo_is_dead_when_every_part_is_equal_and_not_when_only_the_sum_is():
    dead = group(1.0, 1.0, parts=[[1, 0], [1, 0]], weights=[1, 1])
    live = group(1.0, 1.0, 1.0, parts=[[1, 0], [0, 1], [0, 1]], weights=[1, 1])
    other = group(3.0, 0.0, parts=[[3, 0], [0, 0]], weights=[1, 1])
    found = numbers(batch_advantages([dead, live, other], "part_by_part"))
    assert found[0] == [0.0, 0.0]
    # both parts 1, 0, 0 and 0, 1, 1: normalised they cancel but for the last bit; with unequal weights they do not
    weighted = replace(live, weights=[2, 1])
    assert any(abs(a) > 0.1 for a in numbers(batch_advantages([weighted], "part_by_part"))[0])


def test_whitening_counts_tokens():
    # scores 1 (1 token) and 0 (3 tokens): mean 0.25, variance (0.75^2 + 3 x 0.25^2) / (4 - 1) = 0.75 / 3 = 0.25
    # -> 0.75 / 0.5 = 1.5, -0.25 / 0.5 = -0.5 (1e-8 added to the variance)
    scale = math.sqrt(0.25 + 1e-8)
    made = group(1.0, 0.0, lengths=[1, 3])
    near(numbers(step_advantages([made], ALGORITHMS["reinforce++"])), [[0.75 / scale, -0.25 / scale]])
    # MAYE adds the mean back
    expected = [[0.75 / scale + 0.25, -0.25 / scale + 0.25]]
    near(numbers(step_advantages([made], ALGORITHMS["maye"])), expected)


def test_whitening_of_per_token_values_is_that_of_the_plain_formula():
    values = [np.array([1.0, 2.0]), np.array([3.0])]
    # 1, 2, 3 (the last for 2 tokens): mean (1 + 2 + 3 + 3) / 4 = 2.25, variance (1.5625 + 0.0625 + 2 x 0.5625) / 3
    variance = 2.75 / 3 + 1e-8
    found = whiten(values, [2, 2], keep_mean=False)
    near(found, [[-1.25 / variance**0.5, -0.25 / variance**0.5], [0.75 / variance**0.5]])
    assert [a.tolist() for a in whiten([np.array([0.1])] * 3, [7, 5, 3], keep_mean=True)] == [[0.0]] * 3
    assert whiten([np.array([5.0])], [1], keep_mean=True)[0].tolist() == [0.0]
    assert whiten([], [], keep_mean=False) == []


def test_the_baseline_form_of_reinforce_plus_plus():
    # groups 1, 0 and 3, 1 with 1, 1, 2, 2 tokens: minus group mean 0.5, -0.5, 1, -1: mean 0, sum of squares
    # 0.25 + 0.25 + 2 + 2 = 4.5 over 6 - 1 = 5: 0.9
    scale = math.sqrt(0.9 + 1e-8)
    found = numbers(step_advantages([group(1.0, 0.0, lengths=[1, 1]), group(3.0, 1.0, lengths=[2, 2])],
                                    ALGORITHMS["reinforce++-baseline"]))  # fmt: skip
    near(found, [[0.5 / scale, -0.5 / scale], [1 / scale, -1 / scale]])


def test_a_dead_group_counts_in_the_batch_and_gets_nothing():
    # 1, 1 (dead) and 2, 0, one token each: mean 1, variance (0 + 0 + 1 + 1) / 3
    scale = math.sqrt(2 / 3 + 1e-8)
    found = numbers(step_advantages([group(1.0, 1.0), group(2.0, 0.0)], ALGORITHMS["maye"]))
    near(found, [[0.0, 0.0], [1 / scale + 1, -1 / scale + 1]])
    assert found[0] == [0.0, 0.0]


def test_the_scales_batch_group_and_none():
    groups = [group(1.0, 0.0), group(5.0, 2.0)]
    near(numbers(batch_advantages(groups, "group_mean", scale="none")), [[0.5, -0.5], [1.5, -1.5]])
    # 1, 0, 5, 2: mean 2, squares 1 + 4 + 9 + 0 = 14 over 3
    std = math.sqrt(14 / 3) + 1e-6
    near(
        numbers(batch_advantages(groups, "group_mean", scale="batch")),
        [[0.5 / std, -0.5 / std], [1.5 / std, -1.5 / std]],
    )
    # each group's: sqrt(0.5), sqrt(4.5)
    a, b = math.sqrt(0.5) + 1e-6, math.sqrt(4.5) + 1e-6
    near(numbers(batch_advantages(groups, "group_mean", scale="group")), [[0.5 / a, -0.5 / a], [1.5 / b, -1.5 / b]])
    near(numbers(batch_advantages(groups, "group_mean_std")), [[0.5 / a, -0.5 / a], [1.5 / b, -1.5 / b]])
    with pytest.raises(ValueError, match="std"):
        batch_advantages(groups, "group_mean", scale="std")


def test_gpg_makes_up_for_dead_samples():
    # 2 of 6 samples are alive: alpha = 6 / 2 = 3 -> 3 x +-0.5
    groups = [group(1.0, 1.0, 1.0, 1.0), group(1.0, 0.0)]
    near(numbers(step_advantages(groups, ALGORITHMS["gpg"])), [[0.0] * 4, [1.5, -1.5]])


def test_samples_that_are_not_included_are_in_no_statistic_of_the_batch():
    nan = float("nan")
    for scale in SCALES:
        plain = numbers(batch_advantages([group(1.0, 0.0), group(5.0, 2.0, 2.0)], "group_mean", scale=scale))
        more = ScoredGroup([5.0, nan, 2.0, 2.0], [True, False, True, True], lengths=[1, 9, 1, 1])
        none = ScoredGroup([nan], [False])
        found = numbers(batch_advantages([group(1.0, 0.0), none, more], "group_mean", scale=scale))
        assert found[0] == plain[0] and found[1] == [0.0] and [found[2][i] for i in (0, 2, 3)] == plain[1]
        assert found[2][1] == 0.0


def test_rewards_to_go():
    # 0.5 x (0.5 x 1 + 0) + 0 = 0.25
    assert rewards_to_go(np.array([0.0, 0.0, 1.0]), 0.5).tolist() == [0.25, 0.5, 1.0]
    assert rewards_to_go(np.array([1.0, -2.0, 3.0]), 1.0).tolist() == [2.0, 1.0, 3.0]


def test_generalised_advantages():
    # deltas: 0 + 0.25 - 0.5 = -0.25;  1 + 0 - 0.25 = 0.75.  A_1 = 0.75, A_0 = -0.25 + 1 x 0.5 x 0.75 = 0.125
    advantages, targets = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), gamma=1.0, lam=0.5)
    assert advantages.tolist() == [0.125, 0.75] and targets.tolist() == [0.625, 1.0]
    # gamma 0.5, lam 1: deltas 0 + 0.125 - 0.5 = -0.375, 0.75; A_0 = -0.375 + 0.5 x 0.75 = 0 = 0.5 x 1 - 0.5
    advantages, _ = gae(np.array([0.0, 1.0]), np.array([0.5, 0.25]), gamma=0.5, lam=1.0)
    assert advantages.tolist() == [0.0, 0.75]
    with pytest.raises(ValueError, match="values"):
        gae(np.zeros(2), np.zeros(3), gamma=1.0, lam=1.0)


def test_the_kl_in_the_reward_makes_token_advantages():
    # score 1 at the end, penalties 0.1, 0.2: rewards -0.1, 0.8 -> returns 0.7, 0.8;  score 0: -0.5 on its only token
    made = group(1.0, 0.0, lengths=[2, 1], penalties=[np.array([0.1, 0.2]), np.array([0.5])])
    found = batch_advantages([made], "none")[0]
    near(found, [[0.7, 0.8], [-0.5]])
    # a group baseline sees the totals 0.7 and -0.5: mean 0.1
    near(numbers(batch_advantages([made], "group_mean")), [[0.6, -0.6]])
    # whitened over the three tokens 0.7, 0.8, -0.5: mean 1 / 3, variance (0.134444 + 0.217778 + 0.694444) / 2
    scale, third = math.sqrt(1.57 / 3 + 1e-8), 1 / 3
    near(
        batch_advantages([made], "none", scale="tokens")[0],
        [[(0.7 - third) / scale, (0.8 - third) / scale], [(-0.5 - third) / scale]],
    )
    near(batch_advantages([replace(made, greedy=0.5)], "greedy")[0], [[0.2, 0.3], [-1.0]])


def test_the_discount_makes_token_advantages():
    found = batch_advantages([group(1.0, 0.0, lengths=[3, 1])], "none", gamma=0.5)[0]
    near(found, [[0.25, 0.5, 1.0], [0.0]])
    near(step_advantages([group(1.0, 0.0, lengths=[3, 1])], resolve("reinforce", gamma=0.5))[0], found)
    # for a group baseline the whole score counts, whatever gamma
    near(numbers(batch_advantages([group(1.0, 0.0, lengths=[3, 1])], "group_mean", gamma=0.5)), [[0.5, -0.5]])


def test_soft_overlong_punishment():
    # limit 100, buffer 20: 80 -> 0; 85 -> -5 / 20; 100 -> -1; times the weight 0.5
    costs = [overlong_penalty(n, max_tokens=100, buffer=20, penalty=0.5) for n in (1, 80, 85, 100, 120)]
    assert costs == [0.0, 0.0, -0.125, -0.5, -0.5]
    assert overlong_penalty(100, max_tokens=100, buffer=0, penalty=1.0) == 0.0
    assert shaped_score(1.0, num_tokens=90, was_cut=False, max_tokens=100, overlong_tokens=20) == 0.5
    assert shaped_score(1.0, num_tokens=100, was_cut=True, max_tokens=100, truncated_score=-0.1) == -0.1
    assert shaped_score(1.0, num_tokens=100, was_cut=False, max_tokens=100, truncated_score=-0.1) == 1.0


def test_the_filter_looks_at_the_spread_and_not_at_the_mean():
    assert spread([0.6, 0.6, 0.6]) == 0.0 and spread([1.0, 0.25, 0.5]) == 0.75 and spread([3.0]) == spread([]) == 0.0
    dapo = resolve("dapo", min_spread=0.1)
    middle, close, wide = group(0.6, 0.6), group(0.6, 0.65), group(0.0, 1.0)
    assert [passes_filter(g, dapo) for g in (middle, close, wide)] == [False, False, True]
    assert all(passes_filter(g, ALGORITHMS["grpo"]) for g in (middle, close, wide))
    assert not passes_filter(ScoredGroup([1.0, 0.0], [True, False]), dapo)
    assert not passes_filter(group(0.5, 0.75), replace(dapo, min_spread=0.25))  # not above it
    # what is refused gets nothing and is in no statistic of the batch
    batched = replace(dapo, advantage="group_mean", scale="batch")
    found = numbers(step_advantages([close, wide], batched))
    std = math.sqrt(0.5) + 1e-6
    near(found, [[0.0, 0.0], [-0.5 / std, 0.5 / std]])


def test_the_adaptive_kl_coefficient():
    # kl twice its target: the error 1 is limited to 0.2: 0.1 x (1 + 0.2 x 100 / 1000) = 0.102
    more = {"target": 0.1, "horizon": 1000, "samples": 100}
    assert next_kl_coef(0.1, 0.2, **more) == pytest.approx(0.102, rel=1e-12)
    assert next_kl_coef(0.1, 0.0, **more) == pytest.approx(0.098, rel=1e-12)
    # 10% above: 0.1 x (1 + 0.1 x 0.1) = 0.101
    assert next_kl_coef(0.1, 0.11, **more) == pytest.approx(0.101, rel=1e-12)


def test_scores_become_groups_by_the_rules_of_the_row():
    scores = [
        Score(1.0, {"a": 1.0, "b": None}),
        Score(0.5, {"a": 0.0, "b": 1.0}),
        Score(math.nan, {}, error="x"),
        Score(0.25, {"a": 0.5, "b": 0.0}),
    ]
    finishes = ["stop", "length", "stop", "stop"]
    maye = scored_group(scores, finishes, [3, 8, 2, 4], ALGORITHMS["maye"], max_tokens=8, weights={"b": 2.0, "z": 1.0})
    assert maye.scores[:2] == [1.0, -0.1] and maye.included == [True, True, False, True]
    assert maye.parts == [[None], [1.0], [None], [0.0]] and maye.weights == [2.0]
    dropped = scored_group(scores, finishes, [3, 8, 2, 4], resolve("grpo", truncated="drop"), max_tokens=8)
    assert dropped.included == [True, False, False, True] and dropped.weights == [1.0, 1.0]
    assert scored_group(
        [Score(1.0, {"reward": 1.0, "x": 0.0})], ["stop"], [1], ALGORITHMS["gdpo"], max_tokens=8
    ).weights == [1.0]
    no_greedy = scored_group(scores, finishes, [3, 8, 2, 4], ALGORITHMS["remax"], max_tokens=8)
    assert no_greedy.included == [False] * 4
    assert numbers(step_advantages([no_greedy], ALGORITHMS["remax"])) == [[0.0] * 4]


def slow_reference(groups: list[tuple[list[float], list[int]]], name: str) -> list[list[float]]:
    """The published formulas of rows with plain scores, one number after the other, in plain Python."""
    everything = [(s, n) for scores, lengths in groups for s, n in zip(scores, lengths, strict=True)]
    alive = [len(set(scores)) > 1 for scores, _ in groups]
    out: list[list[float]] = []
    for scores, lengths in groups:
        n = len(scores)
        mean = sum(scores) / n
        std = math.sqrt(sum((s - mean) ** 2 for s in scores) / (n - 1))
        if name == "rloo":
            out.append([s - (sum(scores) - s) / (n - 1) for s in scores])
        elif name == "opo":
            out.append([s - sum(x * t for x, t in zip(scores, lengths, strict=True)) / sum(lengths) for s in scores])
        elif name == "gpg":
            live = sum(len(g[0]) for g, a in zip(groups, alive, strict=True) if a)
            out.append([(s - mean) * len(everything) / max(1, live) for s in scores])
        elif name == "dr_grpo":
            out.append([s - mean for s in scores])
        elif name in ("reinforce++", "maye", "reinforce++-baseline"):
            out.append([s - mean if name == "reinforce++-baseline" else s for s in scores])
        else:
            out.append([(s - mean) / (std + 1e-6) for s in scores])
    if name in ("reinforce++", "maye", "reinforce++-baseline"):
        tokens = [
            v
            for values, (_, lengths) in zip(out, groups, strict=True)
            for v, t in zip(values, lengths, strict=True)
            for _ in range(t)
        ]
        centre = sum(tokens) / len(tokens)
        variance = sum((v - centre) ** 2 for v in tokens) / (len(tokens) - 1)
        back = centre if name == "maye" else 0.0
        out = [[(v - centre) / math.sqrt(variance + 1e-8) + back for v in values] for values in out]
    return [values if a else [0.0] * len(values) for values, a in zip(out, alive, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "reinforce++", "reinforce++-baseline", "maye", "easyr1"]
)
@given(data=st.data())
def test_rows_equal_the_slow_reference_for_any_scores(name, data):
    score = st.integers(-8, 8).map(lambda n: n / 4)
    groups = []
    for _ in range(data.draw(st.integers(1, 4))):
        n = data.draw(st.integers(2, 5))
        groups.append(
            (
                data.draw(st.lists(score, min_size=n, max_size=n)),
                data.draw(st.lists(st.integers(1, 4), min_size=n, max_size=n)),
            )
        )
    made = [group(*scores, lengths=lengths) for scores, lengths in groups]
    found = numbers(step_advantages(made, ALGORITHMS[name]))
    for got, expected in zip(found, slow_reference(groups, name), strict=True):
        assert got == pytest.approx(expected, rel=1e-7, abs=1e-7)


def test_visual_weights_by_hand():
    options = {"share": 0.2, "weight": 0.5, "temperature": 1.0}
    # one response: its share is 1; ceil(0.2 x 5) = 1 visual token has 0.5 of 5, the four others 0.5 x 5 / 4
    (alone,) = visual_weights([np.array([0.0, 2.0, -1.0, 0.0, 0.0])], **options)
    assert alone.tolist() == pytest.approx([0.625, 2.5, 0.625, 0.625, 0.625])
    # mean gains 0.3 and 0.1 are one standard deviation above and below: shares e / (e + 1/e) = 0.8808 and 0.1192
    first, second = visual_weights([np.array([0.6, -9.0]), np.array([0.1])], **options)
    assert first.tolist() == pytest.approx([2 * 0.880797, 2 * 0.880797], rel=1e-4)  # 2 x 0.8808 x 2 x (0.5, 0.5)
    assert second.tolist() == pytest.approx([2 * 0.119203], rel=1e-4)  # one token alone has the whole weight
    # at a higher temperature the shares are more equal: e^0.5 / (e^0.5 + e^-0.5) = 0.7311
    first, _ = visual_weights([np.array([0.6, -9.0]), np.array([0.1])], **options | {"temperature": 2.0})
    assert first.mean() == pytest.approx(2 * 0.731059, rel=1e-4)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=9), min_size=1, max_size=6), st.floats(0.05, 1.0))
def test_visual_weights_are_one_on_average_over_the_means_of_responses(gains, share):
    weights = visual_weights([np.array(g) for g in gains], share=share, weight=0.7, temperature=1.0)
    assert sum(w.mean() for w in weights) == pytest.approx(len(gains))
    assert all((w >= 0).all() for w in weights)
    if max(map(max, gains)) <= 0:  # nothing to see
        assert all(w == pytest.approx(np.ones(len(w))) for w in weights)
