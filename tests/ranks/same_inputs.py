"""Whether a sharded policy in bfloat16 computes what it computes in one process, family by family.

The policy runs a row alone and then in shards, every process the same row. Every module's floating-point inputs are
noted: what one process computes in float32 (pixels, the rotary tables of a vision tower) must not arrive rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from parity import world as world_of
from tinyfamilies import build
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from vlmrl.dist.fsdp import shard, whole
from vlmrl.dist.world import World
from vlmrl.model.families import sharded_units
from vlmrl.model.load import share_prefix
from vlmrl.model.packing import PackedRow, make_row
from vlmrl.model.policy import Policy

Seen = dict[str, list[torch.Tensor]]


@contextmanager
def noting(policy: Policy, seen: Seen) -> Iterator[None]:
    """Inside, `seen` gets every module's floating-point inputs, the parameters of sharded ones aside."""

    def hook(name: str) -> Callable[..., None]:
        def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor) and x.is_floating_point()]
            seen.setdefault(name, []).extend(x.detach().clone() for x in given if not isinstance(x, DTensor))

        return note

    handles = [m.register_forward_pre_hook(hook(name), with_kwargs=True) for name, m in policy.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def summed_in_float32(policy: Policy, layers: Sequence[torch.nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Inside, the gradients of a layer's runs in a row are summed in float32, as shards sum them: {} before any.

    Autograd sums them in the parameter's dtype, which rounds. Each run is given leaves of its own.
    """
    sums: dict[str, torch.Tensor] = {}
    names = {p: n for n, p in policy.named_parameters()}

    def add(name: str, leaf: torch.Tensor) -> None:
        sums[name] = sums.get(name, torch.zeros(leaf.shape)) + leaf.grad.float()

    def swap(layer: torch.nn.Module, given: Any) -> None:
        for module, key, p in own[layer]:
            module._parameters[key] = torch.nn.Parameter(p.detach())
            module._parameters[key].register_post_accumulate_grad_hook(partial(add, names[p]))

    own = {x: [(m, k, p) for m in x.modules() for k, p in m._parameters.items() if p is not None] for x in layers}
    handles = [layer.register_forward_pre_hook(swap) for layer in layers]
    try:
        yield sums
    finally:
        for handle in handles:
            handle.remove()
        for module, key, p in (each for of_layer in own.values() for each in of_layer):
            module._parameters[key] = p


def run(
    policy: Policy, row: PackedRow, repeated: Sequence[torch.nn.Module] = ()
) -> tuple[Seen, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(inputs of every module, the outputs, the gradient of the mean log-prob by parameter).

    Args: repeated: layers that run several times, whose gradients are to be summed in float32.
    """
    seen: Seen = {}
    policy.zero_grad(set_to_none=True)
    with summed_in_float32(policy, repeated) as sums:
        with noting(policy, seen):
            stats = policy(row)
        stats.logp.sum().backward()
    gradients = sums | {n: whole(p.grad).float() for n, p in policy.named_parameters() if p.grad is not None}
    return seen, {"logp": stats.logp.detach(), "entropy": stats.entropy}, gradients


def differences(alone: Any, shared: Any, size: int) -> dict[str, Any]:
    """What is not the same, bit by bit; of gradients, which are summed over processes, how far apart they are."""
    inputs = []
    for name, given in alone[0].items():
        theirs = shared[0][name]
        assert len(given) == len(theirs), name
        pairs = zip(given, theirs, strict=True)
        inputs += [f"{name}: {a.dtype} and {b.dtype}" for a, b in pairs if not torch.equal(a, b)]
    outputs = [name for name, value in alone[1].items() if not torch.equal(value, shared[1][name])]
    gap = sum(float((shared[2][n] / size - g).square().sum()) for n, g in alone[2].items()) ** 0.5
    norm = sum(float(g.square().sum()) for g in alone[2].values()) ** 0.5
    return {"inputs": inputs, "outputs": outputs, "gradients": gap / norm, "modules": len(alone[0])}


FAMILIES = ("qwen2_5_vl", "qwen3_vl_moe", "gemma4", "qwen3_5", "llava")
"""Tables of a vision tower, routers, pixels that the tower takes in float32; several passes per row."""


def compare_families(world: World) -> dict[str, Any]:
    """Family -> `differences` between one process and all of them."""
    found: dict[str, Any] = {}
    for name in FAMILIES:
        family = build(name)
        model = family.model.bfloat16()
        share_prefix(model)
        policy = Policy(model)
        row = make_row(world_of(family)[:2])
        layers, repeated = sharded_units(policy.model, policy.sharing), policy.sharing != "packed"
        alone = run(policy, row, layers if repeated else ())
        shard(policy, layers, world, torch.device("cpu"), repeated=repeated, compute_dtype=torch.bfloat16)
        found[name] = differences(alone, run(policy, row), world.size)
    return found
