"""Cache size of an engine: keys and values of every token, and states of linear attention.

All sizes come from the text model's configuration, as transformers writes it.
"""

from __future__ import annotations

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
GRAPH_BYTES = 1 << 30
"""Bytes that CUDA graphs and vLLM's kernels take; sleep does not free them. A typical value for vLLM, not measured
here."""
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
