"""Key-value cache for sampling many responses of a prompt: the prompt is stored once, each response has its own part.

One decoding step computes attention over prompt and response separately and joins the two outputs with the help of
their log-sum-exps. This is exact: softmax attention over both parts is the mean of the two outputs, weighted by each
part's share of the summed exponentials. A layer with a sliding window keeps only the end of the prompt and of each
response. The state of a linear attention layer differs between responses from their first token on, so each response
has its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionLayer

from vlmrl.model.attention.split import attention_part, join_parts

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
        scale = 1.0 / math.sqrt(D) if scale is None else scale
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
