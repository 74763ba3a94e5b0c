"""How large vLLM's cache is made, and what an engine takes besides its weights and cache.

Used by the plan of `vlmrl check` and by the engine itself when it starts, so that both come to the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vlmrl.model.cache_size import CacheShape, cache_shape

MAX_SEQUENCES = 256
"""Responses that an engine works on at once, at most: more hardly make it faster."""
MIN_CACHE_BYTES = 1 << 28
"""Floor of an automatic cache, besides the longest sequence, which must always fit."""
MAX_CACHE_BYTES_CPU = 4 << 30
"""Ceiling of an automatic cache in main memory."""
CPU_CACHE_SHARE = 0.25
"""Share of the main memory that is free which an automatic cache may take."""
BATCHED_TOKENS = 8192
"""Tokens in one step of the engine, at least: a prompt's images are encoded whole."""
GRAPH_BYTES = 1 << 30
"""CUDA graphs and what vLLM's kernels keep for themselves; not given back in sleep. Typical of vLLM, not measured here.
"""
RESERVE_SHARE = 0.04
"""Share of a GPU's memory that an automatic cache leaves free: other allocations, fragments."""


@dataclass(frozen=True)
class Demand:
    """What an engine has to generate at once.

    Args:
        groups: prompts, each with `samples` responses.      prompt, response: tokens of each, at most.
        longest: tokens of the longest sequence that it must take.
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
    """An automatic cache. Bytes: `needed` by all sequences at once, `least` by a single one, `chosen`."""

    needed: int
    least: int
    chosen: int


def size_cache(shape: CacheShape, demand: Demand, free_bytes: int | None, device: str, parts: int = 1) -> CacheSize:
    """Return the cache that an engine gets on each of its GPUs: what its sequences need, as far as memory is free.

    Args:
        free_bytes: what the cache may take; None = not known, it gets what it needs.
        device: "cuda" or "cpu".      parts: GPUs that share each sequence's keys and values.
    """
    samples = max(1, min(demand.samples, demand.sequences))
    groups = -(-demand.sequences // samples)
    needed = max(groups * shape.group_bytes(demand.prompt, demand.response, samples) // parts, MIN_CACHE_BYTES)
    least = int(1.1 * shape.sequence_bytes(demand.longest)) // parts
    if device == "cpu":
        limit = (
            MAX_CACHE_BYTES_CPU if free_bytes is None else min(MAX_CACHE_BYTES_CPU, int(free_bytes * CPU_CACHE_SHARE))
        )
    else:
        limit = needed if free_bytes is None else max(0, free_bytes)
    return CacheSize(max(needed, least), least, max(least, min(needed, limit)))


def engine_work(text: Mapping[str, Any], dtype_bytes: int, longest: int, sequences: int, parts: int) -> int:
    """Return what an engine takes on a GPU besides weights and cache: activations of a step, logits, CUDA graphs."""
    hidden, inner = int(text.get("hidden_size") or 0), int(text.get("intermediate_size") or 0)
    experts = int(text.get("num_experts_per_tok") or 0)
    inner = max(inner, experts * (int(text.get("moe_intermediate_size") or 0) + hidden))
    tokens = max(BATCHED_TOKENS, longest)
    logits = 3 * sequences * int(text.get("vocab_size") or 0) * 4
    return tokens * (2 * inner // parts + 8 * hidden) * dtype_bytes + logits + GRAPH_BYTES


def text_cache_shape(text: Mapping[str, Any], dtype: str) -> CacheShape:
    """Return `cache_shape` for a recipe's `model.dtype`."""
    return cache_shape(text, 4 if dtype == "float32" else 2)
