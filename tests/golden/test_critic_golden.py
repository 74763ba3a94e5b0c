"""PPO's critic by hand, and against the published formulas one number at a time: advantages, targets, loss."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tinyworld import near
from torch import Tensor

from vlmrl.algo.advantages import (
    CRITIC_SCALES,
    SCALES,
    ScoredGroup,
    batch_advantages,
    explained_variance,
    value_targets,
)
from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.algo.credit import scored_group, step_advantages, untrained_values
from vlmrl.algo.losses import Denominator, aggregate, clipped_value_loss
from vlmrl.model.packing import TokenStats
from vlmrl.train.update import PolicyGradient, TokenData
from vlmrl.types import Score

PPO = ALGORITHMS["ppo"]


def judged(scores: list[float], values: list[list[float]], **more) -> ScoredGroup:
    arrays = [np.array(v) for v in values]
    return ScoredGroup(scores, [True] * len(scores), [len(v) for v in values], values=arrays, **more)


TWO = judged([1.0, 0.0], [[0.5, 0.25], [0.5]])


def test_the_advantages_and_targets_of_a_group():
    # score 1 at the second token; values 0.5, 0.25: deltas 0.25 - 0.5 = -0.25, 1 - 0.25 = 0.75; lambda 0.5:
    # A = -0.25 + 0.5 x 0.75 = 0.125, 0.75. One token, score 0, value 0.5: -0.5
    near(batch_advantages([TWO], "gae", lam=0.5)[0], [[0.125, 0.75], [-0.5]])
    # targets = advantage + value
    near(value_targets(TWO, gamma=1.0, lam=0.5), [[0.625, 1.0], [0.0]])
    # gamma 0.5: deltas 0.125 - 0.5 = -0.375, 0.75; A = -0.375 + 0.25 x 0.75 = -0.1875
    near(batch_advantages([TWO], "gae", gamma=0.5, lam=0.5)[0], [[-0.1875, 0.75], [-0.5]])
    # lambda 0: one step; lambda 1: the score minus the value
    near(batch_advantages([TWO], "gae", lam=0.0)[0], [[-0.25, 0.75], [-0.5]])
    near(batch_advantages([TWO], "gae", lam=1.0)[0], [[0.5, 0.75], [-0.5]])


def test_the_kl_in_the_reward_is_a_cost_of_its_token():
    # penalties 0.1, 0.2: rewards -0.1, 0.8: deltas -0.1 + 0.25 - 0.5 = -0.35, 0.55; A = -0.35 + 0.5 x 0.55 = -0.075
    made = judged([1.0], [[0.5, 0.25]], penalties=[np.array([0.1, 0.2])])
    near(batch_advantages([made], "gae", lam=0.5)[0], [[-0.075, 0.55]])
    near(value_targets(made, gamma=1.0, lam=0.5), [[0.425, 0.8]])


def test_ppo_whitens_over_all_tokens_of_the_batch():
    # lambda 0.5: 0.125, 0.75, -0.5: mean 0.125, squares 0 + 0.390625 + 0.390625 over 3 - 1
    scale = math.sqrt(0.390625 + 1e-8)
    near(step_advantages([TWO], resolve("ppo", gae_lambda=0.5))[0], [[0.0, 0.625 / scale], [-0.625 / scale]])
    # as the row has it: lambda 0.95: -0.25 + 0.95 x 0.75 = 0.4625
    mean = (0.4625 + 0.75 - 0.5) / 3
    scale = math.sqrt(sum((x - mean) ** 2 for x in (0.4625, 0.75, -0.5)) / 2 + 1e-8)
    near(step_advantages([TWO], PPO)[0], [[(0.4625 - mean) / scale, (0.75 - mean) / scale], [(-0.5 - mean) / scale]])


def test_equal_scores_and_single_samples_are_judged_by_the_critic():
    equal = judged([1.0, 1.0], [[0.5], [0.75]])
    near(batch_advantages([equal], "gae")[0], [[0.5], [0.25]])
    near(batch_advantages([judged([1.0], [[0.25]])], "gae")[0], [[0.75]])
    # a critic that is right leaves nothing
    near(batch_advantages([judged([1.0], [[1.0, 1.0]])], "gae")[0], [[0.0, 0.0]])


def test_a_sample_that_is_not_included_has_neither_advantage_nor_target_and_no_part_in_the_batch():
    more = replace(
        TWO,
        scores=[1.0, math.nan, 0.0],
        included=[True, False, True],
        lengths=[2, 3, 1],
        values=[TWO.values[0], np.zeros(0), TWO.values[1]],
    )
    plain = step_advantages([TWO], PPO)[0]
    near(step_advantages([more], PPO)[0], [plain[0], [0.0], plain[1]])
    near(value_targets(more, gamma=1.0, lam=0.5), [[0.625, 1.0], [], [0.0]])


def test_what_is_cut_is_out_under_mask_and_drop_alike():
    scores, more = [Score(1.0, {}), Score(0.0, {})], {"max_tokens": 8}
    for truncated, expected in (("keep", [True, True]), ("mask", [True, False]), ("drop", [True, False])):
        assert scored_group(scores, ["stop", "length"], [1, 1], replace(PPO, truncated=truncated), **more).included == (
            expected
        )


def test_scores_and_values_become_a_group_by_the_rules_of_the_row():
    values = [np.array([0.5, 0.25]), np.array([0.5])]
    row = resolve("ppo", truncated_score=-1.0)
    made = scored_group([Score(1.0, {}), Score(9.0, {})], ["stop", "length"], [2, 1], row, max_tokens=8, values=values)
    near(value_targets(made, gamma=1.0, lam=0.5), [[0.625, 1.0], [-1.0]])


def test_a_critic_that_has_learned_nothing_says_zero():
    # lambda 0.95: 0.95 x 1, 1; score 0: 0
    values = untrained_values([2, 1])
    near(batch_advantages([replace(TWO, values=values)], "gae", lam=0.95)[0], [[0.95, 1.0], [0.0]])


def test_without_values_or_with_a_scale_of_scores_there_is_no_advantage():
    with pytest.raises(ValueError, match="value before every token"):
        batch_advantages([replace(TWO, values=())], "gae")
    for scale in set(SCALES) - set(CRITIC_SCALES):
        with pytest.raises(ValueError, match="not for a critic"):
            batch_advantages([TWO], "gae", scale=scale)


def one_by_one(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "gradient"),
    [
        (0.1, 0.0, 1.0, 0.405, -0.9),  # within the range: 0.9^2 / 2, value - target
        (0.5, 0.0, 1.0, 0.32, 0.0),  # too far towards the target: limited to 0.2: 0.8^2 / 2, no gradient
        (-0.5, 0.0, -1.0, 0.32, 0.0),  # the same downwards
        (-0.5, 0.0, 1.0, 1.125, -1.5),  # too far the other way: the plain 1.5^2 / 2 is larger, and pulls back
        (1.5, 0.0, 0.3, 0.72, 1.2),  # past the target: plain 1.2^2 / 2 = 0.72 > 0.1^2 / 2
        (0.7, 0.6, 1.0, 0.045, -0.3),  # the range is around the old value, not around 0
    ],
)
def test_the_clipped_value_loss(value, old, target, loss, gradient):
    said = one_by_one(value).requires_grad_()
    found = clipped_value_loss(said, one_by_one(old), one_by_one(target), clip_range=0.2)
    assert found.item() == pytest.approx(loss, rel=1e-12)
    found.sum().backward()
    assert said.grad.item() == pytest.approx(gradient, abs=1e-12)


def test_the_value_loss_is_added_per_token_with_its_weight_and_one_denominator():
    # responses of 2 and 1 tokens, no advantage: losses 0.405, 0.32, 1.125, times 0.5
    value = one_by_one(0.1, 0.5, -0.5).requires_grad_()
    logp, zero = one_by_one(-1, -2, -3).requires_grad_(), torch.zeros(3, dtype=torch.float64)
    response = torch.tensor([0, 0, 1])
    data = TokenData(zero, zero, None, None, response, response, torch.tensor([2, 2, 1]), None, zero, zero + 1)
    objective = PolicyGradient(resolve("ppo", value_coef=0.5))
    loss, shown = objective.loss(TokenStats(logp, zero, value), data)
    assert loss.tolist() == pytest.approx([0.2025, 0.16, 0.5625])
    assert shown["loss/value"].tolist() == pytest.approx([0.405, 0.32, 1.125])
    assert not shown["loss/value"].requires_grad
    assert objective.aggregation == "token_mean"
    total = aggregate(loss, data.response_tokens, Denominator.of("token_mean", [2, 1], 8))
    assert total.item() == pytest.approx(0.925 / 3)
    total.backward()
    assert value.grad.tolist() == pytest.approx([0.5 * -0.9 / 3, 0.0, 0.5 * -1.5 / 3])


def test_a_critic_without_values_or_targets_stops():
    zero = torch.zeros(1)
    data = TokenData(zero, zero, None, None, zero.long(), zero.long(), zero.long() + 1)
    with pytest.raises(AssertionError):
        PolicyGradient(PPO).loss(TokenStats(zero, zero, zero), data)
    with pytest.raises(AssertionError):
        PolicyGradient(PPO).loss(TokenStats(zero, zero), replace(data, old_value=zero, value_target=zero))


def test_explained_variance():
    # residuals 0, 1: variance 0.25, of the targets 1: 0.75; a constant explains nothing, the wrong way round is below 0
    assert explained_variance(np.array([0.0, 1.0]), np.array([0.0, 2.0])) == 0.75
    assert explained_variance(np.array([5.0, 5.0]), np.array([0.0, 2.0])) == 0.0
    assert explained_variance(np.array([2.0, 0.0]), np.array([0.0, 2.0])) == -3.0  # residuals -2, 2: 1 - 4
    assert explained_variance(np.array([1.0, 4.0]), np.array([0.0, 3.0])) == 1.0  # a constant offset is not variance
    assert explained_variance(np.zeros(2), np.ones(2)) is explained_variance(np.zeros(0), np.zeros(0)) is None


def published(rewards: list[list[float]], values: list[list[float]], gamma: float, lam: float):
    """arXiv:1506.02438 eq. 16 as its sum, O(T^2), and arXiv:1909.08593's whitening, in plain Python."""
    advantages = []
    for r, v in zip(rewards, values, strict=True):
        after = [*v[1:], 0.0]
        delta = [r[t] + gamma * after[t] - v[t] for t in range(len(r))]
        advantages.append([sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(r))) for t in range(len(r))])
    targets = [[a + x for a, x in zip(row, v, strict=True)] for row, v in zip(advantages, values, strict=True)]
    flat = [a for row in advantages for a in row]
    mean = sum(flat) / len(flat)
    deviation = math.sqrt(sum((a - mean) ** 2 for a in flat) / max(1, len(flat) - 1) + 1e-8)
    return targets, [[(a - mean) / deviation for a in row] for row in advantages]


@given(data=st.data())
def test_ppo_equals_the_published_formulas_for_any_step(data):
    number = st.integers(-8, 8).map(lambda n: n / 4)
    gamma, lam = data.draw(st.sampled_from([1.0, 0.9])), data.draw(st.sampled_from([0.0, 0.5, 0.95, 1.0]))
    groups, rewards, values = [], [], []
    for _ in range(data.draw(st.integers(1, 3))):
        lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
        rows = [data.draw(st.lists(st.tuples(number, number), min_size=n, max_size=n)) for n in lengths]
        said, costs = ([[t[k] for t in row] for row in rows] for k in (0, 1))
        scores = [data.draw(number) for _ in lengths]
        groups.append(judged(scores, said, penalties=[np.array(c) for c in costs]))
        values += said
        rewards += [
            [-c + (score if t == len(row) - 1 else 0.0) for t, c in enumerate(row)]
            for row, score in zip(costs, scores, strict=True)
        ]
    row = resolve("ppo", gamma=gamma, gae_lambda=lam)
    targets, advantages = published(rewards, values, gamma, lam)
    found = [a for g in step_advantages(groups, row) for a in g]
    for mine, theirs in zip(found, advantages, strict=True):
        # 1e-10: where all advantages are equal the published form is rounding over 1e-4, ours 0
        assert mine.tolist() == pytest.approx(theirs, rel=1e-9, abs=1e-10)
    flat = [t for g in groups for t in value_targets(g, gamma=gamma, lam=lam)]
    for mine, theirs in zip(flat, targets, strict=True):
        assert mine.tolist() == pytest.approx(theirs, rel=1e-9, abs=1e-12)
