"""Learner: the policy in training and everything else that an update needs.

This is the only code that updates weights: AdamW in its variants and the learning-rate schedule. One variant keeps its
weights in bfloat16 and loses no update to rounding: 10 bytes per parameter instead of 14. The reference of a policy
with an adapter is its own model with other adapter weights. Where memory runs out, there is one more try with half the
token budget, then an error with the key to change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from vlmrl.dist import world
from vlmrl.dist.fsdp import can_repeat, end_failed_pass, gatherer, own_part, regather
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import Load, OutOfMemoryError, TrainError, install_line
from vlmrl.model.device_memory import give_back, memory_use, ran_out, use_in_words
from vlmrl.model.families import part_of
from vlmrl.model.load import pick_device
from vlmrl.model.lora import adapter_off, adapter_parameters, by_parameter, has_adapted_head
from vlmrl.model.packing import PackedRow, RowReference, TokenStats, TrainItem
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.types import Group

if TYPE_CHECKING:  # a GPU machine without pydantic measures with the optimizer of this module
    from vlmrl.recipe.schema import Optim, Recipe
    from vlmrl.train.journal import Journal, Progress


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
        self._whole = gatherer(self.masters.values())
        self._parts = {n: "value_head" if n.startswith("value_head.") else part_of(n) or "other" for n in self.masters}
        self.updates = 0

    def clip(self) -> float:
        """Scale the gradients down to `max_grad_norm`. Return their norm before that, which may be non-finite."""
        return float(self._whole(nn.utils.clip_grad_norm_(list(self.masters.values()), self.settings.max_grad_norm)))

    def part_norms(self) -> dict[str, float]:
        """Return the gradient norm of each trained part (vision, connector, language ...), before `clip` scales it.

        All ranks call this at the same point, for the same parts: a missing gradient counts as zero.
        """
        parts: dict[str, list[Tensor]] = {}
        for name, master in self.masters.items():
            gradient = torch.zeros_like(master) if master.grad is None else master.grad
            parts.setdefault(self._parts[name], []).append(gradient)
        norms = [self._whole(nn.utils.get_total_norm(gradients)) for gradients in parts.values()]
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


class ReferencePolicy:
    """Reference of a policy with an adapter, without a second copy of the model.

    Args:
        policy: the policy in training; its model has an adapter, and may be sharded.
        first: adapter tensors that the run began with; None when it began with the base model: the adapter is then
            switched off.
    """

    def __init__(self, policy: Policy, first: Mapping[str, Tensor] | None = None) -> None:
        self.policy = policy
        self.first = None if first is None else by_parameter(policy.model, first)

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def dtype(self) -> torch.dtype:
        return self.policy.dtype

    @property
    def sharing(self) -> str:
        return self.policy.sharing

    @property
    def hidden_size(self) -> int:
        return self.policy.hidden_size

    @torch.no_grad()
    def __call__(self, row: PackedRow, reference: RowReference | None = None) -> TokenStats:
        """Return the token statistics as `Policy.forward` does, under the reference and without gradient."""
        with self._first_weights():
            return self.policy(row, reference)

    @torch.no_grad()
    def states(self, row: PackedRow) -> Tensor:
        """Return the hidden states [K, D] as `Policy.states` does, under the reference and without gradient."""
        with self._first_weights():
            return self.policy.states(row)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [.., V] of hidden states [.., D] as `Policy.head` does, under the reference.

        Only an adapter on the head itself is swapped: swapping goes through all layers, for each chunk of tokens.
        """
        if not has_adapted_head(self.policy.model):
            return self.policy.head(hidden)
        with self._first_weights():
            return self.policy.head(hidden)

    def _first_weights(self) -> AbstractContextManager[None]:
        return adapter_off(self.policy.model) if self.first is None else _swapped(self.policy, self.first)


@contextmanager
def _swapped(policy: Policy, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the adapter these weights in a `with` block."""
    parameters = adapter_parameters(policy.model)
    # `.data` hides the change from autograd: the full KL calls the head while a graph holds these weights.
    parts = {name: own_part(parameters[name].detach()).data for name in tensors}
    old_values = {name: part.clone() for name, part in parts.items()}

    def put(values: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            part.copy_(values[name])
        regather(policy)

    try:
        put({name: own_part(value, parameters[name]) for name, value in tensors.items()})
        yield
    finally:
        put(old_values)


ROWS, BATCHES = "train.tokens_per_row", "rollout.batch_tokens"
"""Recipe keys of the budgets that may be halved, each once per run."""
VLLM_PHASES = ("engine start", "rollout", "validation", "sync")
"""Phases in which vLLM's own memory can be lowered."""


@dataclass
class TokenBudgets:
    """Token budgets of a run: the recipe's, or half of it after memory ran out.

    Args:
        recipe: holds each budget under its key (`train.tokens_per_row`, `rollout.batch_tokens`).
        progress: keeps the halved budgets from one attempt to the next.
        report: called with (what did not fit, budget in the recipe, budget from now on) after a budget was halved.
    """

    recipe: Recipe
    progress: Progress
    report: Callable[[Load, int, int], None]

    def of(self, key: str) -> int:
        """Return a budget in tokens. A halved value is ignored after the recipe's value was changed."""
        in_recipe = _in_recipe(self.recipe, key)
        before, now = self.progress.halved.get(key, (in_recipe, in_recipe))
        return now if before == in_recipe else in_recipe

    def may_halve(self, key: str) -> bool:
        """Return whether this budget has not been halved yet: a run has one try with half of it."""
        return self.of(key) == _in_recipe(self.recipe, key)

    def halve(self, load: Load) -> None:
        """Halve the budget of a load that did not fit, for the rest of the run, and report it."""
        key = load.budget
        before, now = _in_recipe(self.recipe, key), load.half(self.of(key))
        self.progress.halved[key] = [before, now]
        self.report(load, before, now)

    def metrics(self) -> dict[str, int]:
        """Return `train/tokens_per_row`, in tokens."""
        return {"train/tokens_per_row": self.of(ROWS)}


def report_halved(journal: Journal, device: torch.device, load: Load, before: int, now: int) -> None:
    """Tell the user about a halved budget, and write an event with the memory in use."""
    key = load.budget
    peak, limit = memory_use(device)
    journal.watcher.message(
        f"out of memory in {world.doing()} with {load} at once: trying again with {key} = {now},"
        " which stays until the run's end"
    )
    journal.run.event(
        journal.progress.step,
        "out of memory: budget halved",
        key=key,
        was=before,
        now=now,
        tokens=load.tokens,
        image_tokens=load.image_tokens,
        responses=load.responses,
        rows=list(load.rows),
        peak_bytes=peak,
        limit_bytes=limit,
    )


def keep_batches(budgets: TokenBudgets, engine: Generator) -> None:
    """Give the built-in engine the run's batch budget. If the engine has to halve it, the run keeps the half."""
    if isinstance(engine, TorchEngine):
        engine.batch_tokens, engine.may_halve = budgets.of(BATCHES), budgets.may_halve(BATCHES)
        engine.on_halved = budgets.halve


@contextmanager
def explaining(recipe: Recipe) -> Iterator[None]:
    """Turn a lack of memory in a `with` block into an OutOfMemoryError with phase, rank and the key to change first."""
    try:
        yield
    except BaseException as error:  # not Exception: a panic of a library in Rust is a BaseException
        if not ran_out(error):
            raise
        raise explain(recipe, error) from error


def explain(recipe: Recipe, error: BaseException) -> OutOfMemoryError:
    """Return the error for the user: phase, rank, the load, peak and limit of memory, and the key to change first."""
    raw = error if isinstance(error, OutOfMemoryError) else OutOfMemoryError("", where=getattr(error, "where", None))
    load = raw.load
    load_text = f" with {load} at once" if load else ""
    message = f"out of memory in {world.doing()}{load_text}; {use_in_words(pick_device(recipe.model.device))}"
    if load and raw.fits:
        hint = f"set {load.budget} = {raw.fits}: this value was tried and fits"
    else:
        hint = f"set {first_change(recipe, load)}"
    if load and load.responses == 1:
        hint += f"; a smaller {load.budget} would not help: a single response cannot be split"
    explained = OutOfMemoryError(message, where=raw.where, hint=hint, load=load)
    explained.halved = raw.halved
    return explained


def first_change(recipe: Recipe, load: Load | None) -> str:
    """Return the one key to change first, with a proposed value.

    Args:
        load: the packed row or batch that did not fit; None = not known, then the phase of the run decides.
    """
    model, rollout = recipe.model, recipe.rollout
    phase = world.doing().split("`")[1]
    if load and load.responses > 1:
        return f"{load.budget} = {load.half(_in_recipe(recipe, load.budget))} (half of what did not fit)"
    if load:
        if load.budget == ROWS and model.gradient_checkpointing is not True:
            return "model.gradient_checkpointing = true"
        if 2 * load.image_tokens > load.tokens:  # mostly images
            return f"model.max_pixels = {model.max_pixels // 2} (images of half the area)"
        return f"rollout.max_new_tokens = {max(1, rollout.max_new_tokens // 2)}"
    if recipe.kind == "rl" and rollout.engine == "vllm" and phase in VLLM_PHASES:
        if rollout.kv_cache_gib is None:
            return "rollout.kv_cache_gib = 1, instead of the automatic size"
        return f"rollout.kv_cache_gib = {rollout.kv_cache_gib / 2:g}"
    if phase in ("rollout", "validation"):
        return f"{BATCHES} = {rollout.batch_tokens // 2}"
    if phase == "encode":
        return f"model.max_pixels = {model.max_pixels // 2} (images of half the area)"
    if recipe.lora is None:
        return "lora.rank = 16 (with an adapter, the base weights need no gradients, masters or moments)"
    if model.quantize is None and pick_device(model.device).type == "cuda":
        return 'model.quantize = "4bit"'
    return "model.path to a smaller model, or use a machine with more memory"


def _in_recipe(recipe: Recipe, key: str) -> int:
    table, _, name = key.partition(".")
    return getattr(getattr(recipe, table), name)


T = TypeVar("T")


class FrozenTeacher(Protocol):
    """Frozen model that the policy learns from; see `train/teacher.py`. A batch is a `StepBatch`."""

    policy: Policy | ReferencePolicy

    def read(self, batch: Any, group_of: Callable[[int], Group], tokens_per_row: int) -> dict[str, float]: ...

    def logps(self, batch: Any, group_of: Callable[[int], Group], tokens_per_row: int) -> dict[int, Tensor]: ...

    def rehearse(self, batch: Any, tokens_per_row: int) -> None: ...


@dataclass
class Learner:
    """Policy in training, with its optimizer, reference and token budgets.

    Args:
        budgets: the token budgets; one is halved when memory runs out.
        reference: the policy that a KL term compares with; None = there is no KL term.
        teacher: the frozen model that the policy learns from; None = none.
        filler: trajectory without loss (see `StepBatch`); None with a single rank.
    """

    recipe: Recipe
    policy: Policy
    optimizer: Optimizer
    budgets: TokenBudgets
    reference: Policy | ReferencePolicy | None = None
    teacher: FrozenTeacher | None = None
    world: World = ALONE
    filler: TrainItem | None = None

    @cached_property
    def longest_response(self) -> int:
        """Largest number of tokens behind a prompt; see `Recipe`."""
        return self.recipe.longest_response

    @property
    def may_repeat(self) -> bool:
        """Return whether this rank can repeat a pass that ran out of memory. One of several cannot repeat it alone."""
        return self.world.size == 1 and can_repeat(self.policy)

    def start_over(self) -> None:
        """Clear everything that a pass has left, if it failed or not: gradients, gathered weights, unused memory."""
        others = (self.reference, None if self.teacher is None else self.teacher.policy)
        for policy in (self.policy, *others) if self.may_repeat else ():
            if isinstance(policy, Policy):
                end_failed_pass(policy)
        self.optimizer.clear()
        give_back(self.policy.device)

    def in_rows(self, work: Callable[..., T]) -> T:
        """Return `work(tokens_per_row=...)`. If a packed row runs out of memory, try once more with half the tokens.

        The run keeps the halved budget. Gradients are cleared before the second try; `work` must not have changed
        weights.

        Raises: OutOfMemoryError when the budget cannot be halved, or not once more. With several ranks, one rank cannot
            repeat its work alone: it raises, and `error.halved` has the budget to start all ranks again with.
        """
        budget = self.budgets.of(ROWS)
        try:
            return work(tokens_per_row=budget)
        except OutOfMemoryError as error:
            load = error.load
            if load is None or load.budget != ROWS or load.responses == 1 or not self.budgets.may_halve(ROWS):
                raise
            if not self.may_repeat:
                error.halved = {ROWS: [budget, load.half(budget)]}
                raise
        # Out of the handler: the error's frames hold the packed row and everything computed from it.
        self.start_over()
        self.budgets.halve(load)
        return self.in_rows(work)
