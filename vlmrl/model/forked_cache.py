"""Differentiable cache: a prompt runs once, and all its responses continue from the cached keys, values and states.

It is for models whose layers have a state that a mask cannot separate by response (Gated DeltaNet: a convolution tail
and a recurrent matrix). The prompt's keys, values and states are recorded, not overwritten in place as in generation.
They are expanded to one copy per response, so that the gradients of all responses flow back into the one prompt.

Gradient checkpointing runs a layer a second time and may read both caches again: a `RecordedPrompt` keeps the tensors
of the first run, and a `ContinuedCache` never changes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.cache_utils import Cache

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
