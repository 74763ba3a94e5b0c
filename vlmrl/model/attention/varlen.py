"""Variable-length backend of packed rows and vision towers, for GPUs in half precision.

It makes one flash-attention call per layer. Every span of a row is one sequence of the call. A prompt attends to its
own keys; a response attends to a copy of its prompt's keys, followed by its own keys. Flash attention aligns the causal
mask with the last key, so that each response token sees its whole prompt and its own past. The index arithmetic is
tested on the CPU; the kernel has not been run yet.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vlmrl.errors import CheckpointError
from vlmrl.model.attention.row_plan import RowPlan


@dataclass(frozen=True)
class VarlenIndex:
    """Sequences of a varlen call over a row of N tokens.

    Args:
        key_at: int64 [keys of the call], the row index of the token that each key is copied from. The queries are the
            row's own, not copied.
        own_at: int64 [N], for each token of the row, the index of its key in its own span's sequence.
        copies: for each prompt with responses: its start and end in the row, and int64 [1 + responses, P], the indices
            of its own keys and of their copies among the keys of the call.
        query_starts, key_starts: int32 [sequences + 1], cumulative lengths of the sequences.
        longest_query, longest_key: number of queries and of keys of the longest sequence.
    """

    key_at: Tensor
    own_at: Tensor
    copies: tuple[tuple[int, int, Tensor], ...]
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int


def varlen_index(plan: RowPlan) -> VarlenIndex:
    """Return the positions of the keys of every span, without empty spans.

    They are computed on the CPU and copied to the row's device.
    """
    device = plan.tokens.index.device
    prompt = torch.empty(0, dtype=torch.int64)
    keys: list[Tensor] = []
    own_at: list[Tensor] = []
    places: list[tuple[int, int, list[Tensor]]] = []
    queries: list[int] = []
    copied = 0
    for span in plan.spans:
        own = torch.arange(span.start, span.end)
        if span.response == -1:
            prompt = own
            places.append((span.start, span.end, []))
        if span.end == span.start:
            continue
        keys.append(own if span.response == -1 else torch.cat([prompt, own]))
        places[-1][2].append(copied + torch.arange(len(prompt)))
        copied += len(keys[-1])
        own_at.append(torch.arange(copied - len(own), copied))
        queries.append(len(own))
    key_lengths = [len(k) for k in keys]
    return VarlenIndex(
        torch.cat(keys).to(device),
        torch.cat(own_at).to(device),
        tuple((s, e, torch.stack(p).to(device)) for s, e, p in places if e > s and len(p) > 1),
        _starts(queries).to(device),
        _starts(key_lengths).to(device),
        max(queries),
        max(key_lengths),
    )


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


class _Copied(torch.autograd.Function):
    """Copy keys or values [N, heads, D] of the row to the sequences of the call.

    In the backward pass, the gradients of a prompt token's copies are summed in float32, in a fixed order, and rounded
    once. Plain indexing would sort all indices in every layer and add the copies one by one in the tensor's own
    precision (8 bits in bfloat16).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: VarlenIndex) -> Tensor:
        ctx.index = index
        return x.index_select(0, index.key_at)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        index: VarlenIndex = ctx.index
        total = gradient.index_select(0, index.own_at)
        for start, end, places in index.copies:
            copies = gradient.index_select(0, places.flatten()).unflatten(0, places.shape)
            total[start:end] = copies.sum(0, dtype=torch.float32)
        return total, None


def varlen_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention of a packed row, [1, H, N, D].

    Args:
        query: [1, H, N, D].
        key, value: [1, heads, N, D], with H or fewer heads.
    Raises: ValueError for rows whose image tokens see each other in both directions, which this kernel does not
        support.
    """
    if plan.has_blocks(window):
        raise ValueError("the varlen backend does not support bidirectional images: use flex or sdpa")
    if "varlen" not in plan.prepared:
        plan.prepared["varlen"] = varlen_index(plan)
    index = plan.prepared["varlen"]
    assert isinstance(index, VarlenIndex)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    k, v = (_Copied.apply(x, index) for x in (k, v))
    out = _kernel()(
        q.contiguous(),
        k,
        v,
        index.query_starts,
        index.key_starts,
        index.longest_query,
        index.longest_key,
        scale=scaling,
        window_size=_window(window),
    )
    return out.transpose(0, 1)[None]


def vision_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return the attention of a vision tower whose images, or windows of images, form one sequence of N patches.

    On a GPU in half precision it is one kernel call. Elsewhere it is one call per window, as transformers does under
    SDPA; on a GPU those would be thousands of small launches, and each layer would copy the lengths from the GPU to the
    CPU.

    Args:
        query, key, value: [1, H, N, D].
        cu_seq_lens_q: int32 [windows + 1], the start of each window, and N at the end.
        max_length_q: length of the longest window.
    Returns: ([1, N, H, D], None), as transformers expects.
    """
    if _takes_kernel(query):
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
        longest = int(max_length_q)
        out = _kernel()(q, k, v, cu_seq_lens_q, cu_seq_lens_q, longest, longest, scale=scaling, window_size=(-1, -1))
        return out[None], None
    lengths = cu_seq_lens_q.diff().tolist()
    windows = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    out = torch.cat([F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in windows], 2)
    return out.transpose(1, 2), None


def _takes_kernel(query: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


@cache
def _kernel() -> Callable[..., Any]:
    """Return flash attention over sequences of different length: flash-attn's if it is installed, else torch's own."""
    if (function := flash_attn()) is not None:
        return _with_torch_signature(function)
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts fewer key heads than query heads and has no `enable_gqa`; later versions need the argument.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if has_flag else varlen_attn


def flash_attn() -> Callable[..., Any] | None:
    """Return the function of the package flash-attn; None if it is not installed.

    The package flash-attn-4 installs only `flash_attn.cute`, without this function: flash-attn then counts as absent.

    Raises: CheckpointError when it is installed but cannot be imported.
    """
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        return getattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", None)
    except ImportError as error:
        hint = "install it anew for this torch, or remove it (pip uninstall flash-attn): torch has a kernel of its own"
        raise CheckpointError(f"flash-attn is installed and cannot be imported: {error}", hint=hint) from error


def _with_torch_signature(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return flash-attn's function, called as torch's own kernel is."""

    def kernel(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        longest_query: int,
        longest_key: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
    ) -> Tensor:
        return function(
            query,
            key,
            value,
            query_starts,
            key_starts,
            longest_query,
            longest_key,
            softmax_scale=scale,
            causal=window_size[1] == 0,
            window_size=window_size if window_size[0] >= 0 else (-1, -1),
        )

    return kernel


def _window(window: int | None) -> tuple[int, int]:
    """Return the window as (tokens to the left, tokens to the right); 0 to the right = causal.

    With a window of W, a token sees itself and the W - 1 tokens before it.
    """
    return (-1 if window is None else window - 1, 0)
