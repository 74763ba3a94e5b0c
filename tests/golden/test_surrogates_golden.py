"""Hand-worked surrogates, KL estimators and importance weights. The arithmetic is beside each number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from vlmrl.algo.algo_keys import Algorithm
from vlmrl.algo.algorithms import ALGORITHMS, resolve
from vlmrl.algo.choices import KL_ESTIMATORS, SURROGATES
from vlmrl.algo.losses import (
    KL_LOSSES,
    SURROGATE_LOSSES,
    Denominator,
    Tokens,
    absolute,
    aggregate,
    applied_weight,
    dual_clipped,
    importance_weight,
    k1,
    k2,
    log_ratio,
    low_var_kl,
    policy_loss,
    select_tokens,
)
from vlmrl.model.packing import TokenStats
from vlmrl.train.update import PolicyGradient, TokenData

NAN = math.nan


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def tokens(
    ratios: list[float], advantages: list[float], response: list[int], old: float = 0.1, selected=None
) -> Tokens:
    """Tokens whose probability is `ratio` times the old one, `old`."""
    before = torch.full((len(ratios),), old, dtype=torch.float64)
    logp = (before * numbers(*ratios)).log().requires_grad_()
    return Tokens(logp, before.log(), numbers(*advantages), torch.tensor(response), selected)


def check(algorithm: Algorithm, x: Tokens, loss: list[float], gradient: list[float], clipped: list[float]) -> None:
    """`gradient`: of the sum of the losses by each token's log-prob."""
    found, share = policy_loss(algorithm, x)
    torch.testing.assert_close(found, numbers(*loss), rtol=1e-9, atol=1e-12)
    found.sum().backward()
    torch.testing.assert_close(x.logp.grad, numbers(*gradient), rtol=1e-9, atol=1e-12)
    assert share.tolist() == clipped and not share.requires_grad


def test_the_table_and_the_functions_name_the_same():
    assert tuple(SURROGATE_LOSSES) == tuple(SURROGATES)
    assert (*KL_LOSSES, "full") == (*(k for k in KL_ESTIMATORS if k != "full"), "full")
    with pytest.raises(ValueError, match="ppo"):
        policy_loss(replace(ALGORITHMS["grpo"], surrogate="ppo"), tokens([1.0], [1.0], [0]))


def test_the_dual_clip_limits_the_loss_of_bad_tokens():
    # ratio 10, A = -1: 10 -> 3;  ratio 2, A = -1: 2 (below 3);  ratio 10, A = 1: -1.3 (upper clip), dual clip idle
    # ratio 0.5, A = -1: -min(-0.5, -0.8) = 0.8;  gradients: 0 (limited), 2, 0 (clipped), 0 (clipped)
    x = tokens([10.0, 2.0, 10.0, 0.5], [-1, -1, 1, -1], [0, 0, 0, 0], old=0.01)
    check(ALGORITHMS["easyr1"], x, [3.0, 2.0, -1.3, 0.8], [0.0, 2.0, 0.0, 0.0], [1, 0, 1, 1])
    assert dual_clipped(numbers(10.0, -5.0), numbers(-2.0, 1.0), 3.0).tolist() == [6.0, -5.0]


def test_the_plain_policy_gradient():
    # p = 0.5: -2 x ln 0.5 = 1.386294;  p = 0.25: -(-1) x ln 0.25 = -1.386294; gradient -A
    x = tokens([1.0, 0.5], [2.0, -1.0], [0, 0], old=0.5)
    check(ALGORITHMS["gpg"], x, [2 * math.log(2), -2 * math.log(2)], [-2.0, 1.0], [0, 0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    # p 0.6 over 0.1: ratio 6 -> 5: -5 x 1 x ln 0.6 = 2.554128, gradient -5
    # p 0.02: ratio 0.2, no lower bound: -0.2 x (-2) x ln 0.02 = 0.4 x -3.912023 = -1.564809, gradient 0.4
    x = tokens([6.0, 0.2], [1.0, -2.0], [0, 1])
    check(ALGORITHMS["cispo"], x, [-5 * math.log(0.6), 0.4 * math.log(0.02)], [-5.0, 0.4], [1, 0])
    # with a lower bound of 0.5: -0.5 x (-2) x ln 0.02; a ratio outside a bound counts whatever its advantage
    bounded = replace(ALGORITHMS["cispo"], clip_low=0.5)
    assert policy_loss(bounded, tokens([0.2], [-2.0], [0]))[0].item() == pytest.approx(math.log(0.02))
    assert policy_loss(bounded, tokens([0.2, 0.2, 1.0, 6.0], [-2, 2, 1, 0], [0] * 4))[1].tolist() == [1, 1, 0, 1]


def test_gmpo_is_the_geometric_mean_of_ratios_clipped_one_by_one():
    # response 0, A = 1: log-ratios 0.6 -> 0.4 (clipped), 0.2: mean 0.3 -> -e^0.3 on both; gradient of the sum of both
    #   by the free token: 2 x -e^0.3 / 2 = -e^0.3; by the clipped one 0
    # response 1, A = -1: log-ratios 0.6 (free: only the lower side is limited) and -0.8 -> -0.4: mean 0.1 -> +e^0.1
    x = tokens([math.exp(0.6), math.exp(0.2), math.exp(0.6), math.exp(-0.8)], [1, 1, -1, -1], [0, 0, 1, 1])
    a, b = math.exp(0.3), math.exp(0.1)
    check(ALGORITHMS["gmpo"], x, [-a, -a, b, b], [0.0, -a, b, 0.0], [1, 0, 0, 1])
    # A = 0: there is no gradient that the bound could remove, as in "clip"
    check(ALGORITHMS["gmpo"], tokens([2.0, 0.5], [0, 0], [0, 0]), [0, 0], [0, 0], [0, 0])
    check(ALGORITHMS["grpo"], tokens([2.0, 0.5], [0, 0], [0, 0]), [0, 0], [0, 0], [0, 0])
    free = replace(ALGORITHMS["gmpo"], clip_low=None, clip_high=None)
    assert policy_loss(free, tokens([4.0, 1.0], [1, 1], [0, 0]))[0].tolist() == pytest.approx([-2.0, -2.0])  # sqrt(4)


def test_sapo_gates_smoothly():
    # ratio 1: sigmoid(0) x 4 / tau = 2 / tau: A = 1, tau 1 -> -2;  A = -1, tau 1.05 -> 2 / 1.05 = 1.904762; gradient -A
    # ratio 2, A = 1: -4 sigmoid(1) = -2.924234; gradient -ratio x 4 s (1 - s) with s = 0.731059: -2 x 0.786448
    s = 1 / (1 + math.exp(-1))
    x = tokens([1.0, 1.0, 2.0], [1.0, -1.0, 1.0], [0, 0, 0])
    check(ALGORITHMS["sapo"], x, [-2.0, 2 / 1.05, -4 * s], [-1.0, 1.0, -8 * s * (1 - s)], [0, 0, 0])
    # A < 0, ratio 2, tau 1.05: 4 / 1.05 x sigmoid(1.05)
    found = policy_loss(ALGORITHMS["sapo"], tokens([2.0], [-1.0], [0]))[0].item()
    assert found == pytest.approx(4 / 1.05 / (1 + math.exp(-1.05)))


def test_vespo_weighs_a_response_by_its_whole_ratio():
    # response 0, A = 1: W = 2 x 0.75 = 1.5: 1.5^2 e^(3 (1 - 1.5)) = 2.25 e^-1.5 = 0.502043, on both tokens
    # response 1, A = -2: W = 0.5: 0.5^3 e^(2 (1 - 0.5)) = 0.125 e = 0.339785; loss 2 x 0.339785 x ln(0.05)
    # response 2: W = 1, so the weight is 1; p = 0.1 throughout but for the ratio
    x = tokens([2.0, 0.75, 0.5, 1.0], [1.0, 1.0, -2.0, -1.0], [0, 0, 1, 2])
    a, b = 2.25 * math.exp(-1.5), 0.125 * math.e
    loss = [-a * math.log(0.2), -a * math.log(0.075), 2 * b * math.log(0.05), math.log(0.1)]
    check(ALGORITHMS["vespo"], x, loss, [-a, -a, 2 * b, 1.0], [0, 0, 0, 0])
    # other powers and decays, W = 4: 4 e^(0.5 (1 - 4)) = 4 e^-1.5, and 4^0.5 e^(1 - 4) = 2 e^-3
    row = resolve("vespo", power_positive=1.0, decay_positive=0.5, power_negative=0.5, decay_negative=1.0)
    good, bad = 4 * math.exp(-1.5), 2 * math.exp(-3)
    found = policy_loss(row, tokens([4.0, 4.0], [1.0, -1.0], [0, 1]))[0].tolist()
    assert found == pytest.approx([-good * math.log(0.4), bad * math.log(0.4)], rel=1e-9)


def test_vespo_has_no_weight_far_away_from_the_old_policy():
    # W beyond e^20 and below e^-20, token by token and as a product of tokens: weights e^-1e9 and e^-37 e^3, no NaN
    for signs in (1.0, -1.0):
        old = numbers(-60.0, -0.1, -11.0, -11.0, -1.0, -1.0)
        logp = numbers(-1.0, -60.0, -0.1, -0.1, -15.0, -15.0).requires_grad_()
        x = Tokens(logp, old, torch.full_like(old, signs), torch.tensor([0, 1, 2, 2, 3, 3]))
        policy_loss(ALGORITHMS["vespo"], x)[0].sum().backward()
        assert logp.grad is not None and logp.grad.abs().max() < 1e-14


def test_a_weight_of_vespo_is_largest_where_the_ratio_is_power_over_decay():
    weights = {}
    for w in (0.6, 2 / 3, 0.73, 1.45, 1.5, 1.55):
        x = tokens([w, w], [1.0, -1.0], [0, 1])
        policy_loss(ALGORITHMS["vespo"], x)[0].sum().backward()
        weights[w] = x.logp.grad.abs().tolist()
    assert weights[2 / 3][0] > max(weights[0.6][0], weights[0.73][0])  # 2 / 3
    assert weights[1.5][1] > max(weights[1.45][1], weights[1.55][1])  # 3 / 2


def test_luspo_adds_up_what_gspo_takes_the_mean_of():
    # response 0, A = 1, ratios 1.001 and 1.002: mean log-ratio s = (ln 1.001 + ln 1.002) / 2: -e^s a token, over two
    # tokens 2 x -e^s; gradient of a token: (-e^s / 2 + -e^s / 2) = -e^s. Response 1: ratio 1.01 over 1.0025: clipped
    s = (math.log(1.001) + math.log(1.002)) / 2
    x = tokens([1.001, 1.002, 1.01], [1.0, 1.0, 1.0], [0, 0, 1])
    loss, clipped = policy_loss(ALGORITHMS["luspo"], x)
    total = Denominator.of(ALGORITHMS["luspo"].aggregation, [2, 1], 100)
    value = aggregate(loss, torch.tensor([2, 2, 1]), total)
    assert value.item() == pytest.approx((-2 * math.exp(s) - 1.0025) / 2, rel=1e-12)
    value.backward()
    assert x.logp.grad.tolist() == pytest.approx([-math.exp(s) / 2, -math.exp(s) / 2, 0.0], rel=1e-12)
    assert clipped.tolist() == [0, 0, 1]


def test_gspo_token_has_the_response_ratio_and_each_tokens_own_gradient():
    new, old = numbers(-1.0, -2.0, -1.0).requires_grad_(), numbers(-1.1, -2.3, -1.5)
    found = log_ratio(new, old, torch.tensor([0, 0, 1]), "sequence_token")
    # response 0: (0.1 + 0.3) / 2 = 0.2 on both; response 1: 0.5
    torch.testing.assert_close(found, numbers(0.2, 0.2, 0.5), rtol=0, atol=1e-12)
    (found * numbers(1.0, 10.0, 100.0)).sum().backward()
    assert new.grad.tolist() == [1.0, 10.0, 100.0]  # its own, where "sequence" would spread (1 + 10) / 2


def test_gspo_and_gspo_token_agree_where_a_response_has_one_advantage():
    grads = []
    for row in ("gspo", "gspo_token"):
        x = tokens([1.0002, 1.0001, 0.9999], [2.0, 2.0, -1.0], [0, 0, 1])
        policy_loss(ALGORITHMS[row], x)[0].sum().backward()
        grads.append(x.logp.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=0)


def test_clip_cov_takes_the_picked_tokens_out():
    # clip 1/1: ratios within [0, 2]. ratio 1.5, A = 1: -1.5, picked -> 0; ratio 3, A = 1: -2 (clipped); ratio 0.5: -0.5
    x = tokens([1.5, 3.0, 0.5], [1, 1, 1], [0, 0, 0], selected=torch.tensor([True, False, False]))
    check(ALGORITHMS["clip_cov"], x, [0.0, -2.0, -0.5], [0.0, 0.0, -0.5], [1, 1, 0])
    without = tokens([1.5, 3.0, 0.5], [1, 1, 1], [0, 0, 0])
    check(ALGORITHMS["clip_cov"], without, [-1.5, -2.0, -0.5], [-1.5, 0.0, -0.5], [0, 1, 0])


def test_kl_cov_pulls_the_picked_tokens_back():
    # ratio 1.5, A = 1, picked, coefficient 2: -1.5 + 2 ln 1.5 = -0.689070, gradient -1.5 + 2
    # ratio 0.5, picked: -0.5 + 2 ln 2 = 0.886294, gradient -0.5 - 2;  ratio 5, not picked, no clip: -5
    x = tokens([1.5, 0.5, 5.0], [1, 1, 1], [0, 0, 0], selected=torch.tensor([True, True, False]))
    loss = [-1.5 + 2 * math.log(1.5), -0.5 + 2 * math.log(2), -5.0]
    check(resolve("kl_cov", cov_kl_coef=2.0), x, loss, [0.5, -2.5, -5.0], [0, 0, 0])


def pick(algorithm: Algorithm, logps, olds, advantages, seed: int = 0) -> list[list[bool]]:
    made = [[numbers(*x) for x in lists] for lists in (logps, olds, advantages)]
    return [x.tolist() for x in select_tokens(algorithm, *made, seed)]


def test_kl_cov_picks_the_highest_covariance_of_all_tokens():
    # logp -1, -2 | -3, -6: mean -3; advantages 1, 1 | -1, -1: mean 0
    # covariances (2)(1) = 2, (1)(1) = 1 | (0)(-1) = 0, (-3)(-1) = 3: the highest is the last, then the first
    logps, advantages = [[-1, -2], [-3, -6]], [[1, 1], [-1, -1]]
    half = resolve("kl_cov", cov_share=0.5)
    assert pick(half, logps, logps, advantages) == [[True, False], [False, True]]
    assert pick(ALGORITHMS["kl_cov"], logps, logps, advantages) == [[False, False], [False, True]]  # at least one
    # advantages with a mean of their own: 3, 3 | 1, 1 give the same covariances
    assert pick(half, logps, logps, [[3, 3], [1, 1]]) == [[True, False], [False, True]]


def test_clip_cov_picks_at_random_between_its_bounds_among_what_is_not_clipped():
    # covariances as above: 2, 1, 0, 3. Between 0.5 and 2.5: the first two
    logps, advantages = [[-1, -2], [-3, -6]], [[1, 1], [-1, -1]]
    row = resolve("clip_cov", cov_low=0.5, cov_high=2.5, cov_share=0.25)
    seen = {tuple(map(tuple, pick(row, logps, logps, advantages, seed))) for seed in range(20)}
    assert seen == {((True, False), (False, False)), ((False, True), (False, False))}
    assert pick(row, logps, logps, advantages, 3) == pick(row, logps, logps, advantages, 3)
    # the first is clipped (ratio e^1 > 2, A > 0): only the second is left
    for seed in range(5):
        assert pick(row, logps, [[-2, -2], [-3, -6]], advantages, seed) == [[False, True], [False, False]]
    # nothing in reach: nothing picked
    assert pick(resolve("clip_cov"), logps, logps, [[0, 0], [0, 0]]) == [[False, False], [False, False]]


def test_every_kl_estimator_by_hand():
    logp, ref = numbers(0.25, 0.5).log(), numbers(0.5, 0.5).log()
    log2 = math.log(2)
    # logp - ref = -ln 2 and 0
    assert k1(logp, ref).tolist() == pytest.approx([-log2, 0.0])
    assert k2(logp, ref).tolist() == pytest.approx([log2**2 / 2, 0.0])
    assert absolute(logp, ref).tolist() == pytest.approx([log2, 0.0])
    # the other way round, policy above reference, the pull is as strong
    assert absolute(ref, logp).tolist() == pytest.approx([log2, 0.0])
    assert k1(ref, logp).tolist() == pytest.approx([log2, 0.0])
    assert low_var_kl(logp, ref).tolist() == pytest.approx([1 - log2, 0.0])
    # d = 5: e^5 - 6 = 142.4 -> 10;  d = -5: e^-5 + 4 = 4.0067
    assert low_var_kl(numbers(-5.0, 0.0), numbers(0.0, -5.0)).tolist() == pytest.approx([10.0, math.exp(-5) + 4])


@pytest.mark.parametrize(("name", "expected"), [("k1", 1.0), ("k2", -math.log(2)), ("k3", -1.0), ("abs", -1.0)])
def test_the_gradient_of_every_kl_estimator_by_hand(name: str, expected: float):
    # policy 0.25, reference 0.5, d = ref - logp = ln 2: k1 1; k2 -d = -0.693; k3 1 - e^d = -1; abs -1
    logp = numbers(0.25).log().requires_grad_()
    KL_LOSSES[name](logp, numbers(0.5).log()).sum().backward()
    assert logp.grad.item() == pytest.approx(expected)


def weigh(changes: list[float], mode: str, level: str, cap: float = 2.0, response: list[int] | None = None):
    sampler = numbers(*([-1.0] * len(changes)))
    old = sampler + numbers(*(math.log(c) for c in changes))
    where = torch.tensor(response or [0] * len(changes))
    return importance_weight(old, sampler, where, mode=mode, level=level, cap=cap).tolist()


def test_importance_weights_by_hand():
    assert weigh([4.0, 0.8, 0.4], "truncate", "token") == pytest.approx([2.0, 0.8, 0.4])
    assert weigh([4.0, 0.8, 0.4], "mask", "token") == pytest.approx([0.0, 0.8, 0.0])  # 0.4 is below 1 / 2
    # sequence: 4 x 0.4 = 1.6 on both; alone 0.8
    assert weigh([4.0, 0.4, 0.8], "truncate", "sequence", response=[0, 0, 1]) == pytest.approx([1.6, 1.6, 0.8])
    assert weigh([4.0, 0.8, 0.8], "mask", "sequence", response=[0, 0, 1]) == pytest.approx([0.0, 0.0, 0.8])  # 3.2 > 2
    assert weigh([4.0, 0.8], "truncate", "sequence") == pytest.approx([2.0, 2.0])
    with pytest.raises(ValueError, match="mode"):
        weigh([1.0], "clip", "token")
    with pytest.raises(ValueError, match="level"):
        weigh([1.0], "mask", "word")


def test_a_token_that_nobody_sampled_weighs_one():
    old, sampler = numbers(-1.0, -1.0), numbers(NAN, -1.0 - math.log(1.5))
    assert importance_weight(old, sampler, torch.tensor([0, 0]), mode="mask", level="token", cap=2.0).tolist() == (
        pytest.approx([1.0, 1.5])
    )


def test_the_weight_of_a_response_in_gmpo_is_the_geometric_mean_of_its_tokens():
    # responses [2, 0.5] and [0.8]: sqrt(2 x 0.5) = 1 on both, 0.8
    weight, response = numbers(2.0, 0.5, 0.8), torch.tensor([0, 0, 1])
    assert applied_weight(ALGORITHMS["gmpo"], weight, response).tolist() == pytest.approx([1.0, 1.0, 0.8])
    assert applied_weight(ALGORITHMS["grpo"], weight, response) is weight
    # one of two tokens is masked: sqrt(1e-10 x 1) = 1e-5; all of them: 1e-10
    masked = applied_weight(ALGORITHMS["gmpo"], numbers(0.0, 1.0, 0.0), response)
    assert masked.tolist() == pytest.approx([1e-5, 1e-5, 1e-10])


def test_the_importance_weight_multiplies_the_loss_of_gmpo_once_a_response():
    # sampled at p / 1.5 and p / 0.9: token weights 1.5 and 0.9, geometric mean sqrt(1.35); on policy the loss of the
    # response is -2 x sqrt(1.35), and its gradient, spread evenly over two tokens in a mean of two, -sqrt(1.35) each
    logp = numbers(0.5, 0.5).log().requires_grad_()
    objective = PolicyGradient(ALGORITHMS["gmpo"], importance="truncate")
    given = data([2.0, 2.0], logp.detach(), (logp - numbers(1.5, 0.9).log()).detach())
    loss, shown = objective.loss(TokenStats(logp, numbers(0.0, 0.0)), given)
    total = aggregate(loss, given.response_tokens, Denominator.of("sequence_mean", [2], 8))
    assert total.item() == pytest.approx(-2 * math.sqrt(1.35))
    total.backward()
    assert logp.grad.tolist() == pytest.approx([-math.sqrt(1.35)] * 2)
    assert shown["policy/importance_weight"].tolist() == pytest.approx([math.sqrt(1.35)] * 2)


def data(advantages: list[float], old: Tensor, sampler: Tensor, ref: Tensor | None = None) -> TokenData:
    zeros = torch.zeros(len(advantages), dtype=torch.long)
    return TokenData(numbers(*advantages), sampler, old, ref, zeros, zeros, torch.full_like(zeros, len(advantages)))


def test_the_importance_weight_multiplies_the_policy_loss_and_not_the_kl():
    logp = numbers(0.5).log().requires_grad_()
    # sampled at 0.4 by the engine, 0.5 by the trainer: weight 1.25; on-policy loss -2 x 1.25; KL k2: ref 0.25
    objective = PolicyGradient(resolve("grpo", kl="k2"), kl_coef=0.5, importance="truncate")
    stats = TokenStats(logp, numbers(0.0))
    found, shown = objective.loss(stats, data([2.0], logp.detach(), numbers(0.4).log(), numbers(0.25).log()))
    assert found.item() == pytest.approx(-2.5 + 0.5 * math.log(2) ** 2 / 2)
    assert shown["policy/importance_weight"].item() == pytest.approx(1.25)
    found.sum().backward()
    assert logp.grad.item() == pytest.approx(-2.5 + 0.5 * math.log(2))
    plain, _ = PolicyGradient(ALGORITHMS["grpo"]).loss(stats, data([2.0], logp.detach(), numbers(0.4).log()))
    assert plain.item() == -2.0
