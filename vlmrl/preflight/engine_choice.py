"""Choice of the engine for `rollout.engine = "auto"`: vLLM on a GPU where it can run, else the built-in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vlmrl.errors import Problem, VlmrlError
from vlmrl.preflight.gpu_models import Gpu
from vlmrl.recipe.auto_values import Choice
from vlmrl.recipe.rules.engine import VLLM_INSTALL, unsupported_by_vllm, vllm_refusal
from vlmrl.recipe.schema import Recipe
from vlmrl.redaction.redact import first_line
from vlmrl.rollout.vllm.settings import VllmFacts

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

KEY = "rollout.engine"


@dataclass(frozen=True)
class EngineWorld:
    """Facts besides the recipe on which the choice depends. The callables are called only if the choice needs them.

    Args:
        gpu: the GPU that trains; None = no GPU.
        vllm: returns what the installed vLLM supports.
        model: reads the model's configuration; may raise a VlmrlError.
        where: place of `rollout.engine` in the recipe, for messages.
        is_elsewhere: whether the plan is for another machine, of which only the GPU is known.
    """

    gpu: Gpu | None
    vllm: Callable[[], VllmFacts]
    model: Callable[[], ModelFacts]
    where: str
    is_elsewhere: bool = False


def choose_engine(recipe: Recipe, world: EngineWorld) -> Choice:
    """Choose `rollout.engine`.

    If the built-in engine is chosen on a GPU, the choice has a warning with the reason and the estimated slowdown.
    """
    if recipe.kind != "rl":
        return Choice(KEY, "torch", "`vlmrl sft` samples with the built-in engine")
    if world.gpu is None:
        return Choice(KEY, "torch", "no GPU is used")
    refused = unsupported_by_vllm(recipe)
    if refused:
        return _built_in(recipe, world, refused[0].message, refused[0].hint)
    if world.is_elsewhere:
        return Choice(KEY, "vllm", f"as if vLLM were installed beside {world.gpu.name}")
    vllm = world.vllm()
    if not vllm.is_installed:
        return _built_in(recipe, world, "vLLM is not installed", f"install it: {VLLM_INSTALL}")
    if vllm.error:
        why = f"vLLM {vllm.version} is installed and cannot be imported: {vllm.error}"
        return _built_in(recipe, world, why, f"reinstall it: {VLLM_INSTALL}")
    try:
        model = world.model()
    except VlmrlError as error:  # the check of the model reports this as an error
        return Choice(KEY, "vllm", f"vLLM {vllm.version} is installed; the model was not read: {first_line(error)}")
    why = vllm_refusal(model.model_type, "cuda", recipe.model.dtype, model.two_way_images)
    if why is None and model.architecture not in vllm.architectures:
        why = f"vLLM {vllm.version} does not know {model.architecture}"
    if why is not None:
        return _built_in(recipe, world, why, f"a newer vLLM may know it: {VLLM_INSTALL}")
    return Choice(KEY, "vllm", f"vLLM {vllm.version} is installed and knows {model.architecture}")


def _built_in(recipe: Recipe, world: EngineWorld, why: str, hint: str | None) -> Choice:
    """Return the choice of the built-in engine on a GPU, with a warning, or with an error if the recipe needs vLLM."""
    rollout = recipe.rollout
    needs = [
        key
        for key, on in (
            ("engine_gpus", rollout.engine_gpus > 0),
            ("overlap", rollout.overlap),
            ("tensor_parallel", rollout.tensor_parallel > 1),
        )
        if on
    ]
    if needs:
        message = f"`rollout.{needs[0]}` needs vLLM: {why}"
        return Choice(KEY, "torch", why, Problem(message, world.where, hint))
    message = f"the built-in engine generates: {why}"
    try:
        times = times_slower(recipe, world.model(), world.gpu) if world.gpu else 0.0
        message += f". Rollouts take about {times:.0f} times as long as with vLLM (estimated)"
    except VlmrlError:  # another check reports a model that cannot be read
        pass
    silence = 'to choose it without this warning: rollout.engine = "torch"'
    return Choice(
        KEY, "torch", why, Problem(message, world.where, f"{hint}; {silence}" if hint else silence, "warning")
    )


LAYER_SECONDS = 0.8e-3
"""Seconds per layer and decoding step for Python and kernel launches, with transformers' models on today's CPUs."""
VLLM_STEP_SECONDS = 2.0e-3
"""Seconds that vLLM needs between two decoding steps, for scheduling and sampling."""
VLLM_SEQUENCES = 256
"""Number of responses that vLLM decodes together."""


def times_slower(recipe: Recipe, facts: ModelFacts, gpu: Gpu, gpus: int = 1) -> float:
    """Estimate the time of a step's rollouts with the built-in engine, divided by the time with vLLM.

    Args:
        gpus: number of GPUs that generate; each generates an equal share of the responses.
    """
    r = recipe.rollout
    size = 4 if recipe.model.dtype == "float32" else 2
    read = facts.active * size / gpu.bandwidth
    responses = -(-r.prompts_per_step * r.samples_per_prompt // gpus)
    # A prompt is stored once for all of its samples.
    each = r.max_new_tokens + r.max_prompt_tokens / r.samples_per_prompt
    batches = max(1, -(-int(responses * each) // r.batch_tokens))
    built_in = batches * (read + LAYER_SECONDS * facts.layers)
    vllm = max(1, -(-responses // VLLM_SEQUENCES)) * (read + VLLM_STEP_SECONDS)
    return max(1.0, built_in / vllm)
