"""Linear layers for decoding on the CPU, where a step has few rows and the time goes into reading the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_ROWS = 64
"""More rows than this (a prompt) are multiplied as always."""
HAS_KERNEL = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""Whether this torch has oneDNN's product, which is not part of its public interface for float32."""


@contextmanager
def fast_linears(model: nn.Module) -> Iterator[None]:
    """While in it, the model's plain float32 linear layers on the CPU use oneDNN for few rows. Without gradient.

    torch's own choice, MKL, copies the weights into another order at every call: measured 1.6 times slower on 16 rows.
    """
    layers = [m for m in model.modules() if type(m) is nn.Linear and "forward" not in vars(m) and _fits(m)]
    for layer in layers:
        layer.forward = MethodType(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _fits(layer: nn.Linear) -> bool:
    return HAS_KERNEL and layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) > MAX_ROWS or x.dtype != torch.float32:
        return F.linear(x, layer.weight, layer.bias)
    out = torch.ops.mkldnn._linear_pointwise(rows, layer.weight, layer.bias, "none", [], "")
    return out.view(*x.shape[:-1], layer.out_features)
