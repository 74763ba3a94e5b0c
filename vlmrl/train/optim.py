"""AdamW in its variants, its learning-rate schedule, and the only code that updates weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vlmrl.dist.fsdp import own_part, whole
from vlmrl.errors import TrainError, install_line
from vlmrl.model.families import part_of
from vlmrl.train.kahan_adamw import KahanAdamW

if TYPE_CHECKING:  # an update of weights needs torch only, not the recipe's library
    from vlmrl.recipe.schema import Optim

STATE_DTYPES = {
    "adamw": (torch.float32, torch.float32),
    "adamw_8bit": (torch.uint8, torch.uint8),
    "adamw_bf16_kahan": (torch.bfloat16, torch.bfloat16, torch.float32),
}
"""Dtypes of an optimizer's state per trained number, by `optim.name`."""
STATE_KEYS = (
    "step",
    "exp_avg",
    "exp_avg_sq",
    "compensation",  # AdamW, KahanAdamW
    "state1",
    "state2",
    "qmap1",
    "qmap2",
    "absmax1",
    "absmax2",  # AdamW8bit
)
"""State entries per parameter, as the optimizers name them. A checkpoint saves all of them."""


def learning_rate(settings: Optim, step: int, total_steps: int) -> float:
    """Return the learning rate of a step: linear warm-up that is never 0, then the schedule. A pure function.

    Args:
        step: 0-based.
    Example: lr 1.0, warmup_steps 4 -> 0.25, 0.5, 0.75, 1.0, then constant, or down to lr * min_lr_ratio at the end.
    """
    if step < settings.warmup_steps:
        return settings.lr * (step + 1) / settings.warmup_steps
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, total_steps - 1 - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / span)
    shape = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * shape)


class Optimizer:
    """AdamW on the trainable parameters of a policy.

    Parameters in bfloat16 get float32 masters, and float32 gradient sums over the microbatches: the small updates of
    reinforcement learning would be rounded away in bfloat16's 8 bits. float32 parameters are their own masters. So are
    bfloat16 parameters under `adamw_bf16_kahan`, but their gradients are summed in float32, too.

    Args:
        value_head: the critic of the policy, trained at the same learning rate; None without a critic.
        widened: names of sharded parameters that were converted to float32 and are their own masters.
    """

    def __init__(
        self, policy: nn.Module, settings: Optim, value_head: nn.Module | None = None, widened: Collection[str] = ()
    ) -> None:
        self.settings, self.widened = settings, frozenset(widened)
        self.parameters = {n: p for n, p in policy.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise TrainError("nothing is trained: every part of the model is frozen", hint="shorten model.freeze")
        if value_head is not None:
            self.parameters |= {f"value_head.{n}": p for n, p in value_head.named_parameters()}
        is_kahan = settings.name == "adamw_bf16_kahan"
        self.masters = {
            n: p if is_kahan or p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for n, p in self.parameters.items()
        }
        # The backward of each microbatch adds float32 gradients: to the master, or to the parameter's own `grad`.
        for name, p in self.parameters.items():
            if self.masters[name] is not p:
                p.register_post_accumulate_grad_hook(_add_to_master(self.masters[name]))
            elif p.dtype != torch.float32:
                p.grad_dtype = torch.float32
        # Matrices decay; biases and norms (one axis) do not.
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        undecayed = [m for m in self.masters.values() if m.ndim < 2]
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay},
            {"params": undecayed, "weight_decay": 0.0},
        ]
        self.adamw = _adamw(settings, [g for g in groups if g["params"]])
        self.updates = 0

    def clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`. Return their norm before that, which may be non-finite."""
        return float(whole(nn.utils.clip_grad_norm_(list(self.masters.values()), self.settings.max_grad_norm)))

    def part_norms(self) -> dict[str, float]:
        """Return the gradient norm of each trained part (vision, connector, language ...), before `clip` scales it.

        All ranks call this at the same point, for the same parts: a missing gradient counts as zero.
        """
        parts: dict[str, list[Tensor]] = {}
        for name, master in self.masters.items():
            gradient = torch.zeros_like(master) if master.grad is None else master.grad
            parts.setdefault("value_head" if name.startswith("value_head.") else part_of(name) or "other", []).append(
                gradient
            )
        norms = [whole(nn.utils.get_total_norm(gradients)) for gradients in parts.values()]
        return dict(zip(parts, torch.stack(norms).tolist(), strict=True))

    def step(self, lr: float) -> None:
        """Update all weights once with this learning rate, and clear the gradients."""
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        self.clear()
        self.updates += 1
        with torch.no_grad():  # the updated float32 masters -> the model's parameters, rounded to their dtype
            for name, p in self.parameters.items():
                if self.masters[name] is not p:
                    p.copy_(self.masters[name])

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Allocate, in a `with` block, all memory that updates will use: every gradient, and the missing state.

        The gradients of the block are not used: they are cleared at its end, and nothing else has changed.
        """
        dtypes = STATE_DTYPES[self.settings.name]
        try:
            missing = [m for m in self.masters.values() if not self.adamw.state.get(m)]
            missing_state = [torch.zeros_like(m, dtype=dtype) for m in missing for dtype in dtypes]
            for master in self.masters.values():
                master.grad = torch.zeros_like(master, dtype=torch.float32)
            yield
            del missing_state
        finally:
            self.clear()

    def pending_bytes(self, device: torch.device) -> int:
        """Return the bytes that the first update will take on a device for this rank's share of the moments.

        They are 0 for moments that exist, and for those of weights on another device (`parallel.offload`).
        """
        each = sum(dtype.itemsize for dtype in STATE_DTYPES[self.settings.name])
        missing = [own_part(m) for m in self.masters.values() if not self.adamw.state.get(m)]
        return sum(part.numel() * each for part in missing if part.device.type == device.type)

    def clear(self) -> None:
        """Remove all gradients."""
        self.adamw.zero_grad(set_to_none=True)
        for p in self.parameters.values():
            p.grad = None

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the moments (and masters that are not the weights) as `<kind>.<parameter name>`, for a checkpoint."""
        return dict(self._tensors())

    def load_state_tensors(self, tensors: dict[str, Tensor], updates: int) -> None:
        """Load the tensors that `state_tensors` returned. A parameter without moments counts as never updated."""
        self.updates = updates
        for name, master in self.masters.items():
            saved = {key: tensors[f"{key}.{name}"].clone() for key in STATE_KEYS if f"{key}.{name}" in tensors}
            if saved:
                step = saved.pop("step")
                self.adamw.state[master] = {
                    "step": int(step) if self.settings.name == "adamw_8bit" else step,
                    **{key: value.to(master.device) for key, value in saved.items()},
                }
            if f"master.{name}" in tensors:
                with torch.no_grad():
                    master.copy_(tensors[f"master.{name}"])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.parameters.items():
            state: dict[str, Any] = self.adamw.state.get(self.masters[name], {})
            for key in STATE_KEYS:
                if state.get(key) is not None:
                    yield f"{key}.{name}", torch.as_tensor(state[key])
            if self.masters[name] is not p or name in self.widened:
                yield f"master.{name}", self.masters[name].detach()


def _adamw(settings: Optim, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the update rule of `optim.name`. Raises: TrainError when its library is not installed."""
    options: dict[str, Any] = {"lr": settings.lr, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
    if settings.name == "adamw_bf16_kahan":
        return KahanAdamW(groups, **options)
    if settings.name == "adamw_8bit":
        try:
            from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise TrainError(
                'optim.name = "adamw_8bit" needs bitsandbytes', hint=install_line("bitsandbytes")
            ) from error
        return AdamW8bit(groups, **options)
    return torch.optim.AdamW(groups, **options, fused=True)


def _add_to_master(master: nn.Parameter):
    """Return a hook that moves a parameter's gradient to its float32 master, added to those of other microbatches."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return hook
