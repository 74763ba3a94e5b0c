"""How much longer rollouts take with the built-in engine than with vLLM: an estimate by arithmetic, not a measurement.

One decoding step of either engine reads the weights once. The built-in one also starts every kernel of every layer from
Python, which vLLM records once and replays. And it answers in batches of `rollout.batch_tokens`, one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmrl.check.gpus import Gpu
from vlmrl.recipe.schema import Recipe

if TYPE_CHECKING:
    from vlmrl.model.facts import ModelFacts

LAYER_SECONDS = 0.8e-3
"""Python and the starting of kernels, a layer and a step: what transformers' models take on today's processors."""
VLLM_STEP_SECONDS = 2.0e-3
"""What vLLM does between two steps: scheduling, sampling."""
VLLM_SEQUENCES = 256
"""Responses that vLLM decodes together."""


def times_slower(recipe: Recipe, facts: ModelFacts, gpu: Gpu, gpus: int = 1) -> float:
    """Estimate how many times as long as vLLM the built-in engine takes for the rollouts of a step.

    Args: gpus: that generate, each its share of the responses.
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
