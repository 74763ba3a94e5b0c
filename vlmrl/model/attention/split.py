"""Attention over keys in two places, joined by the log-sum-exp of the scores, without copying any key.

A response token attends to the keys of its prompt and to those of its own response. Softmax attention over both parts
is the mean of the two parts' outputs, weighted by each part's share of the summed exponentials. If flash attention's
backward pass over one part gets the output and the log-sum-exp of both parts together, it returns the exact gradient of
that part. So all responses of a group attend to their prompt in one call without a mask, and each response attends to
itself in a second call. Only query, key, value, output and one number per token are kept for the backward pass.

Decoding uses the forward pass on any device. Packed rows use forward and backward pass, on the CPU only, with the
kernels of torch's CPU flash attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlmrl.model.attention.row_plan import RowPlan, groups_of

_aten = torch.ops.aten
HAS_KERNEL = hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
"""True if this torch has the forward and backward kernels, which are not part of its public interface."""


def attention_part(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, bias: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Return softmax attention over some of the keys, and the log-sum-exp of its scores. Without gradient.

    Letters: X batch, H heads, Q queries, T keys, D head width.

    Args:
        q: [X, H, Q, D].
        k, v: [X, H, T, D].
        bias: added to the scores, [X, 1, 1, T].
        causal: whether a query sees only keys up to its own position; requires Q = T.
    Returns: (output [X, H, Q, D], log-sum-exp [X, H, Q] in float32 or float64).
    """
    if HAS_KERNEL and q.device.type == "cpu":
        mask = None if bias is None else bias.to(q.dtype).expand(-1, -1, q.shape[2], -1)
        return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    scores = q @ k.transpose(-1, -2)
    scores = (scores if scores.dtype == torch.float64 else scores.float()) * scale
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(v.dtype) @ v, lse


def join_parts(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Join two results of `attention_part` over different keys into the result over all these keys."""
    (a, a_lse), (b, b_lse) = first, second
    share = torch.sigmoid(a_lse - b_lse)[..., None].to(b.dtype)
    return torch.lerp(b, a, share), torch.logaddexp(a_lse, b_lse)


@dataclass(frozen=True)
class _Group:
    """Positions of a group in the row: of its prompt, of all its responses together, and of each response."""

    prompt: slice
    responses: slice
    each: tuple[slice, ...]


def _groups(plan: RowPlan) -> Sequence[_Group]:
    groups: list[_Group] = []
    for indices in groups_of(plan.spans):
        prompt, *responses = (slice(plan.spans[i].start, plan.spans[i].end) for i in indices)
        each = tuple(own for own in responses if own.stop > own.start)
        groups.append(_Group(prompt, slice(prompt.stop, [prompt, *responses][-1].stop), each))
    return groups


def can_split(plan: RowPlan, window: int | None, query: Tensor) -> bool:
    """Return whether `split_row_attention` can run a layer.

    It can on the CPU, if no sequence is longer than the window and image tokens do not see each other in both
    directions.
    """
    if not HAS_KERNEL or query.device.type != "cpu" or plan.has_blocks(window):
        return False
    return window is None or window >= max(int(plan.tokens.index.max()) + 1, 1)


def split_row_attention(query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None) -> Tensor:
    """Return the attention of a packed row for which `can_split` holds. Can be differentiated once.

    Args:
        query: [1, H, N, D].
        key, value: [1, heads, N, D], with H or fewer heads.
    Returns: [1, H, N, D], the transpose of a contiguous [1, N, H, D].
    """
    if "split" not in plan.prepared:
        plan.prepared["split"] = _groups(plan)
    scale = 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    return _SplitAttention.apply(query, key, value, plan.prepared["split"], scale)


class _SplitAttention(torch.autograd.Function):
    """Attention of a packed row by `attention_part`, with a backward pass by torch's kernel.

    Letters: K key heads, R = H / K query heads per key head, N tokens of the row. Inside the function, the query has
    the shape [K, R, N, D].
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[_Group], scale: float) -> Tensor:
        q, k, v = _by_key_head(query, key), key[0], value[0]
        # [K, R, N, D], in the memory order of [N, K, R, D]: `prefix_attention` transposes it without a copy.
        out = torch.empty_like(q.permute(2, 0, 1, 3), memory_format=torch.contiguous_format).permute(1, 2, 0, 3)
        lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
        for group in groups:
            for own in (group.prompt, *group.each):
                keys, values = _expand(k[:, own], q), _expand(v[:, own], q)
                out[:, :, own], lse[:, :, own] = attention_part(q[:, :, own], keys, values, scale, causal=True)
            if group.each:
                R, own, prompt = q.shape[1], group.responses, group.prompt
                over_prompt = attention_part(_flat(q[:, :, own]), k[None, :, prompt], v[None, :, prompt], scale)
                out[:, :, own], lse[:, :, own] = join_parts(
                    (_unflat(over_prompt[0], R), _unflat(over_prompt[1], R)), (out[:, :, own], lse[:, :, own])
                )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.groups, ctx.scale = groups, scale
        return out.flatten(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        q, k, v = _by_key_head(query, key), key[0], value[0]
        grad = _by_key_head(grad, key)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        kernel, scale = _aten._scaled_dot_product_flash_attention_for_cpu_backward, ctx.scale
        for group in ctx.groups:
            for own in (group.prompt, *group.each):
                saved = (t[:, :, own] for t in (out, lse))
                inputs = q[:, :, own], _expand(k[:, own], q), _expand(v[:, own], q)
                grads = kernel(grad[:, :, own], *inputs, *saved, 0.0, True, scale=scale)
                dq[:, :, own], dk[:, own], dv[:, own] = grads[0], grads[1].sum(1), grads[2].sum(1)
            if group.each:
                R, own, prompt = q.shape[1], group.responses, group.prompt
                saved = (_flat(t[:, :, own]) for t in (out, lse))
                inputs = _flat(q[:, :, own]), k[None, :, prompt], v[None, :, prompt]
                grads = kernel(_flat(grad[:, :, own]), *inputs, *saved, 0.0, False, scale=scale)
                dq[:, :, own] += _unflat(grads[0], R)
                dk[:, prompt] += grads[1][0]
                dv[:, prompt] += grads[2][0]
        return dq.flatten(0, 1)[None], dk[None], dv[None], None, None


def _by_key_head(x: Tensor, key: Tensor) -> Tensor:
    """Split the query heads by key head: [1, H, N, D] -> [K, R, N, D]."""
    return x[0].unflatten(0, (key.shape[1], -1))


def _expand(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values for the query heads of each key head, without a copy: [K, T, D] -> [K, R, T, D]."""
    return x[:, None].expand(-1, q.shape[1], -1, -1)


def _flat(x: Tensor) -> Tensor:
    """Flatten the query heads of a key head: [K, R, Q, ...] -> [1, K, R * Q, ...].

    This is possible because without a mask all queries are treated alike.
    """
    return x.flatten(1, 2)[None]


def _unflat(x: Tensor, repeat: int) -> Tensor:
    """Undo `_flat`: [1, K, R * Q, ...] -> [K, R, Q, ...]."""
    return x[0].unflatten(1, (repeat, -1))
