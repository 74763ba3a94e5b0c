"""When memory runs out: one more try with half the token budget, then an error that says what to change first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from vlmrl.dist import rank_process
from vlmrl.errors import Load, OutOfMemoryError
from vlmrl.model.device_memory import give_back, memory_use, ran_out, use_in_words
from vlmrl.model.load import pick_device
from vlmrl.recipe.schema import Recipe
from vlmrl.rollout.torch_engine import TorchEngine
from vlmrl.train.state import Session

T = TypeVar("T")
ROWS, BATCHES = "train.tokens_per_row", "rollout.batch_tokens"
"""The keys that may be halved, once each in a run."""
VLLM_PHASES = ("engine start", "rollout", "validation", "sync")
"""Where vLLM's own memory is what can be lowered."""


def budget_of(session: Session, key: str) -> int:
    """A token budget: the recipe's, or the half that the run fell back to. One that was changed since counts anew."""
    asked = _asked(session.recipe, key)
    before, now = session.progress.halved.get(key, (asked, asked))
    return now if before == asked else asked


def may_halve(session: Session, key: str) -> bool:
    """Whether the run still has its one try with half of this budget."""
    return budget_of(session, key) == _asked(session.recipe, key)


def budget_metrics(session: Session) -> dict[str, int]:
    """`train/tokens_per_row`, of every step."""
    return {"train/tokens_per_row": budget_of(session, ROWS)}


def in_rows(session: Session, work: Callable[..., T]) -> T:
    """`work(tokens_per_row=...)`, which may be done twice: when a row runs out of memory, once more with half as many.

    The half is the run's budget from then on. Gradients are forgotten in between; `work` must not have changed weights.
    Raises: OutOfMemoryError when there is nothing (left) to halve. One of several processes cannot go back alone: its
        error says with what all may be started again.
    """
    s, budget = session, budget_of(session, ROWS)
    try:
        return work(tokens_per_row=budget)
    except OutOfMemoryError as error:
        load = error.load
        if load is None or load.budget != ROWS or load.responses == 1 or not may_halve(s, ROWS):
            raise
        if s.world.size > 1:
            error.halved = {ROWS: [budget, load.half(budget)]}
            raise
    # Out of the handler: the error's frames hold the row and all that was made of it.
    s.optimizer.clear()
    give_back(s.policy.device)
    halve(s, load)
    return in_rows(s, work)


def halve(session: Session, load: Load) -> None:
    """Halve the budget of what did not fit, for the rest of the run; say so, and note it."""
    s, key = session, load.budget
    asked, now = _asked(s.recipe, key), load.half(budget_of(s, key))
    s.progress.halved[key] = [asked, now]
    peak, limit = memory_use(s.policy.device)
    s.watcher.message(
        f"out of memory in {rank_process.doing()} with {load} at once: again with {key} = {now},"
        " and so to the run's end"
    )
    s.run.event(
        s.progress.step, "out of memory: budget halved", key=key, was=asked, now=now, tokens=load.tokens,
        image_tokens=load.image_tokens, responses=load.responses, rows=list(load.rows), peak_bytes=peak,
        limit_bytes=limit,
    )  # fmt: skip


def keep_batches(session: Session, engine: Any) -> None:
    """Give the built-in engine the run's own batch budget, and note it in the run when the engine has to halve it."""
    if isinstance(engine, TorchEngine):
        engine.batch_tokens, engine.may_halve = budget_of(session, BATCHES), may_halve(session, BATCHES)
        engine.on_halved = partial(halve, session)


@contextmanager
def explaining(recipe: Recipe) -> Iterator[None]:
    """Inside, whatever runs out of memory ends as an OutOfMemoryError with phase, rank and the key to change first."""
    try:
        yield
    except BaseException as error:  # a library in Rust panics with what is no Exception
        if not ran_out(error):
            raise
        raise explain(recipe, error) from error


def explain(recipe: Recipe, error: BaseException) -> OutOfMemoryError:
    """The error for a person: phase, rank, what was in memory, peak and limit, and what to change first."""
    raw = error if isinstance(error, OutOfMemoryError) else OutOfMemoryError("", where=getattr(error, "where", None))
    load = raw.load
    what = f" with {load} at once" if load else ""
    message = f"out of memory in {rank_process.doing()}{what}; {use_in_words(pick_device(recipe.model.device))}"
    if load and raw.fits:
        hint = f"set {load.budget} = {raw.fits}: tried, it fits"
    else:
        hint = f"set {first_change(recipe, load)}"
    if load and load.responses == 1:
        hint += f"; a smaller {load.budget} would not help: a single response cannot be split"
    told = OutOfMemoryError(message, where=raw.where, hint=hint, load=load)
    told.halved = raw.halved
    return told


def first_change(recipe: Recipe, load: Load | None) -> str:
    """The one key to change first, with a value."""
    model, rollout = recipe.model, recipe.rollout
    phase = rank_process.doing().split("`")[1]
    if load and load.responses > 1:
        return f"{load.budget} = {load.half(_asked(recipe, load.budget))} (half of what did not fit)"
    if load:
        if load.budget == ROWS and model.gradient_checkpointing is not True:
            return "model.gradient_checkpointing = true"
        if 2 * load.image_tokens > load.tokens:
            return f"model.max_pixels = {model.max_pixels // 2} (images of half the area)"
        return f"rollout.max_new_tokens = {max(1, rollout.max_new_tokens // 2)}"
    if recipe.kind == "rl" and rollout.engine == "vllm" and phase in VLLM_PHASES:
        if rollout.kv_cache_gib is None:
            return "rollout.kv_cache_gib = 1, in place of what seemed to be free"
        return f"rollout.kv_cache_gib = {rollout.kv_cache_gib / 2:g}"
    if phase in ("rollout", "validation"):
        return f"{BATCHES} = {rollout.batch_tokens // 2}"
    if phase == "encode":
        return f"model.max_pixels = {model.max_pixels // 2} (images of half the area)"
    if recipe.lora is None:
        return "lora.rank = 16 (an adapter: no gradient, master or moment of the weights themselves)"
    if model.quantize is None and pick_device(model.device).type == "cuda":
        return 'model.quantize = "4bit"'
    return "model.path to a smaller model, or use a machine with more memory"


def _asked(recipe: Recipe, key: str) -> int:
    table, _, name = key.partition(".")
    return getattr(getattr(recipe, table), name)
