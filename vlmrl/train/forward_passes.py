"""Forward passes without gradient over a step's packed rows: log-probs, values, the reference's hidden states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vlmrl.data.packing import TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.train.reference import ReferencePolicy
from vlmrl.train.step_batch import FILLER, StepBatch


@torch.no_grad()
def fill_logps(
    policy: Policy | ReferencePolicy, batch: StepBatch, into: dict[int, Tensor], tokens_per_row: int
) -> None:
    """Log-probs of every trajectory under `policy` as it is now, with the batching that `update` uses."""
    fill_stats(policy, batch, {"logp": into}, tokens_per_row)


@torch.no_grad()
def fill_stats(
    policy: Policy | ReferencePolicy, batch: StepBatch, into: Mapping[str, dict[int, Tensor]], tokens_per_row: int
) -> None:
    """As `fill_logps`, several things from one pass. Args: into: field of TokenStats -> trajectory -> its tokens'."""
    for items in batch.rows(tokens_per_row):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device)
            stats = policy(row, batch.reference_of(items, policy) if "kl" in into else None)
        for name, found in into.items():
            found |= _by_trajectory(items, batch, getattr(stats, name))


@torch.no_grad()
def fill_reference(reference: Policy | ReferencePolicy, batch: StepBatch, tokens_per_row: int) -> None:
    """Keep of the reference what the full KL of the batch needs."""
    batch.ref_head = reference.head
    for items in batch.rows(tokens_per_row):
        with batch.naming(items, reference.device):
            row = make_row(items, reference.device)
            batch.ref_hidden |= _by_trajectory(items, batch, reference.states(row).cpu())


def _by_trajectory(items: Sequence[TrainItem], batch: StepBatch, values_K: Tensor) -> dict[int, Tensor]:
    pieces = values_K.split([batch.num_trained(i) for i in items])
    return {i.trajectory: x for i, x in zip(items, pieces, strict=True) if i.trajectory != FILLER}
