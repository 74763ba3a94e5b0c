"""bfloat16 weights with Kahan-compensated updates, against AdamW in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vlmrl.recipe.schema import Optim
from vlmrl.train.learner import KahanAdamW, Optimizer, kahan_add

SETTINGS = Optim(name="adamw_bf16_kahan", lr=1e-3)


def test_what_an_addition_loses_comes_back():
    """1 + 2^-9 is 1 in bfloat16 (8 bits); 64 of them are 1.125."""
    total, lost = torch.ones(1, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16)
    kahan_add(total, lost, torch.tensor([2.0**-9]))
    assert (total.item(), lost.item()) == (1.0, 2.0**-9)
    for _ in range(63):
        kahan_add(total, lost, torch.tensor([2.0**-9]))
    assert total.item() == 1.125 and lost.item() == 0.0


def updated(optimizer_of, dtype: torch.dtype, steps: int = 300) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy gradients with a direction, whose updates are far below a bfloat16 step of the weights.

    Returns: (weights before, what the weights are after: with what is kept beside them).
    """
    generator = torch.Generator().manual_seed(0)
    before = (1 + torch.rand(64, 32, generator=generator)).to(torch.bfloat16)
    weight = nn.Parameter(before.to(dtype))
    direction = torch.randn(64, 32, generator=generator)
    optimizer = optimizer_of([weight])
    for _ in range(steps):
        weight.grad = (direction + torch.randn(64, 32, generator=generator)).to(dtype)
        optimizer.step()
    beside = optimizer.state[weight].get("compensation", torch.zeros(1)).float()
    assert float(beside.abs().max()) <= 2**-7  # half a step of a bfloat16 between 2 and 4
    return before.float(), weight.detach().float() + beside


def test_it_follows_adamw_in_float32_where_plain_bfloat16_stands_still():
    options = {"lr": 1e-4, "weight_decay": 0.1}
    before, exact = updated(lambda p: torch.optim.AdamW(p, **options), torch.float32)
    _, kahan = updated(lambda p: KahanAdamW(p, **options), torch.bfloat16)
    _, rounded = updated(lambda p: torch.optim.AdamW(p, **options), torch.bfloat16)
    moved = (exact - before).norm()
    assert float((kahan - exact).norm() / moved) < 0.01
    assert float((rounded - exact).norm() / moved) > 0.9


def test_in_float32_it_is_adamw():
    options = {"lr": 1e-2, "betas": (0.8, 0.95), "weight_decay": 0.1}
    _, expected = updated(lambda p: torch.optim.AdamW(p, **options), torch.float32, 20)
    _, found = updated(lambda p: KahanAdamW(p, **options), torch.float32, 20)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_the_recipes_name_leads_to_it_without_masters_and_with_float32_gradient_sums():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    optimizer = Optimizer(model, SETTINGS)
    assert isinstance(optimizer.adamw, KahanAdamW)
    for size in [256.0] + [1.0] * 301:
        model(torch.full((1, 1), size, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad.dtype == torch.float32 and model.weight.grad.item() == 557.0
    assert optimizer.clip() == 557.0
    optimizer.step(1e-3)
    assert model.weight.dtype == torch.bfloat16 and model.weight.grad is None
    assert sorted(optimizer.state_tensors()) == [
        f"{k}.weight" for k in ("compensation", "exp_avg", "exp_avg_sq", "step")
    ]


def test_updates_too_small_for_bfloat16_add_up():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = Optimizer(model, SETTINGS)
    for _ in range(40):
        (-model(torch.ones(1, 1, dtype=torch.bfloat16))).sum().backward()
        optimizer.step(1e-3)
    exact = model.weight.item() + optimizer.state_tensors()["compensation.weight"].item()
    assert exact == pytest.approx(1.04, abs=4e-4)


def test_its_state_survives_a_round_trip_to_the_bit():
    def made() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)).to(torch.bfloat16)
        return model, Optimizer(model, SETTINGS)

    def go(model: nn.Module, optimizer: Optimizer, seed: int) -> None:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed)).bfloat16()
        model(x).pow(2).mean().backward()
        optimizer.step(1e-2)

    model, optimizer = made()
    for step in range(3):
        go(model, optimizer, step)
    saved = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    other, resumed = made()
    other.load_state_dict(model.state_dict())
    resumed.load_state_tensors(saved, 3)
    for step in range(3, 6):
        go(model, optimizer, step)
        go(other, resumed, step)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    ours, theirs = optimizer.state_tensors(), resumed.state_tensors()
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k]) for k in ours)
