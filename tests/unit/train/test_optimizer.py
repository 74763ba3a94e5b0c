"""AdamW over float32 masters: torch's own to the bit, nothing lost in bfloat16, state that survives a round trip."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from torch import nn

from vlmrl.errors import TrainError
from vlmrl.recipe.schema import Optim
from vlmrl.train.learner import Optimizer, learning_rate


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(dtype)


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)).to(next(model.parameters()).dtype)
    model(x).pow(2).mean().backward()


def test_float32_equals_torch_adamw_to_the_bit():
    ours, theirs = network(), network()
    settings = Optim(lr=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=1e-3, max_grad_norm=0.05)
    optimizer = Optimizer(ours, settings)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    others = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-3, fused=True)
    for step in range(5):
        backward(ours, step)
        backward(theirs, step)
        norm = optimizer.clip()
        assert norm == float(nn.utils.clip_grad_norm_(list(theirs.parameters()), 0.05)) > 0.05
        optimizer.step(1e-2)
        adamw.step()
        adamw.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is None
    assert optimizer.updates == 5


def test_the_gradient_of_each_part_has_its_norm_before_it_is_clipped():
    """Linear parts with inputs 3 and 4 and outputs that are summed: d/dw = the input, so norms 3, 4 and together 5."""
    model = nn.ModuleDict({"visual": nn.Linear(1, 1, bias=False), "language_model": nn.Linear(1, 1, bias=False)})
    model["lm_head"] = nn.Linear(1, 1, bias=False)  # trained, and nothing reaches it
    (model["visual"](torch.tensor([3.0])) + model["language_model"](torch.tensor([4.0]))).sum().backward()
    optimizer = Optimizer(model, Optim(max_grad_norm=1.0))
    assert optimizer.part_norms() == {"vision": 3.0, "language": 4.0, "embeddings": 0.0}
    assert optimizer.clip() == 5.0


def test_the_learning_rate_of_a_step_is_the_one_given():
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = Optimizer(model, Optim(lr=1.0))
    backward(model, 0)
    optimizer.step(0.25)
    # the first Adam step moves every weight by lr x sign(gradient), up to epsilon
    moved = (model[0].weight - before["0.weight"]).abs()
    assert torch.allclose(moved, torch.full_like(moved, 0.25), rtol=1e-3)


def test_weight_decay_acts_on_matrices_only():
    model = network()
    optimizer = Optimizer(model, Optim(lr=1.0, weight_decay=0.5))
    before = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(0.1)
    for name, p in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if p.ndim >= 2 else before[name]
        assert torch.equal(p, expected), name


def test_updates_too_small_for_bfloat16_add_up_in_the_masters():
    """1.0 + 1e-3 is 1.0 in bfloat16 (8 bits); forty such steps are 1.04."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = Optimizer(model, Optim(lr=1e-3))
    for step in range(40):
        (-model(torch.ones(1, 1, dtype=torch.bfloat16))).sum().backward()
        optimizer.step(1e-3)
        if step == 0:
            assert model.weight.item() == 1.0
    assert optimizer.masters["weight"].item() == pytest.approx(1.04, rel=1e-4)
    assert model.weight.item() == pytest.approx(1.04, rel=5e-3) and model.weight.item() != 1.0
    assert model.weight.dtype == torch.bfloat16


def test_gradients_of_microbatches_are_summed_in_float32():
    """256 + 1 is 256 in bfloat16: three hundred and one microbatches of gradient 1 after one of 256 would be lost."""
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(model, Optim(lr=1e-3))
    for size in [256.0] + [1.0] * 301:
        model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is None
    assert optimizer.masters["weight"].grad.dtype == torch.float32
    assert optimizer.masters["weight"].grad.item() == 557.0
    optimizer.clear()
    assert optimizer.masters["weight"].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_a_round_trip_to_the_bit(dtype):
    settings = Optim(lr=1e-2, weight_decay=0.01)
    model = network(dtype)
    optimizer = Optimizer(model, settings)
    for step in range(3):
        backward(model, step)
        optimizer.step(1e-2)
    saved = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    weights = copy.deepcopy(model.state_dict())

    other = network(dtype)
    other.load_state_dict(weights)
    resumed = Optimizer(other, settings)
    resumed.load_state_tensors(saved, updates=3)
    for step in range(3, 6):
        for m, o in ((model, optimizer), (other, resumed)):
            backward(m, step)
            o.step(1e-2)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    ours, theirs = optimizer.state_tensors(), resumed.state_tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
    assert resumed.updates == 6
    assert any(k.startswith("master.") for k in ours) == (dtype == torch.bfloat16)


def test_loading_takes_a_copy():
    model = network()
    optimizer = Optimizer(model, Optim(lr=1e-2))
    backward(model, 0)
    optimizer.step(1e-2)
    saved = optimizer.state_tensors()
    other = Optimizer(network(), Optim(lr=1e-2))
    other.load_state_tensors(saved, 1)
    kept = saved["exp_avg.0.weight"].clone()
    backward(model, 1)
    optimizer.step(1e-2)
    assert torch.equal(other.state_tensors()["exp_avg.0.weight"], kept)


def test_a_fresh_optimizer_has_no_moments_to_save():
    assert Optimizer(network(), Optim()).state_tensors() == {}


def test_frozen_parameters_are_left_alone():
    model = network()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    optimizer = Optimizer(model, Optim(lr=0.1, weight_decay=0.5))
    backward(model, 0)
    optimizer.step(0.1)
    assert torch.equal(model[0].weight, before)
    assert not [k for k in optimizer.state_tensors() if ".0." in k]


def test_a_model_without_trainable_parameters_is_an_error():
    with pytest.raises(TrainError, match="frozen"):
        Optimizer(network().requires_grad_(False), Optim())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_clip_reports_a_norm_that_is_not_finite(bad):
    model = network()
    optimizer = Optimizer(model, Optim())
    backward(model, 0)
    with torch.no_grad():
        model[0].weight.grad[0, 0] = bad
    assert not math.isfinite(optimizer.clip())


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup_steps", [0, 1, 5])
@pytest.mark.parametrize("steps", [1, 2, 6, 100])
def test_the_first_step_never_has_a_learning_rate_of_zero(schedule, warmup_steps, steps):
    settings = Optim(lr=1e-3, schedule=schedule, warmup_steps=warmup_steps)
    rates = [learning_rate(settings, step, steps) for step in range(steps)]
    assert rates[0] == 1e-3 / max(1, warmup_steps)
    assert all(rate > 0 for rate in rates[:-1]) and max(rates) <= 1e-3


def test_8bit_without_bitsandbytes_is_an_error_in_words(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(TrainError, match="needs bitsandbytes") as caught:
        Optimizer(network(), Optim(name="adamw_8bit"))
    assert "pip install" in str(caught.value.hint)


def test_8bit_state_survives_a_round_trip_where_bitsandbytes_is():
    pytest.importorskip("bitsandbytes")
    settings = Optim(name="adamw_8bit", lr=1e-2)
    runs = []
    for stop in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(128, 128)
        optimizer = Optimizer(model, settings)
        for step in range(4):
            if stop and step == 2:
                saved = {k: v.clone() for k, v in optimizer.state_tensors().items()}
                optimizer = Optimizer(model, settings)
                optimizer.load_state_tensors(saved, 2)
            model(torch.randn(4, 128, generator=torch.Generator().manual_seed(step))).pow(2).sum().backward()
            optimizer.step(1e-2)
        runs.append((model, optimizer.state_tensors()))
    assert runs[0][1]["state1.weight"].dtype == torch.uint8
    assert all(torch.equal(a, b) for a, b in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True))
    assert all(torch.equal(v, runs[1][1][k]) for k, v in runs[0][1].items())


@pytest.mark.gpu
def test_on_a_gpu_adamw_is_fused():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    assert Optimizer(network().cuda(), Optim()).adamw.defaults["fused"] is True


def test_moments_take_memory_on_the_device_of_their_weights_until_they_exist():
    model = network()  # 4 x 8 + 8 + 8 + 8 + 8 x 2 + 2 = 74 numbers, with two float32 moments each
    optimizer = Optimizer(model, Optim())
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert (optimizer.pending_bytes(cpu), optimizer.pending_bytes(gpu)) == (74 * 8, 0)
    backward(model, 0)
    optimizer.step(1e-2)
    assert optimizer.pending_bytes(cpu) == 0
