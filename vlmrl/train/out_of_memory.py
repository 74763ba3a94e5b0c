"""Handling of memory that runs out: one more try with half the token budget, then an error with the key to change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrl.dist import world
from vlmrl.errors import Load, OutOfMemoryError
from vlmrl.model.device_memory import memory_use, ran_out, use_in_words
from vlmrl.model.load import pick_device
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.engine import Generator
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.train.journal import Journal
from vlmrl.train.progress import Progress

if TYPE_CHECKING:
    import torch

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
