"""FlexAttention backend of packed rows, for GPUs: one compiled kernel call per layer, which skips masked blocks.

Row lengths are padded to a few fixed lengths (buckets), so that few shapes are compiled. Padding tokens attend only to
themselves and are removed from the result. On the CPU the same code runs uncompiled and without a backward pass; the
tests of the masks use this. It has not been run on a GPU yet.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from vlmrl.model.attention.row_plan import RowPlan, RowTokens

COMPILATIONS = 128
"""Maximum number of shapes that the kernel is compiled for. In a model with one window size, rows of up to 65,536
tokens have 64 different padded lengths."""
BUCKET_TOKENS = 512
"""Rows are padded to a multiple of this number; long rows to a larger multiple, which is at most an eighth of the
row."""

compiled_shapes: set[tuple[Any, ...]] = set()
"""Shapes that the compiled kernel was called with: each is one compilation (`policy/attention_compilations`)."""


def bucket(tokens: int) -> int:
    """Return the padded length of a row."""
    step = max(BUCKET_TOKENS, 2 ** max(0, tokens.bit_length() - 4))
    return -(-tokens // step) * step


def flex_row_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None, window: int | None
) -> Tensor:
    """Return the attention of a packed row, [1, H, N, D].

    Args:
        query: [1, H, N, D].
        key, value: [1, heads, N, D], with H or fewer heads.
    """
    tokens = query.shape[2]
    padded = bucket(tokens)
    mask = _block_mask(plan, window, padded)
    # [1, H, N, D] -> [1, H, padded, D]
    grow = (0, 0, 0, padded - tokens)
    attend: Any = flex_attention
    if query.is_cuda:
        attend = _compiled_attention()
        compiled_shapes.add((tuple(query.shape[:2]), key.shape[1], padded, query.shape[3], query.dtype, window))
    out = attend(
        F.pad(query, grow),
        F.pad(key, grow),
        F.pad(value, grow),
        block_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out[:, :, :tokens]


def _block_mask(plan: RowPlan, window: int | None, padded: int) -> BlockMask:
    """Return the row's mask for layers of this window, computed once per row."""
    name = ("flex", window, padded)
    if name not in plan.prepared:
        tokens, blocks = _padded_tokens(plan.tokens, padded), plan.has_blocks(window)
        device = tokens.index.device

        # The variables that this function captures are part of the compiled kernel. It may capture tensors of the
        # padded length and values that all layers share, but not the row's own length: otherwise each row would be
        # compiled again.
        def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return tokens.sees(q, k, window, blocks)

        make: Any = _compiled_block_mask() if device.type == "cuda" else create_block_mask
        plan.prepared[name] = make(mask_mod, None, None, padded, padded, device=str(device))
    mask = plan.prepared[name]
    assert isinstance(mask, BlockMask)
    return mask


def _padded_tokens(tokens: RowTokens, padded: int) -> RowTokens:
    """Return the row's tokens, followed by padding tokens, each in a group of its own. [N] -> [padded]."""
    more = torch.arange(padded - len(tokens.group), device=tokens.group.device)
    return RowTokens(
        torch.cat([tokens.group, -1 - more]),
        *(
            torch.cat([x, torch.full_like(more, fill)])
            for x, fill in ((tokens.response, -1), (tokens.index, 0), (tokens.block, -1))
        ),
    )


@cache
def _compiled_attention() -> Any:
    _allow_compilations()
    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


@cache
def _compiled_block_mask() -> Any:
    _allow_compilations()
    return torch.compile(create_block_mask, dynamic=False)


def _allow_compilations() -> None:
    """Allow one compilation per bucket.

    torch's default limit is 8. Beyond the limit, torch runs the code uncompiled, with all scores in memory at once.
    """
    from torch._dynamo import config

    config.recompile_limit = max(config.recompile_limit, COMPILATIONS)
