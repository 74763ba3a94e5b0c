"""Policy whose parameters, gradients and optimizer state are sharded over all ranks (FSDP2).

A single rank holds everything. FSDP2 is of use there too: it keeps all this in main memory between uses (`offload`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    policy: Any,
    layers: list[nn.Module],
    world: World,
    device: torch.device,
    *,
    repeated: bool = False,
    compute_dtype: torch.dtype | None = None,
    group_size: int | None = None,
    offload: bool = False,
    exact: Sequence[nn.Module] = (),
) -> None:
    """Shard a policy in place: every layer is a unit of its own, all other modules belong to the root.

    Gradients are SUMMED over the ranks, not averaged, because each loss is divided by the update's denominator before
    its backward pass.

    Args:
        layers: modules that run as a whole, equally often and in the same order on all ranks; each is gathered when it
            runs. Empty = all parameters are gathered for the whole row.
        repeated: whether a layer may run several times before a backward pass. Its gradients are then reduced after
            each of its runs.
        device: device of the computation; the parameters may be on another one before the call.
        compute_dtype: dtype of forward and backward pass; trained parameters are then held in float32. None = the
            parameters' own dtype.
        group_size: number of ranks that together hold one copy of the policy, a divisor of the world's size; None =
            all. Parameters are gathered within such a group (its ranks are consecutive on a machine); only gradients
            are exchanged between groups.
        offload: whether parameters, gradients and optimizer state are in main memory between their uses.
        exact: modules that compute in the dtype of their parameters, not in `compute_dtype`.
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
    # Inputs keep their dtype, as in a single process. A cast would round the pixels, and also the rotary tables, which
    # a vision tower computes once in float32 and passes to its layers.
    precision = partial(MixedPrecisionPolicy, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in exact:
        fully_shard(module, mp_policy=precision(), **options)
    mixed = precision(param_dtype=compute_dtype)
    for module in [*layers, policy]:
        for parameter in module.parameters() if compute_dtype is not None else ():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.data = (
                    parameter.data.float()
                )  # unit by unit, so that there are never two copies of the whole model in memory
        fully_shard(module, mp_policy=mixed, **options)
    # FSDP warns of layers that return views. transformers changes no output in place, which is what could go wrong.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    for layer in layers if repeated else ():
        layer.register_forward_pre_hook(_separate_run)  # after FSDP's own hook, which gathers the layer
    policy.sharded = True
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            if world.size > 1:  # a single rank divides by 1 anyway, but with a factor it would copy each gradient
                module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo supports only sums


def _separate_run(layer: nn.Module, inputs: object) -> None:
    """Give a gathered layer leaves of its own for the run that begins: a forward pre-hook.

    FSDP gathers a layer into the same parameters in every run. Autograd adds the gradients of all runs before it stores
    them in a parameter: in the middle of a backward pass, every layer would have a whole gradient in memory. Leaves of
    its own, which share the parameter's memory, make a run's gradient complete when its backward pass is.
    """
    group = layer._get_fsdp_state()._fsdp_param_group if isinstance(layer, FSDPModule) else None
    for parameter in group.fsdp_params if group is not None and torch.is_grad_enabled() else ():
        gathered_parameter = parameter._unsharded_param
        if gathered_parameter.requires_grad:
            leaf = nn.Parameter(gathered_parameter.detach())
            leaf.register_post_accumulate_grad_hook(partial(_pass_on, gathered_parameter))
            parameter._setattr_on_modules(leaf)  # until FSDP frees the layer


def _pass_on(parameter: nn.Parameter, leaf: Tensor) -> None:
    """Move the gradient of a run's leaf to the layer's parameter, where FSDP reduces it."""
    gradient, leaf.grad = leaf.grad, None
    parameter.grad = gradient if parameter.grad is None or gradient is None else parameter.grad.add_(gradient)


def allocate(policy: nn.Module, device: torch.device) -> None:
    """Give memory without values to the parameters of a sharded policy that are on the meta device.

    Args:
        device: main memory if the policy is offloaded.
    """
    parameters: dict[int, nn.Parameter] = {}  # tied parameters stay tied
    for module in policy.modules():
        for name, old in module._parameters.items():
            if old is not None and old.device.type == "meta":
                if id(old) not in parameters:
                    values = torch.empty_like(old.detach(), device=device)
                    parameters[id(old)] = nn.Parameter(values, old.requires_grad)
                module._parameters[name] = parameters[id(old)]
    for module in policy.modules():
        group = module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        for parameter in group.fsdp_params if group is not None else ():
            parameter.reset_sharded_param()  # it pads and pins the memory


@contextmanager
def gathered(policy: nn.Module) -> Iterator[None]:
    """Context manager: every rank holds all whole parameters, and can run parts of the policy without the other ranks.

    The built-in engine needs this. It has no effect if the policy is not sharded. No gradients are computed inside.
    """
    units = [m for m in policy.modules() if isinstance(m, FSDPModule)]
    if not units:
        yield
        return
    root = units[0]
    root._get_fsdp_state()._lazy_init()  # otherwise FSDP would take the first layer that runs as the root
    root.set_reshard_after_forward(False)
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)  # the root's backward pass follows immediately
        _forget_order(units)


def _forget_order(units: Sequence[FSDPModule]) -> None:
    """Clear the order in which FSDP's units ran.

    In a backward pass, FSDP gathers units in advance, in the reverse of this order. Inside `gathered`, ranks run units
    in different orders. These orders must not affect the next backward pass, in which all ranks gather the same units.
    """
    for unit in units:
        state = unit._get_fsdp_state()
        state._comm_ctx.post_forward_order.clear()
        if state._fsdp_param_group is not None:
            state._fsdp_param_group._post_forward_indices.clear()


def can_repeat(policy: nn.Module) -> bool:
    """Return whether `end_failed_pass` works. torch before 2.13 may lack what it needs for a sharded policy."""
    root = next((m for m in policy.modules() if isinstance(m, FSDPModule)), None)
    return root is None or hasattr(root, "reset_iter_state")


def end_failed_pass(policy: nn.Module) -> None:
    """End a forward or backward pass that raised an error, so that the next pass starts as if it had never begun.

    All gathered parameters are freed, and the gradients of the failed pass are deleted. No effect if the policy is not
    sharded. Only for a single rank: the others may wait for this one in the middle of the pass.
    """
    units = [m for m in policy.modules() if isinstance(m, FSDPModule)]
    if not units:
        return
    units[0]._get_fsdp_state()._lazy_init()  # the error may have come before the first pass
    units[0].reset_iter_state()
    for unit in units:
        group = unit._get_fsdp_state()._fsdp_param_group
        for parameter in group.fsdp_params if group is not None else ():
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


def regather(policy: nn.Module) -> None:
    """Delete gathered parameters after the shards were changed. No effect if the policy is not sharded."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def own_part(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return the part of a tensor that this rank holds, as a view; the whole tensor if it is not sharded.

    Args:
        tensor: sharded or whole tensor.
        like: sharded tensor. If `tensor` is whole, it is cut in the same way as this one.
    """
    if isinstance(tensor, DTensor):
        return tensor.to_local()
    if not isinstance(like, DTensor):
        return tensor
    first, last = own_rows(like)
    return tensor[first:last]


def own_rows(like: Tensor) -> tuple[int, int]:
    """Return (first, last): this rank holds the rows [first, last) of a tensor, which FSDP cuts by rows.

    If the tensor is not sharded, they are all rows. A scalar has one row.
    """
    rows = like.shape[0] if like.ndim else 1
    if not isinstance(like, DTensor):
        return 0, rows
    sizes, starts = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return min(starts[0], rows), min(starts[0], rows) + sizes[0]


def sharded_as(part: Tensor, like: Tensor) -> Tensor:
    """Return the sharded tensor with the layout of `like` and this rank's `part`; `part` itself if `like` is whole."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def gatherer(tensors: Iterable[Tensor]) -> Callable[[Tensor], Tensor]:
    """Return `whole`, or, if none of a model's tensors is sharded, a function that returns its argument."""
    return whole if any(isinstance(tensor, DTensor) for tensor in tensors) else torch.as_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole (all ranks must call this together); return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


SLAB_BYTES = 1 << 30
"""Maximum size of a buffer of `HostCopies` in bytes: a power of two, because torch rounds pinned memory up to one."""


class HostCopies:
    """Copies of tensors in main memory. Each is always in the same place, so memory is allocated only once.

    Tensors of one dtype are views of a few large buffers, so that the size of pinned memory is not rounded up for each.

    Args:
        pinned: whether the memory is pinned, so that copies from a GPU have full speed.
    """

    def __init__(self, pinned: bool = False) -> None:
        self.pinned = pinned
        self._places: dict[str, dict[str, Tensor]] = {}

    def take(self, kind: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of these tensors; for a sharded tensor, a copy of this rank's part.

        They overwrite earlier copies of the same `kind`. All copies are complete when this method returns. The copy of
        a sharded tensor is a DTensor with the same layout.
        """
        parts = {name: own_part(tensor.detach()) for name, tensor in tensors.items()}
        places = self._places.get(kind, {})
        if _layout(places) != _layout(parts):
            places.clear()  # before new memory is allocated
            places = self._places[kind] = self._allocate(parts)
        for name, part in parts.items():
            places[name].copy_(part)
        return {
            name: DTensor(places[name], tensor._spec, requires_grad=False)
            if isinstance(tensor, DTensor)
            else places[name]
            for name, tensor in tensors.items()
        }

    def _allocate(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors without values, like `parts`, in buffers of at most SLAB_BYTES. A larger one has its own."""
        slabs: dict[torch.dtype, list[list[str]]] = {}
        filled: dict[torch.dtype, int] = {}
        for name, part in parts.items():
            of_dtype = slabs.setdefault(part.dtype, [[]])
            if of_dtype[-1] and filled[part.dtype] + part.nbytes > SLAB_BYTES:
                of_dtype.append([])
            filled[part.dtype] = part.nbytes + (filled[part.dtype] if of_dtype[-1] else 0)
            of_dtype[-1].append(name)
        places: dict[str, Tensor] = {}
        for dtype, of_dtype in slabs.items():
            for names in of_dtype:
                sizes = [parts[name].numel() for name in names]
                slab = torch.empty(sum(sizes), dtype=dtype, pin_memory=self.pinned)
                views = zip(names, slab.split(sizes), strict=True)
                places |= {name: view.view(parts[name].shape) for name, view in views}
        return places


def _layout(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
