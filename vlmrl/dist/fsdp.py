"""A policy whose parameters, gradients and optimizer state lie in shards on all processes (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from vlmrl.dist.world import World


def shard(
    policy: nn.Module, layers: list[nn.Module], world: World, device: torch.device, *,
    compute_dtype: torch.dtype | None = None, group_size: int | None = None, offload: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:  # fmt: skip
    """Shard a policy in place, every layer as a unit of its own and the rest with the root.

    Gradients are SUMMED over the processes: a loss is divided by the step's one denominator before its backward.

    Args:
        layers: modules that run as a whole, exactly once a row; each is gathered when it runs. None of them: everything
            is gathered for the whole row, for policies that run a layer as often as a row's groups ask for.
        device: that computes; parameters may still lie elsewhere.
        compute_dtype: of forward and backward; what is trained is then held in float32. None = as the parameters are.
        group_size: processes that hold one whole copy between them, a divisor of their number; None = all. Gathering
            stays within these (ranks follow each other on a machine), and only gradients cross over.
        offload: parameters, gradients and optimizer state live in main memory between their uses.
        exact: modules that compute in their parameters' own dtype.
    """
    size = group_size or world.size
    if size == world.size:
        mesh = init_device_mesh(device.type, (size,))
    else:
        mesh = init_device_mesh(device.type, (world.size // size, size), mesh_dim_names=("copy", "shard"))
    options: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }  # fmt: skip
    # Inputs stay as the caller made them, as in one process: pixels, and the rotary tables that a vision tower computes
    # in float32 once and hands to its layers, would be rounded.
    precision = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in exact:
        fully_shard(module, mp_policy=precision(), **options)
    mixed = precision(param_dtype=compute_dtype)
    for module in [*layers, policy]:
        for parameter in module.parameters() if compute_dtype is not None else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = parameter.data.float()  # unit by unit: never all of the model twice
        fully_shard(module, mp_policy=mixed, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other


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
        _forget_order(units)


def _forget_order(units: Sequence[FSDPModule]) -> None:
    """FSDP notes in what order its units ran and gathers them ahead in the reverse of it. What ran here, as often as
    this process alone asked for, must not decide what all gather together in the next backward pass.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()


def regather(policy: nn.Module) -> None:
    """Forget what was gathered: the shards were changed behind it. Changes nothing where nothing is sharded."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_part(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """The part of a tensor that this process holds: of a sharded one, or of a whole one if it were sharded as `like`
    is. A view; all of it where nothing is sharded.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if not isinstance(like, DTensor):
        return tensor
    first, last = own_rows(like)
    return tensor[first:last]


def own_rows(like: Tensor) -> tuple[int, int]:
    """[first, last) row of a tensor held here (FSDP cuts rows); all where it is not sharded. A scalar is one."""
    rows = like.shape[0] if like.ndim else 1
    if not isinstance(like, DTensor):
        return 0, rows
    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return min(starts[0], rows), min(starts[0], rows) + sizes[0]


def sharded_as(part: Tensor, like: Tensor) -> Tensor:
    """The whole tensor of which this process holds `part`, sharded as `like` is; `part` where that is not sharded."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor as every process has it whole (all of them must ask); others as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class HostCopies:
    """Copies of tensors in main memory, each in the same place every time: memory is asked for once.

    Args: pinned: whether a GPU copies there at full speed.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._places: dict[str, Tensor] = {}

    def take(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of these, of sharded ones this process's part. Those of the same kind that were taken before are gone.

        All are there when this returns; a sharded tensor's copy says the same of itself as that does.
        """
        return {name: self._copy(f"{kind}.{name}", tensor.detach()) for name, tensor in tensors.items()}

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        part = own_part(tensor)
        place = self._places.get(key)
        if place is None or (place.shape, place.dtype) != (part.shape, part.dtype):
            place = self._places[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self.pinned)
        place.copy_(part)
        return DTensor(place, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else place
