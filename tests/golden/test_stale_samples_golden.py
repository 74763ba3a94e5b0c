"""Samples of a policy that is a step older: whose log-probs the ratio is over, by hand, exactly, and on a bandit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vlmrl.algo.algorithms import resolve
from vlmrl.model.packing import TokenStats
from vlmrl.recipe.schema import Algo, Data, Model, Recipe, Rollout
from vlmrl.train.update import PolicyGradient, TokenData, objective_of

NAN = math.nan


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def overlapping(row: str, **cells) -> PolicyGradient:
    """What a run with `rollout.overlap` minimises."""
    recipe = Recipe(
        model=Model(path="m"),
        data=[Data(path="d")],
        algo=Algo(name=row, **cells),
        rollout=Rollout(engine="vllm", engine_gpus=1, overlap=True),
    )
    return objective_of(recipe, resolve(row, **cells), 0.0)


def data(advantage: Tensor, sampler: Tensor, old: Tensor | None = None) -> TokenData:
    index = torch.arange(len(advantage))
    return TokenData(advantage, sampler, old, None, index, index, torch.ones_like(index))


def loss_of(objective: PolicyGradient, logp: Tensor, advantage: Tensor, sampler: Tensor, old: Tensor | None = None):
    """(loss of each token, gradient by its log-prob, what is shown)."""
    logp = logp.clone().requires_grad_()
    loss, shown = objective.loss(TokenStats(logp, logp.detach()), data(advantage, sampler, old))
    loss.sum().backward()
    return loss.detach(), logp.grad, shown


def test_the_clip_is_around_the_policy_that_sampled():
    # now 0.5 each; the older weights sampled them at 0.4, 0.3, 0.3, 0.1; bounds 0.8 and 1.28, dual clip 2
    # ratio 1.25, A = 1: inside, -1.25, gradient -1.25        ratio 1.667, A = 1: -1.28, none
    # ratio 1.667, A = -1: 1.667, gradient 1.667 (no bound from above but the dual clip)
    # ratio 5, A = -1: dual clip, 2, none                     nobody sampled: ratio 1, -1, gradient -1
    sampler = numbers(0.4, 0.3, 0.3, 0.1, NAN).log()
    loss, gradient, shown = loss_of(overlapping("grpo"), numbers(*[0.5] * 5).log(), numbers(1, 1, -1, -1, 1), sampler)
    assert loss.tolist() == pytest.approx([-1.25, -1.28, 5 / 3, 2.0, -1.0])
    assert gradient.tolist() == pytest.approx([-1.25, 0.0, 5 / 3, 0.0, -1.0])
    assert shown["policy/clip_share"].tolist() == [0, 1, 0, 1, 0]
    assert "policy/importance_weight" not in shown  # it is in the ratio: twice would be once too often


def test_a_second_update_is_still_held_to_the_policy_that_sampled():
    # before the updates 0.35 (ratio 0.5 / 0.35 = 1.43 would be clipped); sampled at 0.4: ratio 1.25 is not. Nobody
    # sampled the second: its ratio is over what the trainer said
    sampler, old = numbers(0.4, NAN).log(), numbers(0.35, 0.45).log()
    loss, _, _ = loss_of(overlapping("grpo"), numbers(0.5, 0.5).log(), numbers(1, 1), sampler, old)
    assert loss.tolist() == pytest.approx([-1.25, -0.5 / 0.45])


def test_where_no_clip_holds_the_ratio_what_is_off_is_masked_on_both_sides():
    # weights 0.5 / 0.4 = 1.25; 0.5 / 0.2 = 2.5, above 2: 0; 0.2 / 0.5 = 0.4, below 1 / 2: 0
    for row in ("rloo", "gspo", "reinforce"):
        _, gradient, shown = loss_of(
            overlapping(row), numbers(0.5, 0.5, 0.2).log(), numbers(1, 1, 1), numbers(0.4, 0.2, 0.5).log()
        )
        assert shown["policy/importance_weight"].tolist() == pytest.approx([1.25, 0.0, 0.0]), row
        assert gradient.tolist() == pytest.approx([-1.25, 0.0, 0.0]), row


def test_a_dual_clip_of_the_rows_own_is_kept():
    assert overlapping("easyr1").algorithm.dual_clip == 3.0
    assert overlapping("grpo", importance_cap=4.0).algorithm.dual_clip == 4.0
    assert overlapping("grpo", importance="mask").algorithm.dual_clip is None


ARMS = numbers(0.0, 0.2, 1.0)
"""What each arm of the bandit pays."""


def gradient_of(theta: Tensor, arms: Tensor, behaviour: Tensor, objective: PolicyGradient, weight: Tensor) -> Tensor:
    """Gradient by theta of the sum of weight x loss of these draws, with the mean reward for a baseline."""
    theta = theta.clone().requires_grad_()
    logp = theta.log_softmax(0)
    baseline = (logp.exp().detach() * ARMS).sum()
    loss, _ = objective.loss(TokenStats(logp[arms], logp[arms].detach()), data(ARMS[arms] - baseline, behaviour[arms]))
    (weight * loss).sum().backward()
    assert theta.grad is not None
    return theta.grad


@pytest.mark.parametrize("row", ["grpo", "rloo"])
def test_the_expected_gradient_of_old_samples_is_that_of_the_policy_as_it_is(row):
    """Over all arms, each as often as the older policy draws it; the two policies are close enough for every bound."""
    now, older = numbers(0.1, 0.0, 0.0), numbers(0.0, 0.1, -0.05)
    behaviour = older.log_softmax(0)
    found = gradient_of(now, torch.arange(3), behaviour, overlapping(row), behaviour.exp())
    theta = now.clone().requires_grad_()
    (-(theta.softmax(0) * ARMS).sum()).backward()  # minus the expected reward itself
    torch.testing.assert_close(found, theta.grad, rtol=1e-9, atol=1e-12)
    ignored = gradient_of(now, torch.arange(3), behaviour, PolicyGradient(resolve(row)), behaviour.exp())
    assert (ignored - theta.grad).abs().max() > 1e-3


@pytest.mark.parametrize("row", ["grpo", "cispo", "sapo", "rloo"])
def test_a_bandit_learns_from_samples_that_are_a_step_old(row):
    """The engine's log-probs are off by a bit, too. The best arm begins with a twentieth of the draws."""
    generator = torch.Generator().manual_seed(0)
    theta, older = numbers(1.5, 1.0, -1.2), numbers(1.5, 1.0, -1.2)
    wrong = numbers(0.02, -0.03, 0.01)
    assert theta.softmax(0)[2] < 0.06
    objective = overlapping(row)
    for _ in range(100):
        behaviour = (older + wrong).log_softmax(0)
        arms = torch.multinomial(behaviour.exp(), 64, replacement=True, generator=generator)
        older = theta
        theta = theta - 0.5 * gradient_of(theta, arms, behaviour, objective, torch.full((64,), 1 / 64))
    assert theta.softmax(0)[2] > 0.9
