"""Optional GPU kernels that a model would profit from: what is missing, how to get it, what it costs to be without."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from vlmrl.check.memory import HERE, Target, find_cluster
from vlmrl.errors import Problem
from vlmrl.model.activation_size import LINEAR_KEPT
from vlmrl.recipe.extras import install_line
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.model.facts import ModelFacts


def check_kernels(loaded: LoadedRecipe, facts: ModelFacts, target: Target = HERE) -> list[Problem]:
    """Warn of kernels that this model's layers would use on a GPU and that are not installed."""
    if find_cluster(loaded, target).gpu is None or target.is_elsewhere:
        return []
    linear = list(facts.text.get("layer_types") or []).count("linear_attention")
    where, found = loaded.where(("model", "path")), []
    if linear and importlib.util.find_spec("fla") is None:
        times = LINEAR_KEPT["torch"][0] / LINEAR_KEPT["fla"][0]
        message = (
            f"flash-linear-attention is not installed: {linear} of {facts.layers} layers run their recurrence in plain "
            f"PyTorch, in many small kernels, and keep about {times:.0f} times the activations for it"
        )
        found.append(Problem(message, where, install_line("flash-linear-attention"), "warning"))
    if linear and importlib.util.find_spec("causal_conv1d") is None:
        message = f"causal-conv1d is not installed: the convolutions of {linear} layers run in plain PyTorch, slower"
        found.append(Problem(message, where, install_line("causal-conv1d"), "warning"))
    return found


def attention_kernel(loaded: LoadedRecipe, facts: ModelFacts) -> str:
    """Return which attention kernel packed rows take on a GPU, in words."""
    if facts.sharing != "packed":
        return "PyTorch's own attention"
    if loaded.recipe.model.dtype == "float32" or facts.two_way_images:
        return "FlexAttention"
    if importlib.util.find_spec("flash_attn") is not None:
        return "flash-attn's variable-length kernel"
    return f"PyTorch's variable-length kernel (flash-attn would be used where installed: {install_line('flash-attn')})"
