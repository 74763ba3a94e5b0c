"""Memory of the activations of a packed row: what is kept for the backward pass, and its working memory.

Sizes are numbers of the compute dtype per token and layer, computed as multiples of the layer's widths. The multiples
are counted, not measured on a GPU: the tensors that real passes of small Qwen2.5-VL, Qwen3-VL and Qwen3.5 models keep
were counted (tests/unit/preflight/test_memory_plan.py counts whole updates). For other architectures they are
estimates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LINEAR_KEPT = {"torch": (45.0, 4.0), "fla": (12.0, 8.0)}
"""Numbers that the gated delta rule keeps per token, as multiples of (value width, key width).

"torch": plain PyTorch (counted). "fla": flash-linear-attention's kernels (estimated from the tensors that they save;
not measured).
"""


@dataclass(frozen=True)
class LayerSize:
    """Memory of a layer's activations, as numbers per token.

    Args:
        kept: activations held from the layer's forward pass to its backward pass.
        whole: activations held during the layer's backward pass when gradient checkpointing computes them again.
        working: maximum of the gradients that are held during its backward pass in addition.
    """

    kept: float
    whole: float
    working: float


@dataclass(frozen=True)
class Widths:
    """Widths of a text model's layers, from its configuration."""

    hidden: int
    query: int
    key: int
    inner: int
    expert_inner: int
    experts_per_token: int
    value: int
    linear_key: int
    has_head_norms: bool

    @classmethod
    def of(cls, text: Mapping[str, Any]) -> Widths:
        hidden = int(text.get("hidden_size") or 0)
        heads = int(text.get("num_attention_heads") or 1)
        width = int(text.get("head_dim") or hidden // heads)
        experts = int(text.get("num_experts") or text.get("num_local_experts") or 0)
        return cls(
            hidden,
            width * heads,
            width * int(text.get("num_key_value_heads") or heads),
            int(text.get("intermediate_size") or 4 * hidden),
            int(text.get("moe_intermediate_size") or 0),
            int(text.get("num_experts_per_tok") or 0) if experts else 0,
            int(text.get("linear_num_value_heads") or 0) * int(text.get("linear_value_head_dim") or 0),
            int(text.get("linear_num_key_heads") or 0) * int(text.get("linear_key_head_dim") or 0),
            str(text.get("model_type", "")).startswith(HEAD_NORMS),
        )


HEAD_NORMS = ("qwen3", "gemma3", "gemma4", "glm4")
"""Beginnings of `model_type` of the text models that normalise queries and keys per head."""


def text_layers(text: Mapping[str, Any], dtype_bytes: int, kernels: str = "torch") -> list[LayerSize]:
    """Return the sizes of a text model's layers.

    Args:
        dtype_bytes: bytes per number in the forward pass, 2 or 4.
        kernels: implementation of linear attention, "torch" or "fla".
    """
    w = Widths.of(text)
    layers = int(text.get("num_hidden_layers") or 0)
    kinds = list(text.get("layer_types") or ["full_attention"] * layers)
    half = dtype_bytes == 2  # norms compute in float32: in half precision they keep a float32 copy
    inner_kept, inner_whole, inner_working = _mlp(w)
    norms = 2.0 * w.hidden * half
    sizes: dict[str, LayerSize] = {}
    for kind in set(kinds):
        if kind == "linear_attention":
            value, key = LINEAR_KEPT[kernels]
            share = 1.0 if half or kernels == "fla" else 0.65
            mixing = (6.0 if half else 0.0) * w.hidden + share * (value * w.value + key * w.linear_key)
        else:
            head_norms = (3.0 if half else 2.0) * (w.query + w.key) * w.has_head_norms
            mixing = norms + 2.0 * (w.query + w.key) + head_norms
        kept = 4.0 * w.hidden + mixing + inner_kept
        sizes[kind] = LayerSize(kept, kept + 2.0 * w.hidden + inner_whole - inner_kept, inner_working + 2.0 * w.hidden)
    return [sizes[kind] for kind in kinds]


def _mlp(w: Widths) -> tuple[float, float, float]:
    """Return (kept, whole, working) of an MLP or a mixture of experts, as in `LayerSize`."""
    if not w.experts_per_token:
        return 2.0 * w.inner, 4.0 * w.inner, 2.0 * w.inner
    tokens = float(w.experts_per_token)
    inner, hidden = tokens * w.expert_inner, tokens * w.hidden
    return 4.0 * inner + 2.0 * hidden, 4.0 * inner + 2.0 * hidden, 2.0 * inner + 3.0 * hidden


def vision_layer(vision: Mapping[str, Any], gated: bool, dtype_bytes: int) -> LayerSize:
    """Return the activation memory of one layer of a vision tower, as numbers per patch.

    Args:
        gated: whether the layer's MLP has a gate.
    """
    hidden = vision_width(vision)
    inner = int(vision.get("intermediate_size") or int(vision.get("mlp_ratio") or 4) * hidden)
    half = dtype_bytes == 2
    kept = (13.0 if gated and half else 11.0) * hidden + (2.0 if gated else 1.0) * inner
    return LayerSize(kept, kept + 2.0 * inner + 2.0 * hidden, 2.0 * inner + 2.0 * hidden)


def vision_width(vision: Mapping[str, Any]) -> int:
    """Return the hidden width of a vision tower.

    Qwen2-VL's vision configuration calls it `embed_dim`; `hidden_size` there is the text model's width.
    """
    return int(vision.get("embed_dim") or vision.get("hidden_size") or 0)


def vision_depth(vision: Mapping[str, Any]) -> int:
    """Return the number of layers of a vision tower."""
    return int(vision.get("depth") or vision.get("num_hidden_layers") or 0)
