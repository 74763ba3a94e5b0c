"""Forward passes without gradient over a step's packed rows: log-probs, values, the reference's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vlmrl.model.packing import TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.train.reference import ReferencePolicy
from vlmrl.train.step_batch import FILLER, StepBatch


@torch.no_grad()
def fill_logps(
    policy: Policy | ReferencePolicy, batch: StepBatch, into: dict[int, Tensor], tokens_per_row: int
) -> None:
    """Compute the log-probs of every trajectory under the current `policy`, in the packed rows that `update` has.

    Args:
        into: receives trajectory -> its log-probs in nats, [trained tokens].
    """
    fill_stats(policy, batch, {"logp": into}, tokens_per_row)


@torch.no_grad()
def fill_stats(
    policy: Policy | ReferencePolicy, batch: StepBatch, into: Mapping[str, dict[int, Tensor]], tokens_per_row: int
) -> None:
    """Compute several token statistics of every trajectory in one pass, like `fill_logps`.

    Args:
        into: field of TokenStats -> trajectory -> receives its values, [trained tokens].
    """
    for items, passes in batch.rows(tokens_per_row, policy.sharing):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device, passes, batch.filler)
            stats = policy(row, batch.reference_of(items, policy) if "kl" in into else None)
        for name, values_by_trajectory in into.items():
            values_by_trajectory |= _by_trajectory(items, batch, getattr(stats, name))


@torch.no_grad()
def fill_reference(reference: Policy | ReferencePolicy, batch: StepBatch, tokens_per_row: int) -> None:
    """Store in the batch what its full KL needs: the reference's hidden states and its head."""
    batch.ref_head = reference.head
    for items, passes in batch.rows(tokens_per_row, reference.sharing):
        with batch.naming(items, reference.device):
            row = make_row(items, reference.device, passes, batch.filler)
            # [K, D] -> [trained tokens, D] per trajectory, in main memory.
            batch.ref_hidden |= _by_trajectory(items, batch, reference.states(row).cpu())


def _by_trajectory(items: Sequence[TrainItem], batch: StepBatch, values_K: Tensor) -> dict[int, Tensor]:
    # [K] (or [K, D]) -> one tensor per trajectory; a filler's values are dropped.
    pieces = values_K.split([batch.num_trained(i) for i in items])
    return {i.trajectory: x for i, x in zip(items, pieces, strict=True) if i.trajectory != FILLER}
