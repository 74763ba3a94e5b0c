"""What an update refuses: losses and gradients that are not finite. Nothing is changed then, and the rows are named."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tinyworld import encoded, items_of

from vlmrl.algo.algorithms import ALGORITHMS
from vlmrl.errors import TrainError
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Optim
from vlmrl.train.learner import Optimizer
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.update import CrossEntropy, PolicyGradient, update


@pytest.fixture
def items(tiny_encoder):
    prompts = [encoded(tiny_encoder, "same?", name=n) for n in ("a", "b")]
    return items_of([(prompts[0], [3, 4]), (prompts[1], [5, 2])])


@pytest.fixture
def optimizer(tiny_model):
    return Optimizer(tiny_model, Optim(lr=1e-2))


NAMES = ["digits row a sample 0", "digits row a sample 1", "digits row b sample 0", "digits row b sample 1"]


def run(policy, optimizer, items, advantages, objective=None, budget=40):
    objective = objective or PolicyGradient(ALGORITHMS["grpo"])
    batch = StepBatch(items, advantages, NAMES)
    return update(policy, optimizer, batch, objective, lr=1e-2, tokens_per_row=budget, max_tokens=8)


def untouched(model, before, optimizer) -> bool:
    same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    return (
        same
        and optimizer.updates == 0
        and not optimizer.adamw.state
        and all(p.grad is None for p in model.parameters())
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_step_and_names_the_rows(tiny_model, optimizer, items, bad):
    before = copy.deepcopy(tiny_model.state_dict())
    with pytest.raises(TrainError) as caught:
        run(Policy(tiny_model), optimizer, items, [1.0, -1.0, 1.0, bad])
    assert NAMES[3] in caught.value.message
    assert not any(name in caught.value.message for name in NAMES[:3])
    assert untouched(tiny_model, before, optimizer)


def test_a_banned_target_names_its_row(tiny_model, optimizer, items):
    banned = items[1].segments[0].ids[2]
    assert banned not in [i for k in (0, 2, 3) for i in items[k].segments[0].ids]
    with pytest.raises(TrainError) as caught:
        run(Policy(tiny_model, banned_ids=[banned]), optimizer, items, [0.0] * 4, CrossEntropy())
    assert NAMES[1] in caught.value.message and NAMES[0] not in caught.value.message


def test_weights_that_are_not_finite_stop_the_step(tiny_model, optimizer, items):
    with torch.no_grad():
        tiny_model.model.language_model.norm.weight[0] = math.nan
    with pytest.raises(TrainError, match="not finite"):
        run(Policy(tiny_model), optimizer, items, [1.0, -1.0, 1.0, -1.0])
    assert optimizer.updates == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_before_the_step(tiny_model, optimizer, items, bad):
    before = copy.deepcopy(tiny_model.state_dict())
    handle = tiny_model.model.language_model.norm.weight.register_hook(lambda g: g * bad)
    with pytest.raises(TrainError, match="gradient is not finite"):
        run(Policy(tiny_model), optimizer, items, [1.0, -1.0, 1.0, -1.0])
    assert untouched(tiny_model, before, optimizer)
    handle.remove()
    metrics = run(Policy(tiny_model), optimizer, items, [1.0, -1.0, 1.0, -1.0])
    assert metrics["optim/grad_norm"] > 0 and optimizer.updates == 1


def test_a_sound_update_changes_weights_raises_what_was_good_and_reports(tiny_model, optimizer, items):
    policy = Policy(tiny_model)
    advantages = [1.0, -1.0, 1.0, -1.0]
    from vlmrl.model.packing import make_row

    def gain() -> float:
        with torch.no_grad():
            logp = [policy(make_row([i])).logp.sum() for i in items]
        return float(logp[0] - logp[1] + logp[2] - logp[3])

    before = gain()
    metrics = run(policy, optimizer, items, advantages)
    assert gain() > before
    # token mean, on-policy: -(3 - 4 + 5 - 2) / 14
    assert metrics["loss/policy"] == pytest.approx(-2 / 14, rel=1e-6)
    assert metrics["loss/total"] == pytest.approx(-2 / 14, rel=1e-6)
    assert metrics["optim/lr"] == 1e-2
    assert metrics["policy/clip_share"] == 0.0
    assert metrics["policy/sampler_gap_max"] == 0.0  # nobody sampled these
