"""Key-value caches for one prompt and many responses, and the forward passes of a packed row.

Attention over prompt and response is computed separately, and the two outputs are joined with the help of their
log-sum-exps. This is exact: softmax attention over both parts is the mean of the two outputs, weighted by each part's
share of the summed exponentials. If flash attention's backward pass over one part gets the output and the log-sum-exp
of both, it returns the exact gradient of that part. So no key is copied. Decoding uses this on any device; packed rows
on the CPU only, with the kernels of torch's CPU flash attention.

Models whose layers have a state that a mask cannot separate (Gated DeltaNet: a convolution tail and a recurrent matrix)
use a differentiable cache: the prompt runs once, its keys, values and states are recorded, and one copy per response
continues from them. Gradient checkpointing may read both caches again, so neither changes.

A row may need several passes, and a sharded policy gathers each layer in each pass. So all ranks make the same number
of passes; a rank makes a filler pass, without loss, where it needs none of its own.
"""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, zip_longest
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from vlmrl.model.packing import RowPlan, Span, groups_of

_aten = torch.ops.aten
HAS_FLASH_BACKWARD = hasattr(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
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
    if HAS_FLASH_BACKWARD and q.device.type == "cpu":
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
class Group:
    """Positions of a group in the row: of its prompt, of all its responses together, and of each response."""

    prompt: slice
    responses: slice
    each: tuple[slice, ...]


def row_groups(plan: RowPlan) -> Sequence[Group]:
    """Return the groups of a row, computed once."""
    if "split" not in plan.prepared:
        groups: list[Group] = []
        for indices in groups_of(plan.spans):
            prompt, *responses = (slice(plan.spans[i].start, plan.spans[i].end) for i in indices)
            each = tuple(own for own in responses if own.stop > own.start)
            groups.append(Group(prompt, slice(prompt.stop, [prompt, *responses][-1].stop), each))
        plan.prepared["split"] = groups
    prepared: Any = plan.prepared["split"]
    return prepared


def windows_as_groups(starts: Tensor) -> list[Group]:
    """Return the windows of a vision tower as prompts without responses. `starts`: [windows + 1], N at the end."""
    return [Group(slice(a, b), slice(b, b), ()) for a, b in pairwise(starts.tolist()) if b > a]


def can_split(plan: RowPlan, window: int | None, query: Tensor) -> bool:
    """Return whether `split_row_attention` can run a layer.

    It can on the CPU, if no sequence is longer than the window and image tokens do not see each other in both
    directions.
    """
    if not HAS_FLASH_BACKWARD or query.device.type != "cpu" or plan.has_blocks(window):
        return False
    return window is None or window >= max(int(plan.tokens.index.max()) + 1, 1)


def split_row_attention(query: Tensor, key: Tensor, value: Tensor, plan: RowPlan, scaling: float | None) -> Tensor:
    """Return the attention of a packed row for which `can_split` holds. Can be differentiated once.

    Args:
        query: [1, H, N, D].
        key, value: [1, heads, N, D], with H or fewer heads.
    Returns: [1, H, N, D], the transpose of a contiguous [1, N, H, D].
    """
    return _SplitAttention.apply(query, key, value, row_groups(plan), scale_of(query, scaling))


def scale_of(query: Tensor, scaling: float | None) -> float:
    """Return the factor of the scores: `scaling`, or 1 / sqrt(D) if it is None. `query`: [.., D]."""
    return 1.0 / math.sqrt(query.shape[-1]) if scaling is None else scaling


class _SplitAttention(torch.autograd.Function):
    """Attention of a packed row by `attention_part`, with a backward pass by torch's kernel."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], scale: float) -> Tensor:
        out, lse = split_forward(query, key, value, groups, True, scale)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.groups, ctx.scale = groups, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        return (*split_backward(grad, query, key, value, out, lse, ctx.groups, True, ctx.scale), None, None)


def split_forward(
    query: Tensor, key: Tensor, value: Tensor, groups: Sequence[Group], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the attention of a packed row, [1, H, N, D], and the log-sum-exps of its scores, [K, R, N].

    Letters: K key heads, R = H / K query heads per key head, N tokens of the row. Inside the function, the query has
    the shape [K, R, N, D].

    Args:
        query: [1, H, N, D].
        key, value: [1, K, N, D].
        groups: of the row; see `row_groups`.
        causal: whether a token sees only itself and the tokens before it; False for windows.
    """
    q, k, v = _by_key_head(query, key), key[0], value[0]
    # [K, R, N, D], in the memory order of [N, K, R, D]: `prefix_attention` transposes it without a copy.
    out = torch.empty_like(q.permute(2, 0, 1, 3), memory_format=torch.contiguous_format).permute(1, 2, 0, 3)
    lse = torch.empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    for group in groups:
        for own in (group.prompt, *group.each):
            keys, values = _expand(k[:, own], q), _expand(v[:, own], q)
            out[:, :, own], lse[:, :, own] = attention_part(q[:, :, own], keys, values, scale, causal=causal)
        if group.each:
            R, own, prompt = q.shape[1], group.responses, group.prompt
            over_prompt = attention_part(_flat(q[:, :, own]), k[None, :, prompt], v[None, :, prompt], scale)
            out[:, :, own], lse[:, :, own] = join_parts(
                (_unflat(over_prompt[0], R), _unflat(over_prompt[1], R)), (out[:, :, own], lse[:, :, own])
            )
    return out.flatten(0, 1)[None], lse


def split_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    groups: Sequence[Group],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value of `split_forward`, which returned `out` and `lse`."""
    q, k, v = _by_key_head(query, key), key[0], value[0]
    grad, out = _by_key_head(grad, key), _by_key_head(out, key)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    kernel = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    for group in groups:
        for own in (group.prompt, *group.each):
            saved = (t[:, :, own] for t in (out, lse))
            inputs = q[:, :, own], _expand(k[:, own], q), _expand(v[:, own], q)
            grads = kernel(grad[:, :, own], *inputs, *saved, 0.0, causal, scale=scale)
            dq[:, :, own], dk[:, own], dv[:, own] = grads[0], grads[1].sum(1), grads[2].sum(1)
        if group.each:
            R, own, prompt = q.shape[1], group.responses, group.prompt
            saved = (_flat(t[:, :, own]) for t in (out, lse))
            inputs = _flat(q[:, :, own]), k[None, :, prompt], v[None, :, prompt]
            grads = kernel(_flat(grad[:, :, own]), *inputs, *saved, 0.0, False, scale=scale)
            dq[:, :, own] += _unflat(grads[0], R)
            dk[:, prompt] += grads[1][0]
            dv[:, prompt] += grads[2][0]
    return dq.flatten(0, 1)[None], dk[None], dv[None]


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


GROWTH_TOKENS = 64
"""Number of tokens by which the buffer of response tokens grows. Between two growths, tokens are appended in place
without a copy."""


class SplitLayer(DynamicLayer):
    """One attention layer: keys and values of P prompts, and of B responses that all have the same length.

    Attributes:
        prompt_keys, prompt_values: [P, H, T, D]; with a sliding window, only the prompts' last tokens.
        keys, values: [B, H, room, D]; the first `end` tokens are in use, the rest is free.
        length: tokens of each response so far, including those that have left the window.

    Args:
        prefilled: cache layer after the forward pass of the prompts, which are padded on the left; its tensors become
            part of this layer.
        longest: maximum number of tokens of a response; the buffers do not grow beyond it.
    """

    def __init__(self, prefilled: Any, longest: int) -> None:
        super().__init__()
        assert isinstance(prefilled.keys, Tensor), "the prompts have not run yet"
        self.window: int | None = prefilled.sliding_window if prefilled.is_sliding else None
        # A layer with a window holds a view of the whole prompt's keys. The view is cloned, so that the rest is freed.
        parts = (prefilled.keys, prefilled.values)
        self.prompt_keys, self.prompt_values = parts if self.window is None else (part.clone() for part in parts)
        self.longest = longest
        self.length = self.end = 0

    @property
    def prompt_seen(self) -> int:
        """Number of the last prompt tokens that the newest response token sees."""
        stored = self.prompt_keys.shape[-2]
        return stored if self.window is None else min(stored, max(0, self.window - self.length))

    def tensors(self) -> list[Tensor]:
        own = [t for t in (self.keys, self.values) if t is not None]
        return [self.prompt_keys, self.prompt_values, *own]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one token to each response.

        Args:
            key_states, value_states: [B, H, 1, D].
        Returns: (keys, values) of the response tokens that the new token sees: views, [B, H, L, D].
        """
        if self.keys is None or self.values is None or self.end == self.keys.shape[-2]:
            # [B, H, room, D] -> larger room. With a window, the new buffer begins with the oldest token that the next
            # token still sees.
            kept = self.end if self.window is None else min(self.end, self.window - 1)
            room = kept + min(GROWTH_TOKENS, self.longest - self.length)
            self.keys, self.values = (
                _moved(old, new, self.end - kept, kept, room)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            )
            self.is_initialized, self.end = True, kept
        self.keys[:, :, self.end : self.end + 1] = key_states
        self.values[:, :, self.end : self.end + 1] = value_states
        self.end, self.length = self.end + 1, self.length + 1
        visible = slice(0 if self.window is None else max(0, self.end - self.window), self.end)
        return self.keys[:, :, visible], self.values[:, :, visible]

    def get_seq_length(self) -> int:
        return self.length

    def select(self, rows: Tensor, prompts: Tensor) -> None:
        """Keep the given rows and prompts, in the given order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]
        if len(prompts) < len(self.prompt_keys):
            self.prompt_keys, self.prompt_values = self.prompt_keys[prompts], self.prompt_values[prompts]


class DecodeCache(Cache):
    """Cache of one batch: P prompts, B rows (responses), the rows of a prompt next to each other.

    Args:
        prefilled: cache after one forward pass of the prompts, padded on the left to T tokens; its tensors become part
            of this cache.
        mask_PT: 1 = a prompt token, 0 = padding.
        prompt_of_B: index of each row's prompt; the indices must not decrease.
        longest: maximum number of tokens of a response.
        keys_of: for each layer, the layer whose keys and values it attends to (see `key_layers`).
    """

    def __init__(
        self, prefilled: DynamicCache, mask_PT: Tensor, prompt_of_B: Tensor, longest: int, keys_of: Sequence[int]
    ) -> None:
        own = {i: SplitLayer(prefilled.layers[i], longest) for i in set(keys_of) if not _is_linear(prefilled.layers[i])}
        super().__init__(layers=[own.get(i, layer) for i, layer in enumerate(prefilled.layers)])
        self.attention = list(own.values())
        self.linear: list[Any] = [layer for layer in self.layers if isinstance(layer, LinearAttentionLayer)]
        for layer in self.linear:
            layer.reorder_cache(prompt_of_B)
        self._keys_of = keys_of
        self._mask_PT = mask_PT.bool()
        self._arrange(prompt_of_B)

    @property
    def nbytes(self) -> int:
        """Memory of all keys, values and states in bytes, counted as whole torch storages."""
        tensors = [t for layer in self.attention for t in layer.tensors()]
        for layer in self.linear:
            tensors += [t for t in (*layer.conv_states.values(), *layer.recurrent_states.values()) if t is not None]
        return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())

    def select(self, rows: Tensor) -> None:
        """Keep the given rows, in the given order; a prompt without rows is dropped too."""
        kept_prompts, prompt_of = self._prompt_of_B[rows].unique_consecutive(return_inverse=True)
        for layer in self.attention:
            layer.select(rows, kept_prompts)
        for layer in self.linear:
            layer.reorder_cache(rows)
        self._mask_PT = self._mask_PT[kept_prompts]
        self._arrange(prompt_of)

    def _arrange(self, prompt_of_B: Tensor) -> None:
        """Compute the slot of each row in a grid [P, n], and the bias that hides the prompts' padding.

        n is the largest number of rows of a prompt.
        """
        counts = torch.bincount(prompt_of_B, minlength=len(self._mask_PT))
        self._prompt_of_B, self._width = prompt_of_B, int(counts.max())
        # [B]: index of the row among the rows of its prompt
        rank = torch.arange(len(prompt_of_B), device=prompt_of_B.device) - (counts.cumsum(0) - counts)[prompt_of_B]
        self._full = len(prompt_of_B) == self._width * len(counts)
        self._slot_B = prompt_of_B * self._width + rank
        self._bias = None
        if not bool(self._mask_PT.all()):
            zero = torch.zeros(self._mask_PT.shape, device=self._mask_PT.device)
            self._bias = zero.masked_fill(~self._mask_PT, float("-inf"))[:, None, None]  # [P, T] -> [P, 1, 1, T]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Return the attention of one decoding step over the prompt and the response's own tokens.

        Letters: H query heads, K key heads, R = H / K, D head width; S and L: prompt and response tokens that the new
        token sees.

        Args:
            query: [B, H, 1, D].
            key, value: [B, K, L, D]: those of the response, as `update` returned them.
            scale: factor of the scores; None = 1 / sqrt(D).
        Returns: [B, 1, H, D].
        """
        B, H, _, D = query.shape
        K = key.shape[1]
        scale = scale_of(query, scale)
        q_BKRD = query[:, :, 0].reshape(B, K, H // K, D)
        own = attention_part(q_BKRD, key, value, scale)
        store = self.layers[self._keys_of[layer]]
        assert isinstance(store, SplitLayer)
        S = store.prompt_seen
        if S == 0:  # the window no longer reaches back to the prompt
            return own[0].reshape(B, 1, H, D)
        # [B, K, R, D] -> [P, n, K, R, D] -> [P, K, n * R, D]: all rows of a prompt are queries of one call.
        grid = self._to_grid(q_BKRD).permute(0, 2, 1, 3, 4).reshape(-1, K, self._width * (H // K), D)
        keys, values = store.prompt_keys[:, :, -S:], store.prompt_values[:, :, -S:]
        bias = None if self._bias is None else self._bias[..., -S:]
        over_prompt, lse = attention_part(grid, keys, values, scale, bias=bias)
        prompt = self._to_rows(over_prompt, H // K), self._to_rows(lse[..., None], H // K)[..., 0]
        return join_parts(prompt, own)[0].reshape(B, 1, H, D)

    def _to_grid(self, x: Tensor) -> Tensor:
        """Arrange rows by prompt: [B, ...] -> [P, n, ...]; slots without a row are zero."""
        size = (len(self._mask_PT), self._width)
        if self._full:
            return x.reshape(*size, *x.shape[1:])
        filled = x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy(0, self._slot_B, x)
        return filled.reshape(*size, *x.shape[1:])

    def _to_rows(self, x: Tensor, repeat: int) -> Tensor:
        """Undo `_to_grid`: [P, K, n * R, ...] -> [B, K, R, ...]."""
        P, K = x.shape[:2]
        rows = x.reshape(P, K, self._width, repeat, -1).transpose(1, 2).reshape(P * self._width, K, repeat, -1)
        return rows if self._full else rows[self._slot_B]


def key_layers(text: Any) -> list[int]:
    """Return, for each layer of a text model, the layer whose keys and values it attends to.

    Usually that is the layer itself. If the last layers have no keys of their own (Gemma 4's `num_kv_shared_layers`),
    they use those of the last earlier layer of the same kind.
    """
    own = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    last = {kind: i for i, kind in enumerate(kinds[:own])}
    return [i if i < own else last[kind] for i, kind in enumerate(kinds)]


def rows_of(copies: Sequence[int], device: torch.device) -> Tensor:
    """Return the index of each row's prompt [B], if prompt i has copies[i] rows. Example: [2, 1] -> [0, 0, 1]."""
    counts = torch.tensor(copies, device=device)
    return torch.arange(len(copies), device=device).repeat_interleave(counts)


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionLayer)


def _moved(old: Tensor | None, new: Tensor, start: int, kept: int, room: int) -> Tensor:
    """Return a buffer like `new` with `room` tokens.

    Its first `kept` tokens are copied from `old`, from token `start` on. [B, H, 1, D] -> [B, H, room, D].
    """
    grown = new.new_empty(*new.shape[:2], room, new.shape[-1])
    if old is not None:
        grown[:, :, :kept] = old[:, :, start : start + kept]
    return grown


MIN_TOKENS = 2
"""Minimum number of tokens of a forward with a cache. With a single token, models use their in-place decoding step."""

_running: ContextVar[RecordedPrompt | ContinuedCache | None] = ContextVar("vlmrl_fork_cache", default=None)


CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument that takes the cache: since transformers 5.24, and before."""


def cache_name(model: nn.Module) -> str:
    """Return the name under which the model's forward takes its cache."""
    taken = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in taken), CACHE_NAMES[-1])


class RecordedPrompt(Cache):
    """Keys, values and states of a prompt in each layer. Pass it to one forward of the prompt, with batch size 1."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self.tails: list[Tensor | None] = [None] * num_layers
        self.states: list[Tensor | None] = [None] * num_layers
        self.num_tokens = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        if self.keys[layer_idx] is None:
            self.keys[layer_idx], self.values[layer_idx] = key_states, value_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return None

    def update_conv_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 4, **kwargs: Any
    ) -> Tensor:
        """Record the input of the convolution.

        Args:
            conv_states: [1, channels, P]; its last columns are needed for the tokens that follow the prompt.
        """
        if self.tails[layer_idx] is None:
            self.tails[layer_idx] = conv_states[..., -conv_kernel_size:]
        return conv_states

    def update_recurrent_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        if self.states[layer_idx] is None:
            self.states[layer_idx] = recurrent_states
        return recurrent_states


class ContinuedCache(Cache):
    """Prompt's cache as seen by `copies` responses, one per batch row. It never changes."""

    def __init__(self, prompt: RecordedPrompt, copies: int) -> None:
        super().__init__(layers=[])
        self.prompt, self.copies = prompt, copies
        # transformers 5.16 and 5.17 read a layer's state here; later versions call `get_recurrent_state`.
        self.layers: list[Any] = [SimpleNamespace(recurrent_states=[self._expanded(s)]) for s in prompt.states]

    def _expanded(self, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.expand(self.copies, *tensor.shape[1:])  # [1, ...] -> [copies, ...]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any):
        keys, values = (self._expanded(x[layer_idx]) for x in (self.prompt.keys, self.prompt.values))
        assert keys is not None and values is not None
        return torch.cat([keys, key_states], 2), torch.cat([values, value_states], 2)  # [B, H, P + R, D]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.prompt.num_tokens

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._expanded(self.prompt.tails[layer_idx])

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._expanded(self.prompt.states[layer_idx])

    def update_conv_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int = 4, **kwargs: Any
    ) -> Tensor:
        tail = self._expanded(self.prompt.tails[layer_idx])
        assert tail is not None
        return torch.cat([tail, conv_states], -1)

    def update_recurrent_state(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        return recurrent_states


def run_with_cache(model: nn.Module, cache: RecordedPrompt | ContinuedCache, **inputs: Any) -> Any:
    """Run `model(**inputs)` with this cache; layers that are recomputed get it too (see `checkpoint_layer`)."""
    before = _running.set(cache)
    try:
        return model(**{cache_name(model): cache}, use_cache=True, **inputs)
    finally:
        _running.reset(before)


def checkpoint_layer(layer: Callable[..., Any], *args: Any) -> Any:
    """Run a layer with gradient checkpointing and with its cache: the checkpointing function of forked models.

    transformers removes the cache from a checkpointed layer, because an ordinary cache would be wrong after the second
    write; the caches of this module allow it. Outside `run_with_cache`, and for layers without a cache (the vision
    tower), it is plain checkpointing.
    """
    cache = _running.get()
    if cache is not None and isinstance(layer, partial):
        given = {name: cache for name in CACHE_NAMES if name in layer.keywords}
        layer = partial(layer.func, *layer.args, **{**layer.keywords, **given})
    return checkpoint(layer, *args, use_reentrant=False)


def batches_of_similar_length(lengths: list[int]) -> list[list[int]]:
    """Return batches of response indices, the longest responses first. Padding at most doubles a batch's tokens."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    for i in order:
        if not batches or 2 * lengths[i] < lengths[batches[-1][0]]:
            batches.append([])
        batches[-1].append(i)
    return batches


@dataclass(frozen=True)
class Pass:
    """One forward pass of the transformers model.

    Args:
        spans: indices of the row's spans that run: a prompt, responses that continue a prompt, or (padded) a prompt and
            one response. Empty for a filler pass.
        has_images: whether the vision tower runs too.
    """

    spans: tuple[int, ...]
    has_images: bool


def passes_of(layout: Sequence[Span], has_images: Sequence[bool], sharing: str) -> list[Pass]:
    """Return the passes that a row needs, in the order in which they run.

    Args:
        has_images: whether each span has images.
        sharing: as in `families.Family`.
    """
    passes: list[tuple[int, ...]] = []
    for prompt, *responses in groups_of(layout) if sharing != "packed" else ():
        if sharing == "padded":
            passes += [(prompt, response) for response in responses]
            continue
        lengths = [layout[i].end - layout[i].start for i in responses]
        passes.append((prompt,))
        passes += [tuple(responses[k] for k in batch) for batch in batches_of_similar_length(lengths)]
    passes = [tuple(range(len(layout)))] if sharing == "packed" else passes
    return [Pass(spans, any(has_images[i] for i in spans)) for spans in passes]


def common_passes(of_ranks: Sequence[Sequence[bool]]) -> tuple[bool, ...]:
    """Return the passes that all ranks make: whether each has images.

    The passes with images of all ranks coincide, because images are expensive; filler passes between them have none.

    Args:
        of_ranks: per rank, whether each pass that its row needs has images.
    Example: [text, image, text] and [image, text, text] -> [text, image, text, text].
    """
    common: list[bool] = []
    for counts in zip_longest(*map(_texts_between_images, of_ranks), fillvalue=0):
        common += [True, *[False] * max(counts)]
    return tuple(common[1:])


def _texts_between_images(pictured: Sequence[bool]) -> list[int]:
    """Return the number of passes without images before the first pass with images, and after each of them."""
    counts = [0]
    for has_images in pictured:
        if has_images:
            counts.append(0)
        else:
            counts[-1] += 1
    return counts


def with_fillers(own: Sequence[Pass], common: Sequence[bool]) -> Iterator[Pass]:
    """Yield a row's own passes in their order, and filler passes where all ranks make a pass that it does not need.

    Args:
        common: what `common_passes` returned for rows of which this is one.
    """
    waiting = deque(own)
    for has_images in common:
        if waiting and waiting[0].has_images == has_images:
            yield waiting.popleft()
        else:
            yield Pass((), has_images)
    assert not waiting, "the common passes are those of other rows"
