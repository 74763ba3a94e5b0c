"""Exact attention for packed rows whose responses share one prompt, through transformers' AttentionInterface.

A prompt token sees its prompt's past; a response token sees its whole prompt and its own response's past, never a
sibling or another group. Model code is neither patched nor copied: the row's layout travels as a keyword argument of
`forward`. Without a layout (generation, the padded path) this is transformers' own SDPA attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from vlmrl.model.prompt_cache import PromptCache, decode_attention
from vlmrl.types import Span

NAME = "vlmrl_shared_prefix"


@dataclass(frozen=True)
class _GroupPlan:
    """One group of a row: its prompt tokens [start, prompt_end), its responses [prompt_end, end), and who sees whom."""

    start: int
    prompt_end: int
    end: int
    mask: Tensor
    """bool [R, P + R]: True = the response token (row) sees the token (column)."""


@dataclass(frozen=True)
class RowPlan:
    """A layout made ready for attention: built once a row, used by every layer."""

    groups: tuple[_GroupPlan, ...]


def plan_row(layout: Sequence[Span], device: torch.device) -> RowPlan:
    """Masks of a row's groups.

    Args: layout: the row's spans; each group is one prompt span followed by its responses.
    Raises: ValueError when the spans are not contiguous or a group does not begin with its prompt.
    """
    groups: dict[int, list[Span]] = defaultdict(list)
    at = 0
    for span in layout:
        if span.start != at:
            raise ValueError(f"the layout has a gap or an overlap at token {at}: {span}")
        groups[span.group].append(span)
        at = span.end
    return RowPlan(tuple(_plan_group(spans, device) for spans in groups.values()))


def _plan_group(spans: list[Span], device: torch.device) -> _GroupPlan:
    prompt, responses = spans[0], spans[1:]
    if prompt.response != -1:
        raise ValueError(f"group {prompt.group} does not begin with its prompt")
    P, R = prompt.end - prompt.start, spans[-1].end - prompt.end
    owner = torch.repeat_interleave(
        torch.arange(len(responses), device=device),
        torch.tensor([s.end - s.start for s in responses], device=device, dtype=torch.int64),
    )
    mask = torch.ones(R, P + R, dtype=torch.bool, device=device)
    mask[:, P:] = (owner[:, None] == owner[None, :]).tril()
    return _GroupPlan(prompt.start, prompt.end, spans[-1].end, mask)


def prefix_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, row_plan: RowPlan | None = None, prompt_cache: PromptCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention of one packed row, or of one decoding step over a `PromptCache`; SDPA when there is neither.

    Letters: H heads, N tokens, D head width. query [1, H, N, D]; key and value may have fewer heads (grouped queries).
    Returns: ([1, N, H, D], None), as transformers expects.
    """
    if prompt_cache is not None:
        return decode_attention(module, query, key, value, scaling, prompt_cache)
    if row_plan is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    repeat = query.shape[1] // key.shape[1]
    if repeat > 1:
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    pieces = []
    for g in row_plan.groups:
        prompt, own = slice(g.start, g.prompt_end), slice(g.start, g.end)
        pieces.append(
            F.scaled_dot_product_attention(
                query[:, :, prompt], key[:, :, prompt], value[:, :, prompt], is_causal=True, scale=scaling
            )
        )
        if g.end > g.prompt_end:
            pieces.append(
                F.scaled_dot_product_attention(
                    query[:, :, g.prompt_end : g.end], key[:, :, own], value[:, :, own], attn_mask=g.mask, scale=scaling
                )
            )
    return torch.cat(pieces, 2).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
