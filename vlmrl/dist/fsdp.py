"""A policy whose parameters, gradients and optimizer state lie in shards on all processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vlmrl.dist.world import World


def shard(
    policy: nn.Module, layers: list[nn.Module], world: World, device: torch.device, *,
    compute_dtype: torch.dtype | None = None, offload: bool = False,
) -> None:  # fmt: skip
    """Shard a policy in place, every layer as a unit of its own and the rest with the root.

    Gradients are SUMMED over the processes: a loss is divided by the step's one denominator before its backward.

    Args:
        layers: modules that run as a whole, exactly once a row; each is gathered when it runs. None of them: everything
            is gathered for the whole row, for policies that run a layer as often as a row's groups ask for.
        compute_dtype: of forward and backward; None = that of the parameters, which stay as they are.
        offload: parameters, gradients and optimizer state live in main memory between their uses.
    """
    mesh = init_device_mesh(device.type, (world.size,))
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


def units_of(model: nn.Module) -> list[nn.Module]:
    """The layers of a transformers model that it says must not be split: of its text model and its vision tower."""
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in model.modules() if type(m).__name__ in names]


@contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """Inside, every process has all parameters whole, and may run any part of the policy as often as it likes, without
    the others: what a built-in engine needs. Changes nothing where nothing is sharded. Without gradient.
    """
    units = [m for m in policy.modules() if isinstance(m, FSDPModule)]
    if not units:
        yield
        return
    root = units[0]
    root._get_fsdp_state()._lazy_init()  # else the first layer to run would take itself for the root
    root.set_reshard_after_forward(False)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)  # its backward pass follows at once


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor as every process has it whole (all of them must ask); others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
