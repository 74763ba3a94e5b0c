"""Sizes of an engine's cache and of a packed row's activations; which layers are recomputed. Imports no torch.

Sizes are counted per token and layer as multiples of the layer's widths. The tensors that real passes of small
Qwen2.5-VL, Qwen3-VL and Qwen3.5 models keep were counted (tests/unit/preflight/test_memory_plan.py); for other
architectures the multiples are estimates.

A recomputed layer keeps only its input for the backward pass. Of the text model the first layers are chosen: the
backward pass reaches them last, when the activations of the others are freed already, so the peak is lowest. The
numbers of a run are the same bit for bit for every choice. The head computes a number of logits at once, by device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BLOCK_TOKENS = 16
"""Tokens per block of vLLM's cache. A sequence takes whole blocks."""
STATES_A_SEQUENCE = 2
"""Number of recurrent states that vLLM holds per sequence: the current state, and the one at the end of the last cached
block."""


@dataclass(frozen=True)
class CacheShape:
    """Bytes that one sequence takes in the cache.

    Args:
        token_bytes: keys and values of a token, summed over the layers that see the whole sequence.
        window_bytes: keys and values of a token, summed over the layers that see a sliding window.
        window_tokens: size of that window, in tokens.
        state_bytes: recurrent and convolution states of a sequence; they do not depend on its length.
    """

    token_bytes: int
    window_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0

    def sequence_bytes(self, tokens: int) -> int:
        """Return the bytes of one sequence of `tokens` tokens."""
        return self.prefix_bytes(tokens) + STATES_A_SEQUENCE * self.state_bytes

    def prefix_bytes(self, tokens: int) -> int:
        """Return the bytes of the keys and values of `tokens` tokens, in whole blocks."""
        seen = min(tokens, self.window_tokens + BLOCK_TOKENS)
        return self.token_bytes * _whole(tokens) + (self.window_bytes * _whole(seen) if self.window_bytes else 0)

    def group_bytes(self, prompt: int, response: int, samples: int) -> int:
        """Return the bytes of `samples` responses to one prompt.

        The responses share the prompt's keys and values in the layers that see the whole sequence.

        Args:
            prompt, response: tokens of the prompt, and of each response.
        """
        shared = self.token_bytes * _whole(prompt)
        own = self.token_bytes * _whole(response) + STATES_A_SEQUENCE * self.state_bytes
        if self.window_bytes:
            own += self.window_bytes * _whole(min(prompt + response, self.window_tokens + BLOCK_TOKENS))
        return shared + samples * own


def cache_shape(text: Mapping[str, Any], dtype_bytes: int) -> CacheShape:
    """Return the bytes that a text model takes in a cache.

    Args:
        text: configuration of the text model, as a mapping.
        dtype_bytes: bytes per number, 2 or 4.
    """
    layers = int(text.get("num_hidden_layers") or 0)
    kinds = list(text.get("layer_types") or ["full_attention"] * layers)
    heads = int(text.get("num_attention_heads") or 1)
    width = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)
    key_heads = int(text.get("num_key_value_heads") or heads)
    token = 2 * key_heads * width * dtype_bytes
    sliding = kinds.count("sliding_attention") if text.get("sliding_window") else 0
    linear = kinds.count("linear_attention")
    return CacheShape(
        token_bytes=(len(kinds) - sliding - linear) * token,
        window_bytes=sliding * token,
        window_tokens=int(text.get("sliding_window") or 0) if sliding else 0,
        state_bytes=linear * _state_bytes(text, dtype_bytes) if linear else 0,
    )


def _state_bytes(text: Mapping[str, Any], dtype_bytes: int) -> int:
    """Return the bytes of one linear-attention layer: a float32 matrix per head, and the tail of the convolution."""
    value_heads, key_heads = int(text["linear_num_value_heads"]), int(text["linear_num_key_heads"])
    value, key = int(text["linear_value_head_dim"]), int(text["linear_key_head_dim"])
    channels = 2 * key_heads * key + value_heads * value
    return value_heads * value * key * 4 + channels * (int(text.get("linear_conv_kernel_dim") or 4) - 1) * dtype_bytes


def _whole(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


MAX_SEQUENCES = 256
"""Maximum number of responses that an engine generates at once. Larger numbers hardly raise its throughput."""
MIN_CACHE_BYTES = 1 << 28
"""Lower limit of an automatic cache, in bytes. The cache always holds at least the longest sequence."""
MAX_CACHE_BYTES_CPU = 4 << 30
"""Upper limit of an automatic cache in main memory, in bytes."""
CPU_CACHE_SHARE = 0.25
"""Share of the free main memory that an automatic cache may take."""
BATCHED_TOKENS = 8192
"""Minimum number of tokens per step of the engine. The images of a prompt are encoded in one step."""
PACKED_BYTES = 1 << 30
"""Largest copy of float32 weights that the built-in engine makes on a CPU while it generates."""
GRAPH_BYTES = 1 << 30
"""Bytes that CUDA graphs and vLLM's kernels take; sleep does not free them. A typical value for vLLM, not measured
here. docs/design/tried.md says what bounds it."""
RESERVE_SHARE = 0.04
"""Share of a GPU's memory that an automatic cache leaves free, for other allocations and fragments."""


@dataclass(frozen=True)
class Demand:
    """Sequences that an engine has to generate at once.

    Args:
        groups: number of prompts, each with `samples` responses.
        prompt, response: maximum number of tokens of a prompt, and of a response.
        longest: tokens of the longest sequence that must fit.
    """

    groups: int
    samples: int
    prompt: int
    response: int
    longest: int

    @property
    def sequences(self) -> int:
        return min(self.groups * self.samples, MAX_SEQUENCES)


@dataclass(frozen=True)
class CacheSize:
    """Size of an automatic cache in bytes.

    Args:
        needed: bytes for all sequences at once.
        least: bytes for a single sequence.
        chosen: bytes that the engine gets.
    """

    needed: int
    least: int
    chosen: int


def size_cache(shape: CacheShape, demand: Demand, free_bytes: int | None, device: str, parts: int = 1) -> CacheSize:
    """Return the cache size of an engine per GPU: the need of its sequences, limited by the free memory.

    Args:
        free_bytes: maximum for the cache; None = unknown: the cache gets all that it needs.
        device: "cuda" or "cpu".
        parts: number of GPUs that share each sequence's keys and values.
    """
    samples = max(1, min(demand.samples, demand.sequences))
    groups = -(-demand.sequences // samples)
    needed = max(groups * shape.group_bytes(demand.prompt, demand.response, samples) // parts, MIN_CACHE_BYTES)
    # 10% more than the longest sequence
    least = int(1.1 * shape.sequence_bytes(demand.longest)) // parts
    if device == "cpu":
        limit = (
            MAX_CACHE_BYTES_CPU if free_bytes is None else min(MAX_CACHE_BYTES_CPU, int(free_bytes * CPU_CACHE_SHARE))
        )
    else:
        limit = needed if free_bytes is None else max(0, free_bytes)
    return CacheSize(max(needed, least), least, max(least, min(needed, limit)))


def engine_work(text: Mapping[str, Any], dtype_bytes: int, longest: int, sequences: int, parts: int) -> int:
    """Return the bytes that an engine needs on a GPU in addition to weights and cache.

    They are for the activations of a step, the logits and the CUDA graphs.
    """
    hidden, inner = int(text.get("hidden_size") or 0), int(text.get("intermediate_size") or 0)
    experts = int(text.get("num_experts_per_tok") or 0)
    inner = max(inner, experts * (int(text.get("moe_intermediate_size") or 0) + hidden))
    tokens = max(BATCHED_TOKENS, longest)
    logits = 3 * sequences * int(text.get("vocab_size") or 0) * 4
    return tokens * (2 * inner // parts + 8 * hidden) * dtype_bytes + logits + GRAPH_BYTES


def text_cache_shape(text: Mapping[str, Any], dtype: str) -> CacheShape:
    """Return `cache_shape` for a recipe's `model.dtype`."""
    return cache_shape(text, 4 if dtype == "float32" else 2)


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


BYTES_A_LOGIT = 13
"""Bytes per logit at the peak of forward and backward pass: the logit and two more float32 numbers, and a part of a
divergence's."""
FREE_SHARE = 0.25
"""Share of a device's free memory that the logits of one chunk may take."""


@dataclass(frozen=True)
class HeadChunks:
    """Sizes of the head's chunks, as numbers of logits.

    Args:
        chunk: logits held at once; if there are several chunks, each is computed again in the backward pass.
        block: logits of a chunk that are turned into probabilities at once.
    """

    chunk: int
    block: int

    def positions(self, vocabulary: int) -> int:
        """Return the number of positions per chunk; 1 if a single position has more logits than a chunk."""
        return max(1, self.chunk // vocabulary)

    def peak_bytes(self, positions: int, vocabulary: int) -> int:
        """Return the peak memory of the log-probs of `positions` positions, in bytes."""
        return BYTES_A_LOGIT * vocabulary * min(positions, self.positions(vocabulary))


ON_CPU = HeadChunks(2**24, 2**19)
"""Sizes on the CPU. Each further chunk computes its logits again and adds a gradient of the head's size: with a
vocabulary of 152,000, chunks of 2^22 take 1.7 times as long (`scripts/bench/head.py`). A block, 2 MiB of float32, stays
in a core's cache between operations."""
ON_DEVICE = HeadChunks(2**28, 2**28)
"""Sizes on a GPU. For 4,800 positions and a vocabulary of 152,000, they mean 3 chunks and about 150 kernel launches;
with blocks of 2^21 logits it would be 15,000 launches."""
LEAST_ON_DEVICE = HeadChunks(2**24, 2**24)
"""Smallest sizes on a GPU, used even if less memory is free."""


def head_chunks(device: str, free_bytes: int | None = None) -> HeadChunks:
    """Return the sizes for a device.

    Args:
        device: type of the device, "cpu" or any other.
        free_bytes: free memory of the device; None = unknown.
    Example: "cuda" with 8 GiB free: a quarter is 2 GiB, 1.65e8 logits of 13 bytes.
    """
    if device == "cpu":
        return ON_CPU
    if free_bytes is None:
        return ON_DEVICE
    fits = int(FREE_SHARE * free_bytes) // BYTES_A_LOGIT
    size = min(max(fits, LEAST_ON_DEVICE.chunk), ON_DEVICE.chunk)
    return HeadChunks(size, size)


KEY = "model.gradient_checkpointing"
Setting = bool | str | float
"""Value of KEY: false, "vision", a share of the text model's layers, or true."""
STEPS: tuple[Setting, ...] = (False, "vision", 0.25, 0.5, 0.75, True)
"""Settings that a memory plan chooses from, those with the least recomputation first."""
UPDATE_SHARE = 1 / 3
"""Share of an update's time that recomputing all layers adds: the forward pass once more, beside a backward pass that
takes twice as long as it."""


@dataclass(frozen=True)
class Recomputed:
    """Recomputed layers of a model.

    Args:
        vision: whether those of the vision tower are recomputed, all of them.
        text: number of the text model's first layers that are recomputed.
    """

    vision: bool
    text: int


def recomputed_layers(setting: Setting, layers: int) -> Recomputed:
    """Return the layers that a setting recomputes.

    Args:
        setting: a share between 0 and 1 is rounded up to whole layers, and includes the vision tower. "auto" is an open
            value: until a run chooses one, nothing is recomputed.
        layers: number of layers of the text model.
    """
    if setting is True:
        return Recomputed(True, layers)
    if setting is False or setting == "auto":
        return Recomputed(False, 0)
    if setting == "vision":
        return Recomputed(True, 0)
    return Recomputed(True, math.ceil(float(setting) * layers))


def stricter(setting: Setting) -> tuple[Setting, ...]:
    """Return the settings of `STEPS` that recompute more than this one, those with the least recomputation first."""
    return tuple(step for step in STEPS if share_of(step) > share_of(setting))


def share_of(setting: Setting) -> float:
    """Return the share of the text model's layers that a setting recomputes; the vision tower counts a little."""
    if isinstance(setting, str):
        return {"auto": 0.0, "vision": 1e-3}[setting]
    return float(setting)
