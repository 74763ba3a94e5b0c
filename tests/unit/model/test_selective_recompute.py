"""Elementwise activations made again in the backward pass: the same gradients bit for bit, and less that is kept."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from parity import adapted, packed, world
from tinyfamilies import build
from torch import Tensor, nn

from vlmrl.model import policy as selective_recompute
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.policy import Policy, cheap_modules, recomputing_cheap
from vlmrl.recipe.schema import Lora


class GatedMlp(nn.Module):
    """As in Llama's family, behind a norm's product with its weight."""

    def __init__(self, activation: nn.Module | None = None, width: int = 8) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.act_fn = activation or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


def kept_bytes(mlp: nn.Module, x: Tensor, cheap: bool) -> tuple[int, list[Tensor]]:
    """Bytes of distinct activations that autograd keeps, and the gradients of all parameters and of x."""
    x = x.clone().requires_grad_()
    storages: dict[int, int] = {}

    def count(kept: object) -> None:
        if isinstance(kept, selective_recompute._Packed):
            count(kept.recipe)
        elif isinstance(kept, selective_recompute._Recipe):
            for part in kept.inputs:
                count(part)
        elif isinstance(kept, Tensor):
            storages[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()

    hooks = torch.autograd.graph.saved_tensors_hooks

    class Counting(hooks):  # type: ignore[misc, valid-type]
        def __init__(self, pack, unpack) -> None:
            def counted(t: Tensor):
                kept = pack(t)
                count(kept)
                return kept

            super().__init__(counted, unpack)

    torch.autograd.graph.saved_tensors_hooks = Counting  # type: ignore[misc]
    try:
        with recomputing_cheap(cheap_modules(mlp) if cheap else [nn.Identity()]):
            out = mlp(x)
    finally:
        torch.autograd.graph.saved_tensors_hooks = hooks  # type: ignore[misc]
    for p in mlp.parameters():
        storages.pop(p.data_ptr(), None)
    inputs = [x, *mlp.parameters()]
    return sum(storages.values()), list(torch.autograd.grad(out.square().sum(), inputs))


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")])
def test_gated_mlp_keeps_three_of_six(activation: nn.Module) -> None:
    """Autograd keeps x, scale x, gate, up, act(gate), their product and (our square's) output's input: made again are
    scale x, act(gate) and the product: gate, up and x are left."""
    torch.manual_seed(0)
    mlp, x = GatedMlp(activation), torch.randn(5, 8)
    plain, wanted = kept_bytes(mlp, x, cheap=False)
    less, found = kept_bytes(mlp, x, cheap=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert (plain, less) == (6 * x.nbytes, 3 * x.nbytes)


def test_unknown_activation_is_kept() -> None:
    mlp, x = GatedMlp(nn.Tanh()), torch.randn(5, 8)
    (plain, wanted), (less, found) = kept_bytes(mlp, x, cheap=False), kept_bytes(mlp, x, cheap=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert plain - less == 2 * x.nbytes  # scale x, and the product of two tensors that are kept


def test_frozen_factor_is_not_made_again() -> None:
    """With a frozen weight autograd does not keep the other factor: the product itself must be kept."""
    mlp, x = GatedMlp(), torch.randn(5, 8)
    mlp.scale.requires_grad_(False)
    (_, wanted), (_, found) = _grads(mlp, x, False), _grads(mlp, x, True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_tensors_without_an_address_are_not_taken_for_each_other(monkeypatch) -> None:
    """Tensors of a subclass that keeps its numbers elsewhere all have address 0."""
    mlp, x = GatedMlp(), torch.randn(5, 8)
    _, wanted = _grads(mlp, x, False)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda _: 0)
    _, found = _grads(mlp, x, True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def _grads(mlp: GatedMlp, x: Tensor, cheap: bool) -> tuple[Tensor, list[Tensor]]:
    x = x.clone().requires_grad_()
    with recomputing_cheap(cheap_modules(mlp) if cheap else [nn.Identity()]):
        out = mlp(x)
    wanted = [x, *(p for p in mlp.parameters() if p.requires_grad)]
    return out, list(torch.autograd.grad(out.square().sum(), wanted))


def test_changed_in_place_is_kept_as_it_is() -> None:
    """A tensor that is changed after its recipe was noted is not what the recipe says any more."""
    layer = nn.Linear(4, 4, bias=False)
    x = torch.randn(3, 4, requires_grad=True)

    class ChangesItsInput(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input.add_(1.0), self.weight)

    changing = ChangesItsInput(4, 4, bias=False)
    changing.weight = layer.weight
    with recomputing_cheap([changing]):
        found = changing(F.silu(x))
    wanted = layer(F.silu(x) + 1.0)
    for a, b in zip(*(torch.autograd.grad(y.sum(), [x, layer.weight]) for y in (found, wanted)), strict=True):
        assert torch.equal(a, b)


def test_address_that_is_used_again_is_another_tensor() -> None:
    """A tensor is freed after its recipe was noted and another takes its place: it must not be mistaken for it."""
    layer = nn.Linear(64, 64, bias=False)
    x = torch.randn(64, 64, requires_grad=True)
    with recomputing_cheap([layer]):
        with torch.no_grad():
            noted = F.silu(x)
        noted = F.silu(x)
        layer(noted)
        address = noted.data_ptr()
        del noted
        fresh = [torch.randn(64, 64) for _ in range(50)]  # one of them gets the freed place
        again = next((t for t in fresh if t.data_ptr() == address), fresh[0])
        y = torch.ones(64, 64, requires_grad=True)
        (y * again).sum().backward()
    assert y.grad is not None
    assert torch.equal(y.grad, again)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "smolvlm", "llava"])
@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
def test_families_get_the_same_gradients(name: str, lora: Lora | None, monkeypatch: pytest.MonkeyPatch) -> None:
    family = build(name)
    share_prefix(family.model)
    model = family.model if lora is None else adapted(family.model, lora)
    policy, items, made = Policy(model), world(family), []
    unpack = selective_recompute._Packed.unpack
    monkeypatch.setattr(selective_recompute._Packed, "unpack", lambda kept: made.append(kept.shape) or unpack(kept))
    found = packed(policy, items, 10_000)
    assert made
    made.clear()
    policy.cheap = []
    wanted = packed(policy, items, 10_000)
    assert not made
    for parameter, gradient in wanted.gradients.items():
        mine = found.gradients[parameter]
        assert (gradient is None) == (mine is None), parameter
        assert gradient is None or torch.equal(gradient, mine), parameter


def test_nothing_inside_gradient_checkpointing() -> None:
    family = build("qwen2_5_vl")
    whole = len(cheap_modules(family.model))
    checkpoint_gradients(family.model, "vision")
    text = cheap_modules(family.model)
    checkpoint_gradients(family.model)
    left = cheap_modules(family.model)
    names = {m: n for n, m in family.model.named_modules()}
    assert whole > len(text) > len(left)
    assert not any("visual.blocks" in names[m] for m in text if m in names)
    assert not any(".layers." in names[m] for m in left if m in names)


class Norm(nn.Module):
    """An operation that keeps its own output (rsqrt), as in every norm of Llama's family."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()


@pytest.mark.slow
def test_a_forward_pass_without_a_backward_leaves_nothing_behind():
    """As after memory ran out in the middle of it."""
    model = nn.Sequential(nn.Linear(8, 8), Norm(), GatedMlp(), Norm(), GatedMlp())
    x = torch.randn(3, 8)

    def alive() -> int:
        gc.collect()
        return sum(isinstance(o, Tensor) and o.grad_fn is not None for o in gc.get_objects())

    before = alive()
    with recomputing_cheap(cheap_modules(model)):
        out = model(x)
    assert alive() > before
    del out
    assert alive() == before
