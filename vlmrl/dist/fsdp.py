"""Policy whose parameters, gradients and optimizer state are sharded over all ranks (FSDP2)."""

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
    policy: nn.Module,
    layers: list[nn.Module],
    world: World,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None = None,
    group_size: int | None = None,
    offload: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Shard a policy in place: every layer is a unit of its own, the rest belongs to the root.

    Gradients are SUMMED over the ranks: a loss is divided by the update's one denominator before its backward.

    Args:
        layers: modules that run as a whole, exactly once per row; each is gathered when it runs. Empty: everything is
            gathered for the whole row, for policies in which a row's groups decide how often a layer runs.
        device: device of the computation; parameters may still be elsewhere.
        compute_dtype: of forward and backward; trained parameters are then held in float32. None = the parameters' own.
        group_size: number of ranks that hold one whole copy between them, a divisor of the world's size; None = all.
            Gathering stays within such a group (its ranks are consecutive on a machine), and only gradients cross it.
        offload: parameters, gradients and optimizer state are in main memory between their uses.
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
    }
    # Inputs keep their dtype, as in one process. A cast would round pixels, and the rotary tables that a vision tower
    # computes once in float32 and passes to its layers.
    precision = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in exact:
        fully_shard(module, mp_policy=precision(), **options)
    mixed = precision(param_dtype=compute_dtype)
    for module in [*layers, policy]:
        for parameter in module.parameters() if compute_dtype is not None else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = (
                    parameter.data.float()
                )  # unit by unit, so that the whole model is never in memory twice
        fully_shard(module, mp_policy=mixed, **options)
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo only has sums


@contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """Context manager: every rank has all parameters whole, and may run any part of the policy without the others.

    The built-in engine needs this. It changes nothing if nothing is sharded. Without gradient.
    """
    units = [m for m in policy.modules() if isinstance(m, FSDPModule)]
    if not units:
        yield
        return
    root = units[0]
    root._get_fsdp_state()._lazy_init()  # otherwise FSDP would make the first layer that runs the root
    root.set_reshard_after_forward(False)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)  # the root's backward pass follows at once
        _forget_order(units)


def _forget_order(units: Sequence[FSDPModule]) -> None:
    """Clear the order in which FSDP's units ran.

    FSDP gathers units ahead in the reverse of this order. The runs inside `gathered` differ between ranks, so they must
    not decide what all ranks gather together in the next backward pass.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()


def regather(policy: nn.Module) -> None:
    """Drop gathered parameters, because the shards were changed. Does nothing if nothing is sharded."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_part(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of a tensor that this rank holds, as a view; the whole tensor if nothing is sharded.

    Args:
        tensor: sharded, or whole.
        like: sharded tensor; a whole `tensor` is cut as this one is.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if not isinstance(like, DTensor):
        return tensor
    first, last = own_rows(like)
    return tensor[first:last]


def own_rows(like: Tensor) -> tuple[int, int]:
    """Return the rows [first, last) of a tensor that this rank holds (FSDP cuts rows).

    All rows if it is not sharded. A scalar is one row.
    """
    rows = like.shape[0] if like.ndim else 1
    if not isinstance(like, DTensor):
        return 0, rows
    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return min(starts[0], rows), min(starts[0], rows) + sizes[0]


def sharded_as(part: Tensor, like: Tensor) -> Tensor:
    """Return the tensor of which this rank holds `part`, sharded as `like` is; `part` itself if `like` is whole."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole (all ranks must call this together); return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class HostCopies:
    """Copies of tensors in main memory, each in the same buffer every time, so memory is allocated once.

    Args:
        pinned: whether the memory is pinned, so that a GPU copies to it at full speed.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._places: dict[str, Tensor] = {}

    def take(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of these tensors; of sharded ones, of this rank's part.

        They overwrite earlier copies of the same kind. All are complete when this returns. The copy of a sharded tensor
        is a DTensor with the same layout.
        """
        return {name: self._copy(f"{kind}.{name}", tensor.detach()) for name, tensor in tensors.items()}

    def _copy(self, key: str, tensor: Tensor) -> Tensor:
        part = own_part(tensor)
        place = self._places.get(key)
        if place is None or (place.shape, place.dtype) != (part.shape, part.dtype):
            place = self._places[key] = torch.empty(part.shape, dtype=part.dtype, pin_memory=self.pinned)
        place.copy_(part)
        return DTensor(place, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else place
