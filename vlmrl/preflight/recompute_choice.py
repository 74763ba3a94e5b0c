"""Choice of `model.gradient_checkpointing = "auto"`: the least recomputation that fits, by the memory plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from vlmrl.errors import gib
from vlmrl.model.memory import KEY, STEPS, Setting
from vlmrl.preflight.memory_plan import TIGHT, UPDATE, Cluster, make_plan
from vlmrl.preflight.memory_sizes import PromptLengths
from vlmrl.recipe.auto_values import Choice, with_values
from vlmrl.recipe.explain import toml_value
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts


def choose_recomputation(
    loaded: LoadedRecipe, facts: ModelFacts, cluster: Cluster, prompts: PromptLengths, kernels: str = "torch"
) -> Choice:
    """Choose the first setting of `recomputation.STEPS` with which an update leaves room for fragmentation on a GPU.

    Only the phase `update` counts, because the others need the same memory with every setting. If no setting is
    enough, everything is recomputed; the memory check then reports what else to change.

    Args:
        cluster: GPUs of the run.
        loaded: recipe in which all other values are chosen.
    """
    room, needs = int(TIGHT * cluster.each_bytes), {}
    for setting in STEPS:
        needs[setting] = _update_bytes(setting, loaded, facts, cluster, prompts, kernels)
        if needs[setting] <= room:
            break
    *milder, chosen = needs
    reason = f"an update needs about {gib(needs[chosen])} of {gib(cluster.each_bytes)} on each GPU"
    if milder:
        reason += f", with {toml_value(milder[-1])} {gib(needs[milder[-1]])}"
    return Choice(KEY, chosen, reason)


def _update_bytes(
    setting: Setting,
    loaded: LoadedRecipe,
    facts: ModelFacts,
    cluster: Cluster,
    prompts: PromptLengths,
    kernels: str,
) -> int:
    recipe = with_values(loaded.recipe, [Choice(KEY, setting, "")])
    plan = make_plan(replace(loaded, recipe=recipe), facts, cluster, prompts, kernels)
    return next(phase.total for phase in plan.phases if phase.name == UPDATE)
