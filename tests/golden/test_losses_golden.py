"""Hand-worked losses, ratios, KL, aggregation and learning rates. The arithmetic is beside each number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.algo.choices import AGGREGATIONS
from vlmrl.algo.losses import (
    Denominator,
    aggregate,
    clipped_share,
    clipped_surrogate,
    cross_entropy,
    global_mean,
    k3,
    log_ratio,
)
from vlmrl.model.packing import TokenStats
from vlmrl.recipe.schema import Optim
from vlmrl.train.learner import learning_rate
from vlmrl.train.update import PolicyGradient, TokenData


def logs(*ratios: float) -> Tensor:
    return torch.tensor(ratios, dtype=torch.float64).log().requires_grad_()


def one_by_one(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_clipped_surrogate_with_both_signs_on_both_sides_of_the_clip():
    ratio = logs(1.5, 1.5, 0.5, 0.5, 1.1, 1.0)
    advantage = one_by_one(2.0, -2.0, 2.0, -2.0, -3.0, 0.5)
    loss = clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.28)
    # A > 0, ratio 1.5: -min(2 x 1.5, 2 x 1.28) = -2.56          A < 0, ratio 1.5: -min(-3, -2.56) = 3
    # A > 0, ratio 0.5: -min(1.0, 1.6) = -1                      A < 0, ratio 0.5: -min(-1, -1.6) = 1.6
    # A < 0, ratio 1.1: inside, -(-3.3) = 3.3                    A > 0, ratio 1: -0.5
    torch.testing.assert_close(loss, one_by_one(-2.56, 3.0, -1.0, 1.6, 3.3, -0.5), rtol=0, atol=1e-12)
    loss.sum().backward()
    # d/d log ratio = -A x ratio where the unclipped side is the smaller, else 0
    # 0 (clipped), 2 x 1.5 = 3, -2 x 0.5 = -1, 0 (clipped), 3 x 1.1 = 3.3, -0.5
    torch.testing.assert_close(ratio.grad, one_by_one(0.0, 3.0, -1.0, 0.0, 3.3, -0.5), rtol=0, atol=1e-12)


def test_clipped_share_counts_exactly_the_tokens_without_gradient():
    ratio, advantage = logs(1.5, 1.5, 0.5, 0.5, 1.1, 0.81, 1.27), one_by_one(2, -2, 2, -2, -3, -1, 1)
    share = clipped_share(ratio, advantage, clip_low=0.2, clip_high=0.28)
    assert share.tolist() == [1, 0, 0, 1, 0, 0, 0]
    clipped_surrogate(ratio, advantage, clip_low=0.2, clip_high=0.28).sum().backward()
    assert (ratio.grad == 0).float().tolist() == share.tolist()


def test_without_clip_the_surrogate_is_minus_advantage_times_ratio():
    loss = clipped_surrogate(logs(5.0, 0.1), one_by_one(1.0, -2.0), clip_low=None, clip_high=None)
    torch.testing.assert_close(loss, one_by_one(-5.0, 0.2), rtol=0, atol=1e-12)  # -(1 x 5), -(-2 x 0.1)
    assert clipped_share(logs(5.0, 0.1), one_by_one(1.0, -2.0), clip_low=None, clip_high=None).tolist() == [0, 0]


def test_one_bound_alone_clips_one_side_alone():
    # upper only: ratio 0.01 and A < 0 stays -(-1 x 0.01) = 0.01; ratio 3 and A > 0 becomes -1.2
    loss = clipped_surrogate(logs(0.01, 3.0), one_by_one(-1, 1), clip_low=None, clip_high=0.2)
    torch.testing.assert_close(loss, one_by_one(0.01, -1.2), rtol=0, atol=1e-12)
    # lower only: ratio 3 and A > 0 stays -3; ratio 0.01 and A < 0 becomes 0.8
    loss = clipped_surrogate(logs(3.0, 0.01), one_by_one(1, -1), clip_low=0.2, clip_high=None)
    torch.testing.assert_close(loss, one_by_one(-3.0, 0.8), rtol=0, atol=1e-12)


def test_token_ratio_is_the_difference_of_log_probs_limited_to_twenty():
    new, old = one_by_one(-1.0, -50.0, 0.0), one_by_one(-1.5, -1.0, -30.0)
    found = log_ratio(new, old, torch.tensor([0, 0, 1]), "token")
    assert found.tolist() == [0.5, -20.0, 20.0]


def test_sequence_ratio_is_the_mean_over_the_response_with_its_gradient_spread_evenly():
    new = one_by_one(-1.0, -2.0, -3.0, -1.0).requires_grad_()
    old = one_by_one(-1.1, -2.3, -2.9, -1.5)
    found = log_ratio(new, old, torch.tensor([0, 0, 0, 1]), "sequence")
    # response 0: (0.1 + 0.3 - 0.1) / 3 = 0.1, on each of its three tokens; response 1: 0.5 / 1
    torch.testing.assert_close(found, one_by_one(0.1, 0.1, 0.1, 0.5), rtol=0, atol=1e-12)
    (found * one_by_one(1.0, 10.0, 100.0, 7.0)).sum().backward()
    # each token of response 0 gets (1 + 10 + 100) / 3 = 37; the only token of response 1 gets 7
    torch.testing.assert_close(new.grad, one_by_one(37.0, 37.0, 37.0, 7.0), rtol=0, atol=1e-12)


def test_sequence_ratio_of_no_tokens_is_no_ratio():
    empty = torch.zeros(0)
    assert log_ratio(empty, empty, torch.zeros(0, dtype=torch.long), "sequence").shape == (0,)


def test_an_unknown_ratio_level_or_aggregation_is_an_error():
    with pytest.raises(ValueError, match="word"):
        log_ratio(torch.zeros(1), torch.zeros(1), torch.zeros(1, dtype=torch.long), "word")
    with pytest.raises(ValueError, match="median"):
        aggregate(torch.zeros(1), torch.ones(1), Denominator("median", 1, 1, 1))


def test_k3_is_exp_d_minus_d_minus_one_and_points_at_the_reference():
    logp = one_by_one(0.25, 0.5, 0.5).log().requires_grad_()
    ref = one_by_one(0.5, 0.5, 0.25).log()
    found = k3(logp, ref)
    # d = ln 2: 2 - 0.693147 - 1 = 0.306853;  d = 0: 0;  d = -ln 2: 0.5 + 0.693147 - 1 = 0.193147
    torch.testing.assert_close(found, one_by_one(1 - math.log(2), 0.0, math.log(2) - 0.5), rtol=0, atol=1e-12)
    found.sum().backward()
    # d/dlogp = 1 - exp(d): 1 - 2 = -1 (a descent raises logp towards the reference), 0, 1 - 0.5 = 0.5
    torch.testing.assert_close(logp.grad, one_by_one(-1.0, 0.0, 0.5), rtol=0, atol=1e-12)


def test_k3_of_a_token_the_reference_rules_out_is_large_but_finite():
    assert k3(one_by_one(0.0), one_by_one(-math.inf)).item() == pytest.approx(math.exp(-20) + 20 - 1)
    assert math.isfinite(k3(one_by_one(-1e4), one_by_one(0.0)).item())


def test_cross_entropy_is_minus_the_log_prob():
    assert cross_entropy(one_by_one(-0.5, -2.0)).tolist() == [0.5, 2.0]


LOSS = one_by_one(1.0, 2.0, 3.0, 10.0)
LENGTHS = torch.tensor([3, 3, 3, 1])


@pytest.mark.parametrize(
    ("aggregation", "expected", "weights"),
    [
        # (1 + 2 + 3 + 10) / 4 tokens
        ("token_mean", 4.0, [1 / 4] * 4),
        # ((1 + 2 + 3) / 3 + 10 / 1) / 2 responses
        ("sequence_mean", 6.0, [1 / 6, 1 / 6, 1 / 6, 1 / 2]),
        # ((1 + 2 + 3) + 10) / 2 responses
        ("sequence_sum", 8.0, [1 / 2] * 4),
        # 16 / (2 responses x 8 tokens)
        ("constant", 1.0, [1 / 16] * 4),
    ],
)
def test_every_aggregation_by_hand(aggregation: str, expected: float, weights: list[float]):
    loss = LOSS.clone().requires_grad_()
    total = Denominator.of(aggregation, [3, 1], max_tokens=8)
    value = aggregate(loss, LENGTHS, total)
    assert value.item() == pytest.approx(expected, rel=1e-12)
    value.backward()
    assert loss.grad.tolist() == pytest.approx(weights, rel=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shares_of_microbatches_add_up_to_the_whole(aggregation: str):
    total = Denominator.of(aggregation, [3, 1], max_tokens=8)
    parts = aggregate(LOSS[:3], LENGTHS[:3], total) + aggregate(LOSS[3:], LENGTHS[3:], total)
    assert parts.item() == pytest.approx(aggregate(LOSS, LENGTHS, total).item(), rel=1e-12)


def test_a_response_without_trained_tokens_does_not_count():
    assert Denominator.of("sequence_mean", [3, 0, 1, 0], max_tokens=8) == Denominator("sequence_mean", 4, 2, 8)
    assert Denominator.of("sequence_mean", [3], 8, [2, 0, 4]) == Denominator("sequence_mean", 9, 3, 8, 6)
    assert aggregate(LOSS[:0], LENGTHS[:0], Denominator.of("token_mean", [], 8)).item() == 0.0


def test_metrics_are_means_over_the_tokens_of_the_whole_step():
    total = Denominator.of("sequence_mean", [3, 1], max_tokens=8)
    assert global_mean(LOSS[:3], total).item() == 6 / 4  # (1 + 2 + 3) over all 4 tokens
    assert not global_mean(LOSS.clone().requires_grad_(), total).requires_grad
    # tokens of dead groups count in the loss and not here: they have no numbers of their own
    with_dead = Denominator.of("token_mean", [3, 1], 8, [5])
    assert (
        global_mean(LOSS[:3], with_dead).item() == 6 / 4 and aggregate(LOSS[:3], LENGTHS[:3], with_dead).item() == 6 / 9
    )


def token_data(advantage: list[float], *, old: Tensor | None = None, ref: Tensor | None = None) -> TokenData:
    n = len(advantage)
    zeros = torch.zeros(n, dtype=torch.long)
    return TokenData(one_by_one(*advantage), torch.full((n,), math.nan), old, ref, zeros, zeros, torch.full((n,), n))


def test_the_entropy_bonus_lowers_the_loss_and_its_gradient_raises_entropy():
    logp = one_by_one(-1.0).requires_grad_()
    entropy = one_by_one(0.7).requires_grad_()
    loss, shown = PolicyGradient(ALGORITHMS["grpo"], entropy_coef=0.1).loss(
        TokenStats(logp, entropy), token_data([2.0])
    )
    # on-policy ratio 1: -2 x 1 - 0.1 x 0.7 = -2.07
    assert loss.item() == pytest.approx(-2.07, rel=1e-12)
    loss.sum().backward()
    assert entropy.grad.item() == pytest.approx(-0.1)
    assert logp.grad.item() == pytest.approx(-2.0)
    assert shown["loss/policy"].item() == pytest.approx(-2.0)


def test_the_kl_term_raises_the_loss():
    logp, ref = one_by_one(0.25).log().requires_grad_(), one_by_one(0.5).log()
    objective = PolicyGradient(ALGORITHMS["grpo"], kl_coef=0.5)
    loss, shown = objective.loss(TokenStats(logp, one_by_one(0.0)), token_data([0.0], ref=ref))
    assert loss.item() == pytest.approx(0.5 * (1 - math.log(2)), rel=1e-12)  # advantage 0: the KL alone
    assert shown["loss/kl"].item() == pytest.approx(1 - math.log(2), rel=1e-12)


ON_POLICY = {
    # value of each loss at ratio 1, advantage 1.5, log-probs -1, -2, -0.5; without an entry: -1.5 x ratio = -1.5
    "gpg": [1.5, 3.0, 0.75], "reinforce": [1.5, 3.0, 0.75], "remax": [1.5, 3.0, 0.75],  # -1.5 x logp
    "opd": [1.5, 3.0, 0.75], "opsd": [1.5, 3.0, 0.75], "va_opd": [1.5, 3.0, 0.75],
    "cispo": [1.5, 3.0, 0.75], "vespo": [1.5, 3.0, 0.75],  # -1 x 1.5 x logp
    "sapo": [-3.0, -3.0, -3.0],  # -1.5 x 4 x sigmoid(0)
}  # fmt: skip


@pytest.mark.parametrize("row", [name for name, row in ALGORITHMS.items() if not row.weighs_by_entropy])
def test_on_policy_every_row_has_its_loss_and_the_policy_gradient(row: str):
    logp = one_by_one(-1.0, -2.0, -0.5).requires_grad_()
    nothing = torch.zeros_like(logp)  # a critic that is right: its loss is 0
    data = replace(token_data([1.5] * 3), old_value=nothing, value_target=nothing)
    loss, shown = PolicyGradient(ALGORITHMS[row]).loss(TokenStats(logp, logp.detach(), nothing), data)
    torch.testing.assert_close(loss, one_by_one(*ON_POLICY.get(row, [-1.5] * 3)), rtol=0, atol=1e-12)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, one_by_one(-1.5, -1.5, -1.5), rtol=0, atol=1e-12)
    assert shown["policy/clip_share"].tolist() == [0, 0, 0]


def test_old_log_probs_are_used_when_given():
    logp, old = logs(0.6), one_by_one(0.5).log()
    loss, _ = PolicyGradient(ALGORITHMS["grpo_paper"]).loss(TokenStats(logp, logp.detach()), token_data([1.0], old=old))
    assert loss.item() == pytest.approx(-1.2, rel=1e-12)  # ratio 0.6 / 0.5 = 1.2 = the bound, advantage 1
    loss, _ = PolicyGradient(ALGORITHMS["grpo_paper"]).loss(
        TokenStats(logp, logp.detach()), token_data([-1.0], old=old)
    )
    assert loss.item() == pytest.approx(1.2, rel=1e-12)


def test_gspo_clips_whole_responses():
    # three tokens with log-ratio 0.0009, 0, 0: mean 0.0003 -> ratio 1.00030005, inside 1 + 4e-4: nothing is clipped,
    # although the first token alone would be (0.0009 > 4e-4)
    new, old = one_by_one(-1.0 + 0.0009, -1.0, -1.0).requires_grad_(), one_by_one(-1.0, -1.0, -1.0)
    _, shown = PolicyGradient(ALGORITHMS["gspo"]).loss(TokenStats(new, old), token_data([1.0] * 3, old=old))
    assert shown["policy/clip_share"].tolist() == [0, 0, 0]
    # 0.0015 / 3 = 0.0005 > 4e-4: all three are
    new = one_by_one(-1.0 + 0.0015, -1.0, -1.0).requires_grad_()
    loss, shown = PolicyGradient(ALGORITHMS["gspo"]).loss(TokenStats(new, old), token_data([1.0] * 3, old=old))
    assert shown["policy/clip_share"].tolist() == [1, 1, 1]
    loss.sum().backward()
    assert new.grad.tolist() == [0, 0, 0]


def test_warm_up_rises_in_equal_parts_and_its_first_step_is_not_zero():
    settings = Optim(lr=1.0, warmup_steps=4)
    assert [learning_rate(settings, s, 8) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_to_their_floor_at_the_last_step():
    # 5 steps, no warm-up: progress 0, 1/4, 1/2, 3/4, 1; floor 0.2 -> 0.2 + 0.8 x (1 - progress)
    linear = Optim(lr=1.0, schedule="linear", min_lr_ratio=0.2)
    assert [learning_rate(linear, s, 5) for s in range(5)] == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])
    # cosine: 0.5 (1 + cos(pi progress)): 1, 0.853553, 0.5, 0.146447, 0
    cosine = Optim(lr=2.0, schedule="cosine")
    expected = [2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5), 0.0]
    assert [learning_rate(cosine, s, 5) for s in range(5)] == pytest.approx(expected, abs=1e-12)


def test_a_schedule_begins_at_its_peak_after_the_warm_up():
    # 2 warm-up steps, 5 steps: 0.5, 1.0, then progress 0, 1/2, 1
    settings = Optim(lr=1.0, schedule="linear", warmup_steps=2)
    assert [learning_rate(settings, s, 5) for s in range(5)] == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.0], abs=1e-12)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 10])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_first_step_never_has_learning_rate_zero_and_none_leaves_the_range(schedule, warmup: int, steps: int):
    settings = Optim(lr=3.0, schedule=schedule, warmup_steps=warmup)
    rates = [learning_rate(settings, s, steps) for s in range(steps + 2)]
    assert rates[0] > 0
    assert all(0 <= r <= 3.0 for r in rates)
