"""Memory check of a run: the planned machine, the problem if it does not fit, the smallest changes that help.

They are found by planning the run again with one to three keys changed. `model.gradient_checkpointing = "auto"` is the
least recomputation that fits.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, gib
from vlmrl.model.memory import KEY, STEPS, UPDATE_SHARE, share_of, stricter
from vlmrl.recipe.auto_values import Choice, with_values
from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.rules.engine import check_world
from vlmrl.recipe.schema import Lora, Recipe
from vlmrl.setup.memory_plan import TIGHT, UPDATE, Cluster, MemoryPlan, make_plan
from vlmrl.setup.memory_sizes import TYPICAL_BANDWIDTH, Gpu, PromptLengths, known_gpu

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts


ADAPTER_RANK = 32
MAX_TOGETHER = 3
"""Maximum number of changes that are tried together."""
ONE_MORE = 1.1
"""Factor on the cost per change, so that of two solutions of equal cost the one with fewer changes comes first."""
COMPILERS = (os.environ.get("CXX", "g++"), "gcc", "clang++", "clang", "cc")
"""Programs of which `model.compile` needs one."""
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


def find_fits(loaded: LoadedRecipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths) -> list[Fit]:
    """Return the smallest changes with which a run fits and is not tight; [] if no combination that is tried fits.

    Of those that change the same keys, only the one of the lowest cost is returned: it has the mildest values.
    """
    changes = list(possible_changes(loaded.recipe, facts, cluster, prompts))
    fits: list[Fit] = []
    for count in range(1, MAX_TOGETHER + 1):
        for some in combinations(changes, count):
            is_enough = any(set(fit.changes) < set(some) for fit in fits)  # a part of these changes
            if is_enough or len({change.key for change in some}) < count:
                continue
            planned = _plan(some, loaded, facts, cluster, prompts)
            if planned.fits and not planned.is_tight:
                fits.append(Fit(some, planned))
    different: dict[tuple[str, ...], Fit] = {}
    for fit in sorted(fits, key=lambda fit: fit.order):
        different.setdefault(tuple(change.key for change in fit.changes), fit)
    return list(different.values())[:SHOWN]


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
    return make_plan(replace(loaded, recipe=recipe), facts, cluster, prompts)


ERROR_FACTOR = 1.25
"""Multiple of the memory above which a plan is an error; up to it a warning, because a plan may be off by 15%."""


@dataclass(frozen=True)
class Target:
    """Machine that a run is planned for.

    Args:
        processes: number of processes, as given by `--gpus`.
        gpu: GPU of another machine (`--gpu-memory`); None = this machine is meant.
    """

    processes: int = 1
    gpu: Gpu | None = None

    @property
    def is_elsewhere(self) -> bool:
        return self.gpu is not None


HERE = Target()


@dataclass(frozen=True)
class FittedPlan:
    """Memory plan of a run. If the run does not fit, `fits` has the smallest changes that make it fit."""

    plan: MemoryPlan
    fits: tuple[Fit, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        ways = [{"words": fit.words, "costs": fit.costs, "peak": fit.plan.peak.total} for fit in self.fits]
        return self.plan.as_dict() | {"changes": ways}


def plan_memory(loaded: LoadedRecipe, facts: ModelFacts, target: Target, prompts: PromptLengths) -> FittedPlan:
    """Plan the memory of a run on its target. If it does not fit, search for changes that make it fit."""
    cluster = find_cluster(loaded, target)
    plan = make_plan(loaded, facts, cluster, prompts)
    fits = () if plan.fits else find_fits(loaded, facts, cluster, prompts)
    return FittedPlan(plan, tuple(fits))


def find_cluster(loaded: LoadedRecipe, target: Target) -> Cluster:
    """Return the GPUs, or the CPU processes, that a plan is for."""
    from vlmrl.model.model_facts import device_facts, usable_memory

    kernels = "torch" if importlib.util.find_spec("fla") is None else "fla"
    if target.gpu is not None:
        return Cluster(target.processes, target.gpu, target.gpu.memory_bytes, kernels=kernels)
    device, _ = device_facts(loaded.recipe.model.device)
    memory = int(device["memory_bytes"])
    if device["kind"] != "cuda":
        return Cluster(target.processes, None, memory, kernels=kernels)
    known = known_gpu(device["name"])
    gpu = Gpu(device["name"], memory, known.bandwidth if known else TYPICAL_BANDWIDTH)
    return Cluster(target.processes, gpu, memory, usable_memory(), kernels)


def check_device(loaded: LoadedRecipe, target: Target) -> list[Problem]:
    """Return the problems of the device that the recipe names."""
    from vlmrl.model.model_facts import device_facts

    if target.is_elsewhere:
        return []
    device, errors = device_facts(loaded.recipe.model.device)
    if errors:
        where = loaded.where(("model", "device"), ("model", "path"))
        return [Problem(what, where, hint) for what, hint in errors]
    problems: list[Problem] = []
    if loaded.recipe.model.compile is True and not any(map(shutil.which, COMPILERS)):
        message, where = "`model.compile` needs a C compiler, and none is in PATH", loaded.where(("model", "compile"))
        problems.append(Problem(message, where, "apt-get install g++, or --set model.compile=false"))
    if device["kind"] != "cpu":
        return problems
    if loaded.recipe.model.dtype == "bfloat16":
        message, where = "bfloat16 on a CPU is slower than float32 on most machines", ("model", "dtype")
        problems.append(Problem(message, loaded.where(where, ("model", "device")), 'dtype = "float32"', "warning"))
    if loaded.recipe.model.attention != "auto":
        message, where = "`model.attention` does nothing: no GPU is used", loaded.where(("model", "attention"))
        problems.append(Problem(message, where, "leave it out on a CPU", "warning"))
    return problems


def check_memory(loaded: LoadedRecipe, fitted: FittedPlan) -> list[Problem]:
    """Return a problem if a plan does not fit, with the change to try first."""
    plan = fitted.plan
    cluster = plan.cluster
    where = loaded.where(("train", "tokens_per_row"), ("model", "path"))
    hint = _hint(fitted)
    if not plan.fits_gpus:
        peak, have = plan.peak, cluster.each_bytes
        level = "error" if peak.total > ERROR_FACTOR * have else "warning"
        one = "each GPU" if cluster.gpu and cluster.processes > 1 else "the GPU" if cluster.gpu else "each process"
        one = "the run" if cluster.gpu is None and cluster.processes == 1 else one
        message = (
            f"in the phase `{peak.name}` {one} needs about {gib(peak.total)} of memory, most of it for {peak.main} "
            f"({gib(peak.parts[peak.main])}); {cluster.name} has {gib(have)}"
        )
        if cluster.gpu is None and cluster.processes > 1:
            message += f" for each of {cluster.processes} processes"
        return [Problem(message, where, hint, level)]
    if not plan.fits:
        peak, have = plan.host_peak, cluster.host_bytes or 0
        message = (
            f"in the phase `{peak.name}` the processes need about {gib(peak.total)} of main memory, most of it for "
            f"{peak.main}; this machine has {gib(have)} free"
        )
        return [Problem(message, where, hint, "error" if peak.total > ERROR_FACTOR * have else "warning")]
    if plan.is_tight:
        sizes = f"about {gib(plan.peak.total)} of {gib(cluster.each_bytes)}"
        message = f"a GPU is nearly full in the phase `{plan.peak.name}`: {sizes}"
        tight = "halve train.tokens_per_row if memory runs out; the largest row, run before step 1, shows it"
        return [Problem(message, where, tight, "warning")] if cluster.gpu else []
    return []


def _hint(fitted: FittedPlan) -> str:
    if not fitted.fits:
        return "none of the usual changes makes it fit: a smaller model, shorter prompts and responses, or more GPUs"
    first, *others = fitted.fits
    also = "".join(f"; or {fit.words} ({fit.costs})" for fit in others)
    return f"{first.words} makes it fit ({first.costs}){also}"


def choose_recomputation(loaded: LoadedRecipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths) -> Choice:
    """Choose the first setting of `recomputation.STEPS` with which an update leaves room for fragmentation on a GPU.

    Only the phase `update` counts, because the others need the same memory with every setting. If no setting is
    enough, everything is recomputed; the memory check then reports what else to change.

    Args:
        loaded: recipe in which all other values are chosen.
    """
    room, needs = int(TIGHT * cluster.each_bytes), {}
    for setting in STEPS:
        recipe = with_values(loaded.recipe, [Choice(KEY, setting, "")])
        plan = make_plan(replace(loaded, recipe=recipe), facts, cluster, prompts)
        needs[setting] = next(phase.total for phase in plan.phases if phase.name == UPDATE)
        if needs[setting] <= room:
            break
    *milder, chosen = needs
    reason = f"an update needs about {gib(needs[chosen])} of {gib(cluster.each_bytes)} on each GPU"
    if milder:
        reason += f", with {toml_value(milder[-1])} {gib(needs[milder[-1]])}"
    return Choice(KEY, chosen, reason)
