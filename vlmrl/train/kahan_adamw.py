"""AdamW that keeps its weights in bfloat16 and loses no update to rounding: 10 bytes per parameter instead of 14."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class KahanAdamW(torch.optim.Optimizer):
    """AdamW with Kahan summation of the updates.

    A weight in bfloat16 has 8 significant bits: an update of a thousandth of it would be rounded away. The rounding
    error of each addition is kept beside the weight (`compensation`, of the weight's dtype) and added with the next
    update, so that weight + compensation has about 16 bits. The first moment has the weight's dtype, too. The second is
    float32, since its small changes, of (1 - beta2), would be rounded away in the same way. Gradients may be float32.
    The arithmetic is float32.

    Source: Kahan 1965 (Further remarks on reducing truncation errors); for training, arXiv:2010.06192.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every parameter that has a gradient, once."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    state = self.state[weight]
                    if not state:
                        state["step"] = torch.tensor(0.0)
                        state["exp_avg"], state["compensation"] = torch.zeros_like(weight), torch.zeros_like(weight)
                        state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["step"] += 1
                    change = _adamw_change(weight, weight.grad.float(), state, group)
                    kahan_add(weight, state["compensation"], change)


def _adamw_change(weight: Tensor, gradient: Tensor, state: dict[str, Tensor], group: dict[str, Any]) -> Tensor:
    """Return AdamW's change of the weight, float32, in the weight's shape. Update the moments in place."""
    (beta1, beta2), step = group["betas"], float(state["step"])
    mean = torch.lerp(state["exp_avg"].float(), gradient, 1 - beta1)
    state["exp_avg"].copy_(mean)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
    # Weight decay acts on the unrounded weight.
    exact = weight.float() + state["compensation"].float()
    return mean.div_(scale).mul_(-group["lr"] / (1 - beta1**step)) - group["lr"] * group["weight_decay"] * exact


def kahan_add(total: Tensor, compensation: Tensor, change: Tensor) -> None:
    """Add `change` to `total` in place, and keep the rounding error in `compensation` for the next addition.

    Args:
        total, compensation: tensors of the same low-precision dtype.
        change: float32.
    """
    exact = total.float() + (compensation.float() + change)
    total.copy_(exact)
    compensation.copy_(exact - total.float())
