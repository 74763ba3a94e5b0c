"""Memory check of a run: the planned machine, the memory plan, and the problem if the run does not fit."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, gib
from vlmrl.preflight.gpu_models import TYPICAL_BANDWIDTH, Gpu, known_gpu
from vlmrl.preflight.memory_fit import Fit, find_fits
from vlmrl.preflight.memory_plan import Cluster, MemoryPlan, make_plan
from vlmrl.preflight.memory_sizes import PromptLengths
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

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
    kernels = linear_kernels()
    plan = make_plan(loaded, facts, cluster, prompts, kernels)
    fits = () if plan.fits else find_fits(loaded, facts, cluster, prompts, kernels)
    return FittedPlan(plan, tuple(fits))


def find_cluster(loaded: LoadedRecipe, target: Target) -> Cluster:
    """Return the GPUs, or the CPU processes, that a plan is for."""
    from vlmrl.model.model_facts import device_facts, usable_memory

    if target.gpu is not None:
        return Cluster(target.processes, target.gpu, target.gpu.memory_bytes)
    device, _ = device_facts(loaded.recipe.model.device)
    memory = int(device["memory_bytes"])
    if device["kind"] != "cuda":
        return Cluster(target.processes, None, memory)
    known = known_gpu(device["name"])
    gpu = Gpu(device["name"], memory, known.bandwidth if known else TYPICAL_BANDWIDTH)
    return Cluster(target.processes, gpu, memory, usable_memory())


def linear_kernels() -> str:
    """Return the kernels of linear attention here: "fla" if flash-linear-attention is installed, else "torch"."""
    return "torch" if importlib.util.find_spec("fla") is None else "fla"


def check_device(loaded: LoadedRecipe, target: Target) -> list[Problem]:
    """Return the problems of the device that the recipe names."""
    from vlmrl.model.model_facts import device_facts

    if target.is_elsewhere:
        return []
    device, problems = device_facts(loaded.recipe.model.device)
    if problems:
        where = loaded.where(("model", "device"), ("model", "path"))
        return [Problem(what, where, hint) for what, hint in problems]
    if device["kind"] == "cpu" and loaded.recipe.model.dtype == "bfloat16":
        where = loaded.where(("model", "dtype"), ("model", "device"))
        return [
            Problem("bfloat16 on a CPU is slower than float32 on most machines", where, 'dtype = "float32"', "warning")
        ]
    return []


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
