"""Compiled layers (`model.compile`): torch.compile makes one graph of each kind of text layer and of vision block.

Compiled code may not depend on the spans of a row, or each row would be compiled anew. So the attention reads them in
operations that the compiler does not look into. Such an operation takes tensors alone: it gets the number of the row's
plan in one, and finds the plan by it. All other code of a layer depends on nothing but the number of tokens.

Only the passes over packed rows are compiled. The built-in engine decodes with the same modules as they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any, TypeVar, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed

from vlmrl.errors import CheckpointError
from vlmrl.model.caches import row_groups, scale_of, split_backward, split_forward
from vlmrl.model.families import part_of, units_of
from vlmrl.model.packing import RowPlan
from vlmrl.redaction.redact import first_line

Function = TypeVar("Function", bound=Callable[..., Any])
BACKEND = "inductor"
"""Name of torch's compiler of graphs."""
MOST_GRAPHS = 64
"""Largest number of graphs of one function: kinds of layers, with and without gradient, with and without adapter."""

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
    """Return a function that the compiler leaves as it is: a break in the graph."""
    return cast(Function, torch.compiler.disable(function))


def constant(function: Function) -> Function:
    """Return a function that the compiler calls once, for the same result ever after."""
    return cast(Function, torch.compiler.assume_constant_result(function))


def compile_layers(policy: Any) -> None:
    """Compile the text layers and vision blocks of a policy, each when it first runs.

    The compiler decides itself which tensors it keeps for the backward pass, so `recomputing_cheap` leaves these layers
    alone. Gradient checkpointing and sharding work on a layer as a whole, outside of its graph.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    names = {module: name for name, module in policy.model.named_modules()}
    units = units_of(policy.model)
    inside = {module for unit in units for module in unit.modules()}
    policy.cheap = [module for module in policy.cheap if module not in inside]
    has_breaks = policy.family.bidirectional != "never"
    for unit in units:
        unit.forward = _compiled(unit, part_of(f"{names[unit]}.") == "vision", has_breaks)
    policy.compiled = True


def _compiled(layer: Any, is_vision: bool, has_breaks: bool) -> Callable[..., Any]:
    """Return the forward of a layer, compiled for packed rows and, in a vision tower, for all images.

    Newer versions of transformers put checkpointing into the class's `forward`: it stays outside of the graph here too.
    A layer with breaks in its graph may run by another graph when it is computed again, so it is not compiled then.
    """
    forward, own = layer.forward, type(layer).forward
    checkpoints = own.__code__.co_name == "forward_with_checkpointing"
    inner = partial(own.__wrapped__, layer) if checkpoints else forward
    graph = torch.compile(inner, dynamic=True, backend=BACKEND)

    @wraps(forward)
    def run(*inputs: Any, **named: Any) -> Any:
        plan = named.get("row_plan")
        is_known = is_vision or (isinstance(plan, RowPlan) and plan.number is not None)
        again = layer.training and torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)
        if not is_known or (again and has_breaks):
            return forward(*inputs, **named)
        try:
            if checkpoints and again:
                return layer._gradient_checkpointing_func(partial(graph, **named), *inputs)
            return graph(*inputs, **named)
        except BackendCompilerFailed as error:
            message = f"a layer cannot be compiled: {first_line(error)}"
            hint = "install a C compiler, if there is none; or --set model.compile=false"
            raise CheckpointError(message, hint=hint) from error

    return run


@torch.library.custom_op("vlmrl::split_rows", mutates_args=())
def split_rows(query: Tensor, key: Tensor, value: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return the attention of the row with this plan, and what its backward pass needs: see `split_forward`."""
    return split_forward(query, key, value, row_groups(plan_of(number)), scale)


@split_rows.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, number: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    _, heads, tokens, width = query.shape
    lse = query.new_empty(key.shape[1], heads // key.shape[1], tokens, dtype=torch.float32)
    return query.new_empty(1, tokens, heads, width).transpose(1, 2), lse


@torch.library.custom_op("vlmrl::split_rows_backward", mutates_args=())
def split_rows_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `split_rows`."""
    grads = split_backward(grad, query, key, value, out, lse, row_groups(plan_of(number)), scale)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@split_rows_backward.register_fake
def _(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, number: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_split(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, number, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output, number)


def _split_gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    query, key, value, out, lse, number = ctx.saved_tensors
    return (*split_rows_backward(grad, query, key, value, out, lse, number, ctx.scale), None, None)


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
