"""Compiled layers (`model.compile`): torch.compile makes one graph of each kind of text layer and of vision block.

Compiled code may not depend on the spans of a row, or each row would be compiled anew. So the attention reads them in
operations that the compiler does not look into. Such an operation takes tensors alone: it gets the number of the row's
plan in one, and finds the plan by it. All other code of a layer depends on nothing but the number of tokens.

Only the passes over packed rows are compiled. The built-in engine decodes with the same modules as they are.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial, wraps
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, FailOnRecompileLimitHit, TorchDynamoException
from transformers.modeling_layers import GradientCheckpointingLayer

from vlmrl.errors import CheckpointError
from vlmrl.model.caches import Group, row_groups, scale_of, split_backward, split_forward, windows_as_groups
from vlmrl.model.families import part_of, units_of
from vlmrl.model.packing import RowPlan
from vlmrl.redaction.redact import first_line

Function = TypeVar("Function", bound=Callable[..., Any])
BACKEND = "inductor"
"""Name of torch's compiler of graphs."""
MOST_GRAPHS = 64
"""Largest number of graphs of one function: kinds of layers, with and without gradient, with and without adapter."""

_warn = cache(logging.getLogger(__name__).warning)  # once for all layers of a kind
_numbers = itertools.count()
_plans: WeakValueDictionary[int, RowPlan] = WeakValueDictionary()


def numbered(plan: RowPlan) -> RowPlan:
    """Return the plan of a row with a number, under which operations of compiled layers find it while it lives."""
    number = next(_numbers)
    plan = replace(plan, number=torch.tensor(number))
    _plans[number] = plan
    return plan


def plan_of(number: Tensor) -> RowPlan:
    """Return the plan with a number. Raises: RuntimeError if it lives no more."""
    if (plan := _plans.get(int(number))) is None:
        raise RuntimeError("the plan of a packed row has gone before the backward pass")
    return plan


def keep_for_backward(plan: RowPlan, hidden: Tensor) -> None:
    """Keep a plan as long as autograd's graph of the hidden states: compiled layers need it in the backward pass."""
    if hidden.grad_fn is not None:
        hidden.grad_fn.metadata["row_plan"] = plan  # pyright: ignore[reportIndexIssue]


def opaque(function: Function) -> Function:
    """Return a function that the compiler leaves as it is. A layer that calls it cannot be one graph."""
    return cast(Function, torch.compiler.disable(function))


def compile_layers(policy: Any) -> None:
    """Compile the text layers and vision blocks of a policy, each when it first runs.

    A layer is compiled as one graph. If it cannot be one, it runs as it is, with a warning that says why: its code
    depends on numbers in tensors, or its attention is FlexAttention (which is compiled by itself) or runs a row piece
    by piece. Text layers of a policy without packed rows run as they are too.

    The compiler decides itself which tensors it keeps for the backward pass, so `recomputing_cheap` leaves compiled
    layers alone. Gradient checkpointing and sharding work on a layer as a whole, outside of its graph.
    """
    from torch._dynamo import config
    from torch._functorch import config as kept

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that a CPU has no CUDA
    # Compute cheap inputs of matrix products again. Otherwise layers keep up to 28% more than the memory plan counts.
    if hasattr(kept, "ban_recompute_materialized_backward"):  # newer versions of torch
        kept.ban_recompute_materialized_backward = False
    names = {module: name for name, module in policy.model.named_modules()}
    # Not the embeddings and pooling heads of vision towers, which are units too.
    layers = {m for layer in names if isinstance(layer, GradientCheckpointingLayer) for m in layer.modules()}
    parts = {unit: part_of(f"{names[unit]}.") for unit in units_of(policy.model) if unit in layers}
    compiled = {unit for unit, part in parts.items() if part == "vision" or policy.sharing == "packed"}
    cheap = policy.cheap

    def leave(*without: Any) -> None:
        compiled.difference_update(without)
        inside = {module for unit in compiled for module in unit.modules()}
        policy.cheap = [module for module in cheap if module not in inside]

    for unit in compiled:
        unit.forward = _compiled(unit, parts[unit] == "vision", leave)
    leave()
    policy.compiled = True


def _compiled(layer: Any, is_vision: bool, leave: Callable[[Any], None]) -> Callable[..., Any]:
    """Return the forward of a layer, compiled for packed rows and, in a vision tower, for all images.

    Newer versions of transformers put checkpointing into the class's `forward`: it stays outside of the graph here too.
    If the layer cannot be one graph, `leave` is called with it.
    """
    forward, own = layer.forward, type(layer).forward
    checkpoints = own.__code__.co_name == "forward_with_checkpointing"
    inner = partial(own.__wrapped__, layer) if checkpoints else forward
    graph, is_whole = torch.compile(inner, dynamic=True, fullgraph=True, backend=BACKEND), True

    def run_graph(*inputs: Any, **named: Any) -> Any:
        # A layer is computed again in eval mode. Without dropout both modes are the same: one graph is enough.
        if training := layer.training:
            layer.train(False)
        try:
            return graph(*inputs, **named)
        finally:
            layer.train(training)

    @wraps(forward)
    def run(*inputs: Any, **named: Any) -> Any:
        nonlocal is_whole
        plan = named.get("row_plan")
        is_known = is_vision or (isinstance(plan, RowPlan) and plan.number is not None)
        if not is_known or not is_whole or torch.is_inference_mode_enabled():  # the built-in engine's mode
            return forward(*inputs, **named)
        # Text layers get what is computed of a row's images, and make no use of it; rows without images have none.
        needed = {name: x for name, x in named.items() if is_vision or not name.startswith("image_")}
        again = layer.training and torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)
        try:
            if checkpoints and again:
                return layer._gradient_checkpointing_func(partial(run_graph, **needed), *inputs)
            return run_graph(*inputs, **needed)
        except BackendCompilerFailed as error:
            message = f"a layer cannot be compiled: {first_line(error.inner_exception)}"
            hint = "install a C compiler, if there is none; or --set model.compile=false"
            raise CheckpointError(message, hint=hint) from error
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            is_whole = False
            leave(layer)
            _warn(f"{type(layer).__name__} is not compiled: {first_line(error)}")
            return forward(*inputs, **named)

    return run


def _groups_at(where: Tensor) -> tuple[Sequence[Group], bool]:
    """Return the groups of the row whose plan has this number, or windows with these starts; and whether causal."""
    return (row_groups(plan_of(where)), True) if where.ndim == 0 else (windows_as_groups(where), False)


@torch.library.custom_op("vlmrl::split_rows", mutates_args=())
def split_rows(query: Tensor, key: Tensor, value: Tensor, where: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention of what `_groups_at` finds, and what its backward pass needs: see `split_forward`."""
    return split_forward(query, key, value, *_groups_at(where), scale)


@split_rows.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, where: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _, heads, tokens, width = query.shape
    lse = query.new_empty(key.shape[1], heads // key.shape[1], tokens, dtype=torch.float32)
    return query.new_empty(1, tokens, heads, width).transpose(1, 2), lse


@torch.library.custom_op("vlmrl::split_rows_backward", mutates_args=())
def split_rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, where: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `split_rows`."""
    grads = split_backward(grad, query, key, value, out, lse, *_groups_at(where), scale)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@split_rows_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, where: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_split(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, where, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, where)


def _split_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, where = ctx.saved_tensors
    return (*split_rows_backward(grad, query, key, value, out, lse, where, ctx.scale), None, None)


split_rows.register_autograd(_split_gradient, setup_context=_keep_split)


def compiled_split(query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None) -> Tensor:
    """Return what `split_row_attention` does, in a layer that is being compiled."""
    assert plan.number is not None
    return split_rows(query, key, value, plan.number, scale_of(query, scaling))[0]


@torch.library.custom_op("vlmrl::copy_keys", mutates_args=())
def copy_keys(x: Tensor, key_at: Tensor, own_at: Tensor, number: Tensor) -> Tensor:
    """Return keys or values [N, heads, D] of the row as the sequences of a varlen call; see `VarlenIndex`."""
    return x.index_select(0, key_at)


@copy_keys.register_fake
def _(x: Tensor, key_at: Tensor, own_at: Tensor, number: Tensor) -> Tensor:
    return x.new_empty(key_at.shape[0], *x.shape[1:])


@torch.library.custom_op("vlmrl::sum_copies", mutates_args=())
def sum_copies(gradient: Tensor, own_at: Tensor, number: Tensor) -> Tensor:
    """Return the gradient of `copy_keys`."""
    index: Any = plan_of(number).prepared["varlen"]
    return index.sum_copies(gradient)


@sum_copies.register_fake
def _(gradient: Tensor, own_at: Tensor, number: Tensor) -> Tensor:
    return gradient.new_empty(own_at.shape[0], *gradient.shape[1:])


def _keep_copied(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[2:])


def _copied_gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    return sum_copies(gradient.contiguous(), *ctx.saved_tensors), None, None, None


copy_keys.register_autograd(_copied_gradient, setup_context=_keep_copied)
