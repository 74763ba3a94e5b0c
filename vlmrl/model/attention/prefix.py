"""Exact attention for rows whose responses share one prompt, through transformers' AttentionInterface.

Model code is neither patched nor copied: the row's plan is passed as a keyword argument of `forward`
(model/attention/row_plan.py defines which token sees which). Without a plan (generation, the padded path) the attention
is transformers' own SDPA attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vlmrl.model.attention.flex import flex_row_attention
from vlmrl.model.attention.row_plan import RowPlan
from vlmrl.model.attention.split import can_split, split_row_attention
from vlmrl.model.attention.varlen import varlen_row_attention, vision_attention
from vlmrl.model.decode_cache import DecodeCache

NAME = "vlmrl_shared_prefix"
VISION_NAME = "vlmrl_flash_vision"
"""Name of the attention of vision towers. Because the name contains "flash", transformers passes all windows in one
sequence to it."""


@dataclass(frozen=True)
class ForkPlan:
    """Responses that continue one cached prompt, one per batch row, padded on the right.

    Args:
        mask: bool [R, P + R], True = the response token (row) sees the token (column).
    """

    mask: Tensor


def fork_plan(prompt_tokens: int, response_tokens: int, device: torch.device) -> ForkPlan:
    """Return the plan of forked responses: a response token sees the whole prompt and its own past.

    Padding needs no mask: it comes after all trained tokens, which see only earlier tokens.
    """
    causal = torch.ones(response_tokens, prompt_tokens + response_tokens, dtype=torch.bool, device=device)
    return ForkPlan(causal.tril(prompt_tokens))  # [R, P + R]


def no_mask(device: torch.device) -> Tensor:
    """Return the placeholder mask for a forward with a plan: transformers builds no mask if it gets a 4-D one."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def choose_backend(device: torch.device, dtype: torch.dtype, bidirectional: str) -> str:
    """Return the attention backend of packed rows on this device.

    On the CPU: split (SDPA in layers that split does not support). On a GPU: varlen where flash attention works (half
    precision, no bidirectional images), else FlexAttention.
    """
    if device.type == "cpu":
        return "split"
    if device.type != "cuda":
        return "sdpa"
    half = dtype in (torch.bfloat16, torch.float16)
    return "varlen" if half and bidirectional == "never" else "flex"


def prefix_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    row_plan: RowPlan | ForkPlan | None = None,
    sliding_window: int | None = None,
    decode_cache: DecodeCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the attention of one packed row, of forked responses, or of one decoding step over a `DecodeCache`.

    In all other cases it is transformers' SDPA attention. Letters: B batch (1 for a packed row), H heads, N tokens, D
    head width.

    Args:
        query: [B, H, N, D].
        key, value: [B, heads, N, D], with H or fewer heads (grouped queries).
    Returns: ([B, N, H, D], None), as transformers expects.
    """
    if decode_cache is not None:
        return decode_cache.attend(module.layer_idx, query, key, value, scaling), None
    if row_plan is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window, **kwargs
        )
    if isinstance(row_plan, ForkPlan):
        key, value = _all_heads(query, key, value)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=row_plan.mask, scale=scaling)
    elif row_plan.backend == "flex":
        out = flex_row_attention(query, key, value, row_plan, scaling, sliding_window)
    elif row_plan.backend == "varlen":
        out = varlen_row_attention(query, key, value, row_plan, scaling, sliding_window)
    elif row_plan.backend == "split" and can_split(row_plan, sliding_window, query):
        out = split_row_attention(query, key, value, row_plan, scaling)
    else:
        out = _sdpa_row_attention(query, *_all_heads(query, key, value), row_plan, scaling, sliding_window)
    return out.transpose(1, 2).contiguous(), None


def _all_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    repeat = query.shape[1] // key.shape[1]
    return (key, value) if repeat == 1 else (key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))


def _sdpa_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention of a packed row, with one SDPA call per piece of it. [1, H, N, D]."""
    pieces = []
    for piece in plan.pieces:
        own = slice(piece.start, piece.end)
        keys, values = key[:, :, own], value[:, :, own]
        if piece.prompt is not None:
            prompt = slice(*piece.prompt)
            keys, values = torch.cat([key[:, :, prompt], keys], 2), torch.cat([value[:, :, prompt], values], 2)
        mask = plan.mask(piece, window)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, own], keys, values, attn_mask=mask, is_causal=mask is None, scale=scaling
            )
        )
    return torch.cat(pieces, 2)


AttentionInterface.register(NAME, prefix_attention)
AttentionInterface.register(VISION_NAME, vision_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
