"""Keys and values for sampling many responses of a prompt: the prompt's are stored once, each response keeps its own.

One decoding step attends to the two parts apart and joins them by their log-sum-exp, which is exact: softmax over both
parts is the mean of the two outputs weighted by each part's share of the exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from vlmrl.model.split_attention import attention_part, join_parts

GROWTH_TOKENS = 64
"""Room for response tokens is made in steps of this many: appending in place instead of copying at every token."""


class ResponseLayer(DynamicLayer):
    """Keys and values of the responses in one layer, [B, H, room, D], of which the first `length` tokens count.

    Args: longest: most tokens of a response; more room is never made.
    """

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.length, self.longest = 0, longest

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append one step. Returns: keys and values so far, views of [B, H, length, D]."""
        end = self.length + key_states.shape[-2]
        self.keys = self._store(self.keys, key_states, end)
        self.values = self._store(self.values, value_states, end)
        self.is_initialized, self.length = True, end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def _store(self, kept: Tensor | None, new: Tensor, end: int) -> Tensor:
        if kept is None or end > kept.shape[-2]:
            room = max(end, min(self.longest, -(-end // GROWTH_TOKENS) * GROWTH_TOKENS))
            grown = new.new_empty(*new.shape[:2], room, new.shape[-1])
            if kept is not None:
                grown[:, :, : self.length] = kept[:, :, : self.length]
            kept = grown
        kept[:, :, self.length : end] = new
        return kept

    def get_seq_length(self) -> int:
        return self.length

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]


class DecodeCache(Cache):
    """The cache of one batch: P prompts, B rows (responses), the rows of a prompt next to each other.

    Args:
        prefilled: the cache after the prompts ran once, left padded to T tokens; its tensors are taken over.
        mask_PT: 1 = a prompt token, 0 = padding.
        prompt_of_B: the prompt of each row, not decreasing.
        longest: most tokens of a response.
    """

    def __init__(self, prefilled: DynamicCache, mask_PT: Tensor, prompt_of_B: Tensor, longest: int) -> None:
        self.responses = [ResponseLayer(longest) for _ in prefilled.layers]
        super().__init__(layers=[*self.responses])
        self.prompt_keys: list[Tensor] = [_tensor(layer, "keys") for layer in prefilled.layers]
        self.prompt_values: list[Tensor] = [_tensor(layer, "values") for layer in prefilled.layers]
        self._mask_PT = mask_PT.bool()
        self._arrange(prompt_of_B)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values held."""
        own = [t for layer in self.responses for t in (layer.keys, layer.values) if t is not None]
        return sum(t.nbytes for t in (*self.prompt_keys, *self.prompt_values, *own))

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a prompt without rows is dropped too."""
        for layer in self.responses:
            layer.select(rows)
        left, prompt_of = self._prompt_of_B[rows].unique_consecutive(return_inverse=True)
        if len(left) < len(self._mask_PT):
            for tensors in (self.prompt_keys, self.prompt_values):
                for i, tensor in enumerate(tensors):
                    tensors[i] = tensor[left]
            self._mask_PT = self._mask_PT[left]
        self._arrange(prompt_of)

    def _arrange(self, prompt_of_B: Tensor) -> None:
        """Where each row sits in a grid [P, n], n being the most rows of any prompt; the prompts' padding as a bias."""
        counts = torch.bincount(prompt_of_B, minlength=len(self._mask_PT))
        self._prompt_of_B, self._width = prompt_of_B, int(counts.max())
        rank = torch.arange(len(prompt_of_B), device=prompt_of_B.device) - (counts.cumsum(0) - counts)[prompt_of_B]
        self._full = len(prompt_of_B) == self._width * len(counts)
        self._slot_B = prompt_of_B * self._width + rank
        self._bias = None
        if not bool(self._mask_PT.all()):
            zero = torch.zeros(self._mask_PT.shape, device=self._mask_PT.device)
            self._bias = zero.masked_fill(~self._mask_PT, float("-inf"))[:, None, None]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """One step of attention over prompt and own response. `scale`: of the scores; None = 1 / sqrt(D).

        Letters: H query heads, K key heads, R = H / K, D head width, T prompt tokens, L response tokens so far.
        Args: query [B, H, 1, D]; key, value [B, K, L, D]: the response's own.
        Returns: [B, 1, H, D].
        """
        B, H, _, D = query.shape
        K = key.shape[1]
        scale = 1.0 / math.sqrt(D) if scale is None else scale
        q_BKRD = query[:, :, 0].reshape(B, K, H // K, D)
        own = attention_part(q_BKRD, key, value, scale)
        grid = self._to_grid(q_BKRD).permute(0, 2, 1, 3, 4).reshape(-1, K, self._width * (H // K), D)
        seen, lse = attention_part(grid, self.prompt_keys[layer], self.prompt_values[layer], scale, bias=self._bias)
        prompt = self._to_rows(seen, H // K), self._to_rows(lse[..., None], H // K)[..., 0]
        return join_parts(prompt, own)[0].reshape(B, 1, H, D)

    def _to_grid(self, x: Tensor) -> Tensor:
        """[B, ...] -> [P, n, ...]; places without a row are zero."""
        size = (len(self._mask_PT), self._width)
        if self._full:
            return x.reshape(*size, *x.shape[1:])
        filled = x.new_zeros(size[0] * size[1], *x.shape[1:]).index_copy(0, self._slot_B, x)
        return filled.reshape(*size, *x.shape[1:])

    def _to_rows(self, x: Tensor, repeat: int) -> Tensor:
        """[P, K, n * R, ...] -> [B, K, R, ...]."""
        P, K = x.shape[:2]
        rows = x.reshape(P, K, self._width, repeat, -1).transpose(1, 2).reshape(P * self._width, K, repeat, -1)
        return rows if self._full else rows[self._slot_B]


def rows_of(copies: Sequence[int], device: torch.device) -> Tensor:
    """The prompt of each row when prompt i has copies[i] rows. Example: [2, 1] -> [0, 0, 1]."""
    counts = torch.tensor(copies, device=device)
    return torch.arange(len(copies), device=device).repeat_interleave(counts)


def _tensor(layer: Any, name: str) -> Tensor:
    found = getattr(layer, name)
    assert isinstance(found, Tensor), "the prompts have not run yet"
    return found
