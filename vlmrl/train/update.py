"""Optimizer step on a batch of trajectories: one function for reinforcement learning and for supervised learning.

Letters: K trained tokens of a packed row, S trajectories of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from vlmrl.algo.losses import Denominator, aggregate, global_mean
from vlmrl.dist.world import World
from vlmrl.errors import TrainError
from vlmrl.model.packing import TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.train.objectives import Objective, TokenData
from vlmrl.train.optim import Optimizer
from vlmrl.train.step_batch import FILLER, StepBatch
from vlmrl.train.tally import PREFIX, Mismatch, Tally, tally_mismatch

NOT_FINITE = "loss/not_finite"
"""Name in a tally: number of tokens whose loss is not finite."""


def update(
    policy: Policy,
    optimizer: Optimizer,
    batch: StepBatch,
    objective: Objective,
    *,
    lr: float,
    tokens_per_row: int,
    max_tokens: int,
) -> dict[str, float]:
    """Run the packed rows of a batch forward and backward, then make one optimizer step.

    The denominator of the loss is ONE number, fixed before the first backward.

    Args:
        lr: learning rate of this update.
        tokens_per_row: budget of a packed row, in tokens.
        max_tokens: token limit of a response, for the aggregation "constant".
    Returns: metrics: means over the tokens of the update, norms of the gradients, learning rate.
    Raises: TrainError when the loss or the gradient is not finite, OutOfMemoryError when a packed row does not fit. No
        weight has changed then.
    """
    metrics = add_gradients(policy, optimizer, batch, objective, tokens_per_row=tokens_per_row, max_tokens=max_tokens)
    parts = {f"optim/grad_norm/{part}": norm for part, norm in optimizer.part_norms().items()}
    norm = optimizer.clip()
    if not norm < float("inf"):  # infinite or NaN
        optimizer.clear()
        raise TrainError(
            f"the gradient is not finite ({norm}) although the loss is; the weights were not changed",
            hint="lower optim.lr, or use model.dtype = float32; the last checkpoint is not affected",
        )
    optimizer.step(lr)
    return metrics | {"optim/grad_norm": norm, "optim/lr": lr} | parts


def add_gradients(
    policy: Policy,
    optimizer: Optimizer,
    batch: StepBatch,
    objective: Objective,
    *,
    tokens_per_row: int,
    max_tokens: int,
) -> dict[str, float]:
    """Add the gradient of an update to the parameters' gradients, one packed row after another.

    This is `update` without the optimizer step: same arguments, metrics and errors.
    """
    # Trained tokens of each response, on all ranks: the denominator does not depend on the packing or the ranks.
    trained = [n for of_rank in batch.world.gather([batch.num_trained(i) for i in batch.items]) for n in of_rank]
    dead = [n for group in batch.dead_tokens.values() for n in group]
    total = Denominator.of(objective.aggregation, trained, max_tokens, dead)
    selected = objective.select(policy, batch, tokens_per_row)
    tally, losses = Tally(), []
    for items, passes in batch.rows(tokens_per_row, policy.sharing):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device, passes, batch.filler)
            stats = policy(row, batch.reference_of(items, policy))
            data = _token_data(items, batch, selected, policy.device)
            loss_K, token_metrics = objective.loss(stats, data)
            losses.append((loss_K.detach(), data.trajectory))
            if items[-1].trajectory == FILLER:  # times 0.0: it adds nothing, but its backward runs as on other ranks
                loss_K = torch.where(data.trajectory == FILLER, 0.0 * loss_K, loss_K)
                token_metrics = {name: values * (data.trajectory != FILLER) for name, values in token_metrics.items()}
            # [K] -> scalar: this packed row's share of the loss. The gradients of all packed rows add up.
            loss = aggregate(loss_K, data.response_tokens, total)
            loss.backward()
        tally.add("loss/total", loss)
        for name, values in token_metrics.items():
            tally.add(name, global_mean(values, total))
        tally.add(NOT_FINITE, (~torch.isfinite(losses[-1][0])).sum())
        tally_mismatch(tally, stats.logp.detach(), data.sampler_logp)
    numbers = tally.read()
    _stop_unless_finite(_not_finite(losses, batch) if numbers.pop(NOT_FINITE, 0.0) else [], batch.world, optimizer)
    parts = batch.world.gather(numbers)
    return {"loss/total": 0.0} | _summed(parts) | Mismatch.joined([Mismatch.of(part) for part in parts]).metrics()


def _token_data(
    items: Sequence[TrainItem], batch: StepBatch, selected: dict[int, Tensor], device: torch.device
) -> TokenData:
    """Return the objective's inputs for a packed row.

    They are built on the CPU and copied to the device as a whole: the CPU never waits for a number of the device.
    """
    # Item -> its trained tokens. Items without any are skipped, so that `response` is dense.
    counts = {k: n for k, i in enumerate(items) if (n := batch.num_trained(i))}
    responses = [(items[k].trajectory, response, n) for response, (k, n) in enumerate(counts.items())]
    # (trajectory, response, length of the response) per response -> [3, K] per token
    indices_3K = [[values[column] for values in responses for _ in range(values[2])] for column in range(3)]
    trajectory, response, response_tokens = torch.tensor(indices_3K, dtype=torch.long).reshape(3, -1).to(device)
    advantage = torch.cat([batch.advantage_of(i.trajectory, batch.num_trained(i)) for i in items])
    sampler_logp = torch.cat([batch.sampler_logp_of(i) for i in items])
    advantage, sampler_logp = torch.stack([advantage, sampler_logp]).to(device)

    def join(by: Mapping[int, Tensor]) -> Tensor | None:
        """Join trajectory -> [trained tokens] to the packed row's [K], 0 for a filler. Return None if `by` is empty."""
        if not by:
            return None
        like = next(iter(by.values()))[:1]
        parts = [by[i.trajectory] if i.trajectory != FILLER else like.new_zeros(batch.num_trained(i)) for i in items]
        return torch.cat(parts).to(device)

    chosen = join(selected)

    return TokenData(
        advantage=advantage,
        sampler_logp=sampler_logp,
        old_logp=join(batch.old_logp),
        ref_logp=join(batch.ref_logp),
        trajectory=trajectory,
        response=response,
        response_tokens=response_tokens,
        selected=None if chosen is None else chosen.bool(),
        old_value=join(batch.old_value),
        value_target=join(batch.value_target),
    )


def _not_finite(losses: Sequence[tuple[Tensor, Tensor]], batch: StepBatch) -> list[str]:
    """Return the names of the responses with a loss that is not finite.

    Args:
        losses: (loss_K, trajectory_K) of each packed row.
    """
    trajectories = {i for loss_K, trajectory_K in losses for i in trajectory_K[~torch.isfinite(loss_K)].tolist()}
    return [batch.names_S[i] for i in sorted(trajectories) if i != FILLER]


def _stop_unless_finite(bad: list[str], world: World, optimizer: Optimizer) -> None:
    """Raise a TrainError on all ranks if one has responses with a loss that is not finite (`bad`: their names)."""
    bad_of_all = [name for of_rank in world.gather(bad) for name in of_rank]
    if bad_of_all:
        optimizer.clear()
        names = ", ".join(bad_of_all[:5])
        raise TrainError(
            f"the loss is not finite for {len(bad_of_all)} response(s): {names}; the weights were not changed",
            hint="look at these rows with `vlmrl report`; a lower optim.lr or model.dtype = float32 often helps",
        )


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of the whole update: the sums over the ranks. A rank with only fillers has all names, too."""
    names = [n for n in dict.fromkeys(n for p in parts for n in p) if not n.startswith(PREFIX)]
    return {n: sum(p.get(n, 0.0) for p in parts) for n in names}
