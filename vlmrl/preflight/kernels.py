"""Check for optional GPU kernels of a model: missing kernels, commands that install them, and the cost without them."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from vlmrl.errors import Problem, install_line
from vlmrl.model.memory import LINEAR_KEPT
from vlmrl.preflight.memory import HERE, Target, find_cluster
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

PLAIN_ATTENTION = "PyTorch's scaled_dot_product_attention"


def check_kernels(loaded: LoadedRecipe, facts: ModelFacts, target: Target = HERE) -> list[Problem]:
    """Warn of kernels that this model's layers would use on a GPU and that are not installed."""
    if find_cluster(loaded, target).gpu is None or target.is_elsewhere:
        return []
    linear = list(facts.text.get("layer_types") or []).count("linear_attention")
    where, problems = loaded.where(("model", "path")), []
    if linear and importlib.util.find_spec("fla") is None:
        times = LINEAR_KEPT["torch"][0] / LINEAR_KEPT["fla"][0]
        message = (
            f"flash-linear-attention is not installed: {linear} of {facts.layers} layers compute their recurrence in "
            f"plain PyTorch, in many small kernels, and keep about {times:.0f} times as many activations"
        )
        problems.append(Problem(message, where, install_line("flash-linear-attention"), "warning"))
    if linear and importlib.util.find_spec("causal_conv1d") is None:
        message = f"causal-conv1d is not installed: the convolutions of {linear} layers run in plain PyTorch, slower"
        problems.append(Problem(message, where, install_line("causal-conv1d"), "warning"))
    return problems


def attention_kernel(loaded: LoadedRecipe, facts: ModelFacts, target: Target = HERE) -> dict[str, Any] | None:
    """Return the kernel that computes attention in training on this machine's GPU; None if there is no GPU.

    If flash-attn is missing, there is no warning, because PyTorch has a similar kernel.

    Returns: `text` and `images`: the kernels of the language model and of the vision tower in words; `missing`: how to
        install flash-attn if this run would use it, else None.
    Raises: CheckpointError for a flash-attn that cannot be imported.
    """
    if target.is_elsewhere or find_cluster(loaded, target).gpu is None:
        return None
    if facts.sharing == "padded":
        return {"text": PLAIN_ATTENTION, "images": PLAIN_ATTENTION, "missing": None}
    from vlmrl.model.attention import flash_attn

    here = flash_attn() is not None
    varlen = "flash-attn" if here else "PyTorch's variable-length kernel"
    half = loaded.recipe.model.dtype != "float32"
    rows = "FlexAttention" if not half or facts.two_way_images else varlen
    text = rows if facts.sharing == "packed" else PLAIN_ATTENTION
    images = varlen if half and facts.has_axes else PLAIN_ATTENTION
    profits = varlen in (text, images) and not here
    return {"text": text, "images": images, "missing": install_line("flash-attn") if profits else None}
