"""Reference of a KL term for a policy with an adapter: the policy's own model with other adapter weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from vlmrl.dist.fsdp import own_part, regather
from vlmrl.model.lora import adapter_off, adapter_parameters, by_parameter, has_adapted_head
from vlmrl.model.packing import PackedRow, RowReference, TokenStats
from vlmrl.model.policy import Policy


class ReferencePolicy:
    """Reference of a policy with an adapter, without a second copy of the model.

    Args:
        policy: the policy in training; its model has an adapter, and may be sharded.
        first: adapter tensors that the run began with; None when it began with the base model: the adapter is then
            switched off.
    """

    def __init__(self, policy: Policy, first: Mapping[str, Tensor] | None = None) -> None:
        self.policy = policy
        self.first = None if first is None else by_parameter(policy.model, first)

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def dtype(self) -> torch.dtype:
        return self.policy.dtype

    @property
    def sharing(self) -> str:
        return self.policy.sharing

    @property
    def hidden_size(self) -> int:
        return self.policy.hidden_size

    @torch.no_grad()
    def __call__(self, row: PackedRow, reference: RowReference | None = None) -> TokenStats:
        """Return the token statistics as `Policy.forward` does, under the reference and without gradient."""
        with self._first_weights():
            return self.policy(row, reference)

    @torch.no_grad()
    def states(self, row: PackedRow) -> Tensor:
        """Return the hidden states [K, D] as `Policy.states` does, under the reference and without gradient."""
        with self._first_weights():
            return self.policy.states(row)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits [.., V] of hidden states [.., D] as `Policy.head` does, under the reference.

        Only an adapter on the head itself is swapped: swapping goes through all layers, for each chunk of tokens.
        """
        if not has_adapted_head(self.policy.model):
            return self.policy.head(hidden)
        with self._first_weights():
            return self.policy.head(hidden)

    def _first_weights(self) -> AbstractContextManager[None]:
        return adapter_off(self.policy.model) if self.first is None else _swapped(self.policy, self.first)


@contextmanager
def _swapped(policy: Policy, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Give the adapter these weights in a `with` block."""
    parameters = adapter_parameters(policy.model)
    # `.data` hides the change from autograd: the full KL calls the head while a graph holds these weights.
    parts = {name: own_part(parameters[name].detach()).data for name in tensors}
    old_values = {name: part.clone() for name, part in parts.items()}

    def put(values: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            part.copy_(values[name])
        regather(policy)

    try:
        put({name: own_part(value, parameters[name]) for name, value in tensors.items()})
        yield
    finally:
        put(old_values)
