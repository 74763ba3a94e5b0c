"""The variable-length backend of packed rows, for GPUs in half precision: one flash-attention call a layer.

Every span of the row is one sequence of the call. A prompt's keys are its own; a response's keys are its prompt's,
copied, followed by its own, and flash attention aligns the causal mask at the end, so that each response token sees
its whole prompt and its own past. The index arithmetic is tested on the CPU; the kernel has not been run yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmrl.model.row_plan import RowPlan


@dataclass(frozen=True)
class VarlenIndex:
    """The sequences of a varlen call.

    Args:
        key_at: which token of the row each copied key is; the queries are the row as it is.
        query_starts, key_starts: int32, cumulative lengths, one more than there are sequences.
        longest_query, longest_key: of any sequence.
    """

    key_at: Tensor
    query_starts: Tensor
    key_starts: Tensor
    longest_query: int
    longest_key: int


def varlen_index(plan: RowPlan) -> VarlenIndex:
    """Where the keys of every span are. Empty spans are left out."""
    device = plan.tokens.index.device
    prompt = torch.empty(0, dtype=torch.int64, device=device)
    keys: list[Tensor] = []
    lengths: list[int] = []
    for span in plan.spans:
        own = torch.arange(span.start, span.end, device=device)
        if span.response == -1:
            prompt = own
        if span.end > span.start:
            keys.append(own if span.response == -1 else torch.cat([prompt, own]))
            lengths.append(span.end - span.start)
    key_lengths = [len(k) for k in keys]
    return VarlenIndex(
        torch.cat(keys), _starts(lengths, device), _starts(key_lengths, device), max(lengths), max(key_lengths)
    )


def _starts(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)


def varlen_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Attention of a packed row. query [1, H, N, D]; key and value may have fewer heads. Returns [1, H, N, D].

    Raises: ValueError for rows whose image tokens see each other both ways: this kernel cannot.
    """
    if plan.has_blocks(window):
        raise ValueError("the varlen backend has no bidirectional images: use flex or sdpa")
    if "varlen" not in plan.prepared:
        plan.prepared["varlen"] = varlen_index(plan)
    index = plan.prepared["varlen"]
    assert isinstance(index, VarlenIndex)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, heads, D]
    out = _kernel()(q.contiguous(), k[index.key_at], v[index.key_at], index, scaling, window)
    return out.transpose(0, 1)[None]


def _kernel() -> Any:
    """(q, k, v, index, scaling, window) -> [N, H, D]: torch's own varlen attention, else flash-attn."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return _flash_attn
    return lambda q, k, v, i, scaling, window: varlen_attn(
        q, k, v, i.query_starts, i.key_starts, i.longest_query, i.longest_key, scale=scaling,
        window_size=_window(window), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip


def _flash_attn(
    q: Tensor, k: Tensor, v: Tensor, i: VarlenIndex, scaling: float | None, window: int | None
) -> Tensor:  # pragma: no cover (needs a GPU)
    from flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    return flash_attn_varlen_func(
        q, k, v, i.query_starts, i.key_starts, i.longest_query, i.longest_key, softmax_scale=scaling, causal=True,
        window_size=_window(window),
    )  # fmt: skip


def _window(window: int | None) -> tuple[int, int]:
    """(left, right): right 0 is causal. A token of a window of W sees itself and W - 1 before it."""
    return (-1 if window is None else window - 1, 0)
