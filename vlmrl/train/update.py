"""One optimizer step from a batch of trajectories: the same function for reinforcement and for supervised learning.

Letters: K trained tokens of a row, S trajectories of the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vlmrl.algo.aggregate import Denominator, aggregate, global_mean
from vlmrl.algo.family import Algorithm
from vlmrl.algo.kl import ESTIMATORS as KL_ESTIMATORS
from vlmrl.algo.losses import (
    Tokens,
    applied_weight,
    clipped_value_loss,
    cross_entropy,
    importance_weight,
    policy_loss,
    select_tokens,
)
from vlmrl.data.packing import TrainItem, make_row
from vlmrl.dist.world import World
from vlmrl.errors import TrainError
from vlmrl.model.policy import Policy
from vlmrl.packed import TokenStats
from vlmrl.train.device_sums import Tally, on_cpu
from vlmrl.train.optim import Optimizer
from vlmrl.train.reference import ReferencePolicy
from vlmrl.train.sampler_mismatch import PREFIX, Mismatch, tally_mismatch
from vlmrl.train.step import FILLER, StepBatch

NOT_FINITE = "loss/not_finite"
"""Tokens whose loss is no finite number, in a tally."""


@dataclass(frozen=True)
class TokenData:
    """What an objective knows of a row's trained tokens besides the policy's own log-probs. All [K].

    Args:
        advantage: float32.      sampler_logp: what the engine said, NaN where nobody sampled.
        old_logp, ref_logp: None when the objective does not need them.
        trajectory: index in the step.      response: the same, dense within the row.
        response_tokens: trained tokens of the response each token belongs to.
        selected: bool, tokens that the surrogate treats differently; None = none.
        old_value, value_target: what the critic said before the updates and should have said; None without a critic.
    """

    advantage: Tensor
    sampler_logp: Tensor
    old_logp: Tensor | None
    ref_logp: Tensor | None
    trajectory: Tensor
    response: Tensor
    response_tokens: Tensor
    selected: Tensor | None = None
    old_value: Tensor | None = None
    value_target: Tensor | None = None


class Objective(Protocol):
    """What is minimised: per-token losses, and per-token numbers worth logging."""

    @property
    def aggregation(self) -> str: ...

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        """Tokens that this update treats differently, by trajectory; picked before the first backward. {} = none."""
        ...

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss_K with gradient, metric name -> values_K averaged over the step's tokens)."""
        ...


@dataclass(frozen=True)
class PolicyGradient:
    """The GRPO family: the row's surrogate, weighted for the engine's log-probs, plus KL, entropy and value terms.

    All terms are per token and share the one denominator.

    Args:
        algorithm: the row.
        kl_coef: weight of the KL to the reference in the loss (0 where it is in the reward); an adaptive one changes.
        entropy_coef: weight of the entropy bonus.
        importance: "truncate" or "mask": weigh the loss for the engine's log-probs. "ratio": take them for the old
            ones. "none": neither.
    """

    algorithm: Algorithm
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance: str = "none"

    @property
    def aggregation(self) -> str:
        return self.algorithm.aggregation

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        """For Clip-Cov and KL-Cov: one more forward pass, since the choice needs all of the update's log-probs."""
        if not self.algorithm.selects:
            return {}
        logps: dict[int, Tensor] = {}
        fill_logps(policy, batch, logps, tokens_per_row)
        said = {i.trajectory: batch.sampler_logp_of(i).to(policy.device) for i in batch.items}
        own = {
            i: [logp, self._old(logp, batch.old_logp.get(i), said[i]), batch.advantage_of(i, len(logp)).to(logp.device)]
            for i, logp in logps.items()
        }
        columns = [on_cpu({i: found[k] for i, found in own.items()}) for k in range(3)]
        own = {i: [column[i] for column in columns] for i in own}
        all_of_them = {i: x for theirs in batch.world.gather(own) for i, x in theirs.items()}
        if not all_of_them:
            return {}
        order = sorted(all_of_them)
        logp, old, advantage = zip(*(all_of_them[i] for i in order), strict=True)
        found = select_tokens(self.algorithm, logp, old, advantage, batch.seed)
        return {i: chosen for i, chosen in zip(order, found, strict=True) if i in own}

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        old = self._old(stats.logp, data.old_logp, data.sampler_logp)
        tokens = Tokens(stats.logp, old, data.advantage, data.response, data.selected)
        loss, clipped = policy_loss(self.algorithm, tokens)
        shown = {"policy/clip_share": clipped, "policy/entropy": stats.entropy}
        if self.importance in ("truncate", "mask"):
            weight = importance_weight(
                old, data.sampler_logp, data.response, mode=self.importance, level=self.algorithm.importance_level,
                cap=self.algorithm.importance_cap,
            )  # fmt: skip
            weight = applied_weight(self.algorithm, weight, data.response)
            loss = loss * weight
            shown["policy/importance_weight"] = weight
        shown["loss/policy"] = loss.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * stats.entropy
        if self.kl_coef > 0:
            kl = self._kl(stats, data)
            loss = loss + self.kl_coef * kl
            shown["loss/kl"] = kl.detach()
        if self.algorithm.needs_critic:
            assert stats.value is not None and data.old_value is not None and data.value_target is not None
            value = clipped_value_loss(
                stats.value, data.old_value, data.value_target, clip_range=self.algorithm.value_clip
            )
            loss = loss + self.algorithm.value_coef * value
            shown["loss/value"] = value.detach()
        return loss, shown

    def _old(self, logp: Tensor, before: Tensor | None, said: Tensor) -> Tensor:
        """The old log-probs of the ratio: what the policy said before the updates, or what the engine did.

        With one update a batch the policy before it IS this one: its old log-prob is the detached new one.
        Args: before: None = there is one update. said: the engine's, NaN where nobody sampled.
        """
        old = logp.detach() if before is None else before
        return old if self.importance != "ratio" else torch.where(torch.isnan(said), old, said)

    def _kl(self, stats: TokenStats, data: TokenData) -> Tensor:
        if self.algorithm.kl == "full":
            assert stats.kl is not None
            return stats.kl
        assert data.ref_logp is not None
        return KL_ESTIMATORS[self.algorithm.kl](stats.logp, data.ref_logp)


@dataclass(frozen=True)
class CrossEntropy:
    """Supervised learning: negative log-likelihood of the target tokens."""

    aggregation: str = "token_mean"

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        return {}

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        loss = cross_entropy(stats.logp)
        return loss, {"loss/cross_entropy": loss.detach(), "policy/entropy": stats.entropy}


def update(
    policy: Policy, optimizer: Optimizer, batch: StepBatch, objective: Objective, *, lr: float, tokens_per_row: int,
    max_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """One optimizer step. The denominator is ONE number, fixed before the first backward.

    Args: lr: this update's learning rate. tokens_per_row: packing budget. max_tokens: for aggregation "constant".
    Returns: metrics, token means over the step.
    Raises: TrainError when loss or gradient are not finite, OutOfMemoryError when a row does not fit; nothing was
        changed then.
    """
    metrics = add_gradients(policy, optimizer, batch, objective, tokens_per_row=tokens_per_row, max_tokens=max_tokens)
    parts = {f"optim/grad_norm/{part}": norm for part, norm in optimizer.part_norms().items()}
    norm = optimizer.clip()
    if not norm < float("inf"):
        optimizer.clear()
        raise TrainError(
            f"the gradient is not finite ({norm}) although the loss is; the weights were not changed",
            hint="lower optim.lr, or use model.dtype = float32; the last checkpoint is unharmed",
        )
    optimizer.step(lr)
    return metrics | {"optim/grad_norm": norm, "optim/lr": lr} | parts


def add_gradients(
    policy: Policy, optimizer: Optimizer, batch: StepBatch, objective: Objective, *, tokens_per_row: int,
    max_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """The gradient of a step, row by row, added to what the parameters have. As `update`, which it is the body of."""
    trained = [n for theirs in batch.world.gather([batch.num_trained(i) for i in batch.items]) for n in theirs]
    dead = [n for group in batch.dead_tokens.values() for n in group]
    total = Denominator.of(objective.aggregation, trained, max_tokens, dead)
    selected = objective.select(policy, batch, tokens_per_row)
    tally, losses = Tally(), []
    for items in batch.rows(tokens_per_row):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device)
            stats = policy(row, batch.reference_of(items, policy))
            data = _token_data(items, batch, selected, policy.device)
            loss_K, shown = objective.loss(stats, data)
            losses.append((loss_K.detach(), data.trajectory))
            if items[-1].trajectory == FILLER:
                loss_K = torch.where(data.trajectory == FILLER, 0.0 * loss_K, loss_K)
                shown = {name: values * (data.trajectory != FILLER) for name, values in shown.items()}
            loss = aggregate(loss_K, data.response_tokens, total)
            loss.backward()
        tally.add("loss/total", loss)
        for name, values in shown.items():
            tally.add(name, global_mean(values, total))
        tally.add(NOT_FINITE, (~torch.isfinite(losses[-1][0])).sum())
        tally_mismatch(tally, stats.logp.detach(), data.sampler_logp)
    numbers = tally.read()
    _stop_unless_finite(_not_finite(losses, batch) if numbers.pop(NOT_FINITE, 0.0) else [], batch.world, optimizer)
    parts = batch.world.gather(numbers)
    return {"loss/total": 0.0} | _summed(parts) | Mismatch.joined([Mismatch.of(part) for part in parts]).metrics()


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


def _token_data(
    items: Sequence[TrainItem], batch: StepBatch, selected: dict[int, Tensor], device: torch.device
) -> TokenData:
    """What the objective gets of a row. Made on the CPU and copied there whole: no number is asked of the device."""
    counts = {k: n for k, i in enumerate(items) if (n := batch.num_trained(i))}
    of_each = [(items[k].trajectory, response, n) for response, (k, n) in enumerate(counts.items())]
    indices_3K = [[values[column] for values in of_each for _ in range(values[2])] for column in range(3)]
    trajectory, response, response_tokens = torch.tensor(indices_3K, dtype=torch.long).reshape(3, -1).to(device)
    advantage = torch.cat([batch.advantage_of(i.trajectory, batch.num_trained(i)) for i in items])
    sampler_logp = torch.cat([batch.sampler_logp_of(i) for i in items])
    advantage, sampler_logp = torch.stack([advantage, sampler_logp]).to(device)

    def join(by: Mapping[int, Tensor]) -> Tensor | None:
        if not by:
            return None
        nothing = next(iter(by.values()))[:1]
        parts = [by[i.trajectory] if i.trajectory != FILLER else nothing.new_zeros(batch.num_trained(i)) for i in items]
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
    """Names of the responses with a loss that is not finite. Args: losses: of each row (loss_K, trajectory_K)."""
    found = {i for loss_K, trajectory_K in losses for i in trajectory_K[~torch.isfinite(loss_K)].tolist()}
    return [batch.names_S[i] for i in sorted(found) if i != FILLER]


def _stop_unless_finite(bad: list[str], world: World, optimizer: Optimizer) -> None:
    everywhere = [name for theirs in world.gather(bad) for name in theirs]
    if everywhere:
        optimizer.clear()
        names = ", ".join(everywhere[:5])
        raise TrainError(
            f"the loss is not finite for {len(everywhere)} response(s): {names}; the weights were not changed",
            hint="look at these rows with `vlmrl report`; a lower optim.lr or model.dtype = float32 often helps",
        )


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the whole step from those of each process. A process of fillers alone has all names too."""
    names = [n for n in dict.fromkeys(n for p in parts for n in p) if not n.startswith(PREFIX)]
    return {n: sum(p.get(n, 0.0) for p in parts) for n in names}
