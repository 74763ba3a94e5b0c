"""The policy that a KL term refers to, made of the trained one's own weights where these are under an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from vlmrl.dist.fsdp import own_part, regather
from vlmrl.model.lora import adapter_off, adapter_parameters, by_parameter, has_adapted_head
from vlmrl.model.policy import Policy
from vlmrl.packed import PackedRow, RowReference, TokenStats


class ReferencePolicy:
    """The reference of a policy with an adapter: never a second copy of the model.

    Args:
        policy: the trained one; its model has an adapter, and may be sharded.
        first: adapter tensors that the run began with; None when it began with the base (the adapter is switched off).
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
    def hidden_size(self) -> int:
        return self.policy.hidden_size

    @torch.no_grad()
    def __call__(self, row: PackedRow, reference: RowReference | None = None) -> TokenStats:
        """As `Policy.forward`, under the reference and without gradient."""
        with self._first_weights():
            return self.policy(row, reference)

    @torch.no_grad()
    def states(self, row: PackedRow) -> Tensor:
        """As `Policy.states`, under the reference and without gradient."""
        with self._first_weights():
            return self.policy.states(row)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """As `Policy.head`. An adapter on the head itself is the reference's too; a head that has none is not worth
        going through all layers for each chunk.
        """
        if not has_adapted_head(self.policy.model):
            return self.policy.head(hidden)
        with self._first_weights():
            return self.policy.head(hidden)

    def _first_weights(self) -> AbstractContextManager[None]:
        return adapter_off(self.policy.model) if self.first is None else _swapped(self.policy, self.first)


@contextmanager
def _swapped(policy: Policy, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the adapter has these weights."""
    own = adapter_parameters(policy.model)
    # `.data`: a graph that holds these weights (the full KL asks for the head within one) must not see them change.
    parts = {name: own_part(own[name].detach()).data for name in tensors}
    kept = {name: part.clone() for name, part in parts.items()}

    def put(given: Mapping[str, Tensor]) -> None:
        for name, part in parts.items():
            part.copy_(given[name])
        regather(policy)

    try:
        put({name: own_part(value, own[name]) for name, value in tensors.items()})
        yield
    finally:
        put(kept)
