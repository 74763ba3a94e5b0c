"""Smallest changes that make a run fit into memory, found by planning it again with one to three keys changed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING

from vlmrl.model.memory import KEY, UPDATE_SHARE, share_of, stricter
from vlmrl.preflight.memory_plan import Cluster, MemoryPlan, make_plan
from vlmrl.preflight.memory_sizes import PromptLengths
from vlmrl.recipe.auto_values import Choice, with_values
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import check_world
from vlmrl.recipe.schema import Lora, Recipe

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

ADAPTER_RANK = 32
MAX_TOGETHER = 3
"""Maximum number of changes that are tried together."""
ONE_MORE = 1.1
"""Factor on the cost per change, so that of two solutions of equal cost the one with fewer changes comes first."""
SHOWN = 3
"""Maximum number of solutions that are reported."""


@dataclass(frozen=True)
class RecipeEdit:
    """Change of a recipe or of the number of GPUs.

    Args:
        words: command-line options that make the change.
        costs: disadvantage of the change, in words.
        factor: rough factor on the time (or the money) per step; solutions are sorted by it.
        key: dotted recipe key; a solution has at most one change per key.
        value: new value of the key; unused for `gpus` and `lora`.
        learns: whether the change affects the result of the training.
    """

    words: str
    costs: str
    factor: float
    key: str
    value: object = None
    learns: bool = False


@dataclass(frozen=True)
class Fit:
    """Changes that together make a run fit, and its plan with them."""

    changes: tuple[RecipeEdit, ...]
    plan: MemoryPlan

    @property
    def words(self) -> str:
        return " ".join(change.words for change in self.changes)

    @property
    def costs(self) -> str:
        return "; ".join(change.costs for change in self.changes)

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key: solutions that do not affect the result of the training come first, then those with lower cost."""
        return any(c.learns for c in self.changes), prod(c.factor * ONE_MORE for c in self.changes)


def find_fits(
    loaded: LoadedRecipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths, kernels: str = "torch"
) -> list[Fit]:
    """Return the smallest changes with which a run fits and is not tight; [] if no combination that is tried fits."""
    changes = list(possible_changes(loaded.recipe, facts, cluster, prompts))
    fits: list[Fit] = []
    for count in range(1, MAX_TOGETHER + 1):
        for some in combinations(changes, count):
            if len({change.key for change in some}) < count or _needless(some, fits):
                continue
            planned = _plan(some, loaded, facts, cluster, prompts, kernels)
            if planned.fits and not planned.is_tight:
                fits.append(Fit(some, planned))
    return _different(sorted(fits, key=lambda fit: fit.order))


def possible_changes(
    recipe: Recipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths
) -> Iterator[RecipeEdit]:
    """Yield the single changes that can be combined, those with the lowest cost first."""
    r, train = recipe.rollout, recipe.train
    vllm = recipe.kind == "rl" and r.engine == "vllm"
    for setting in stricter(recipe.model.gradient_checkpointing):
        longer = UPDATE_SHARE * share_of(setting)
        costs = (
            "an update takes a little longer" if setting == "vision" else f"an update takes about {longer:.0%} longer"
        )
        words = f"--set {KEY}={str(setting).lower()}"
        yield RecipeEdit(words, costs, 1.02 + 0.18 * share_of(setting), KEY, setting)
    budget = train.tokens_per_row // 2
    while budget >= max(512, prompts.longest):
        factor = 1.0 + 0.03 * (train.tokens_per_row / budget)
        yield RecipeEdit(f"--set train.tokens_per_row={budget}", "smaller rows", factor, "train.tokens_per_row", budget)
        budget //= 2
    if vllm and r.kv_cache_gib is not None:
        yield RecipeEdit("--set rollout.kv_cache_gib=1", "fewer responses at once", 1.3, "rollout.kv_cache_gib", 1.0)
    if recipe.kind == "rl" and r.engine == "torch" and r.batch_tokens > 2 * prompts.longest:
        tokens = max(2 * prompts.longest, r.batch_tokens // 4)
        key = "rollout.batch_tokens"
        yield RecipeEdit(f"--set {key}={tokens}", "fewer responses at once", 1.3, key, tokens)
    if recipe.parallel.shard_size is not None:
        size = cluster.processes
        key = "parallel.shard_size"
        yield RecipeEdit(f"--set {key}={size}", "more traffic between machines", 1.3, key, size)
    engines = (r.engine_gpus or cluster.processes) if vllm else 0
    for parts in (2, 4, 8):
        if r.tensor_parallel < parts <= engines and engines % parts == 0:
            key = "rollout.tensor_parallel"
            yield RecipeEdit(f"--set {key}={parts}", "each token takes longer", 1.0 + 0.1 * parts, key, parts)
    offload = Choice("parallel.offload", True, "")
    possible = not check_world(with_values(recipe, [offload]), cluster.processes)
    if cluster.gpu is not None and possible and not recipe.parallel.offload:  # a CPU computes in main memory anyway
        costs = "an update takes several times as long"
        yield RecipeEdit("--set parallel.offload=true", costs, 3.0, offload.key, offload.value)
    for gpus in (2, 4, 8, 16, 32, 64):
        if cluster.processes < gpus <= 8 * cluster.processes and recipe.model.quantize is None:
            machines = f" ({gpus // 8} machines of 8)" if gpus > 8 else ""
            yield RecipeEdit(f"--gpus {gpus}", f"more GPUs{machines}", gpus / cluster.processes, "gpus", gpus)
    if recipe.lora is None and not recipe.model.freeze:
        costs = "an adapter is trained, not the weights"
        yield RecipeEdit(f"--set lora.rank={ADAPTER_RANK}", costs, 1.0, "lora", learns=True)


def _plan(
    changes: tuple[RecipeEdit, ...],
    loaded: LoadedRecipe,
    facts: ModelFacts,
    cluster: Cluster,
    prompts: PromptLengths,
    kernels: str,
) -> MemoryPlan:
    recipe = loaded.recipe
    for change in changes:
        if change.key == "gpus":
            assert isinstance(change.value, int)
            cluster = replace(cluster, processes=change.value)
        elif change.key == "lora":
            recipe = recipe.model_copy(update={"lora": Lora(rank=ADAPTER_RANK)})
        else:
            recipe = with_values(recipe, [Choice(change.key, change.value, "")])
    return make_plan(replace(loaded, recipe=recipe), facts, cluster, prompts, kernels)


def _needless(some: tuple[RecipeEdit, ...], fits: list[Fit]) -> bool:
    """Return whether a part of these changes is already enough, by the solutions in `fits`."""
    return any(set(fit.changes) < set(some) for fit in fits)


def _different(fits: list[Fit]) -> list[Fit]:
    """Return the first few solutions that change different sets of keys.

    Solutions are sorted by cost, so the first with a set of keys has the mildest values.
    """
    chosen: dict[tuple[str, ...], Fit] = {}
    for fit in fits:
        chosen.setdefault(tuple(change.key for change in fit.changes), fit)
    return list(chosen.values())[:SHOWN]
