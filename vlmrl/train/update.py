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
from vlmrl.data.batch import TrainItem, make_row
from vlmrl.dist.world import World
from vlmrl.errors import TrainError
from vlmrl.model.policy import Policy
from vlmrl.train.mismatch import Mismatch
from vlmrl.train.optim import Optimizer
from vlmrl.train.reference import ReferencePolicy
from vlmrl.train.step import FILLER, StepBatch
from vlmrl.types import PackedRow, TokenStats


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
        importance: "truncate" or "mask": correct for the engine's log-probs; "none": do not.
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
        own = {
            i: [x.cpu() for x in (logp, batch.old_logp.get(i, logp), batch.advantage_of(i, len(logp)))]
            for i, logp in logps.items()
        }
        all_of_them = {i: x for theirs in batch.world.gather(own) for i, x in theirs.items()}
        if not all_of_them:
            return {}
        order = sorted(all_of_them)
        logp, old, advantage = zip(*(all_of_them[i] for i in order), strict=True)
        found = select_tokens(self.algorithm, logp, old, advantage, batch.seed)
        return {i: chosen for i, chosen in zip(order, found, strict=True) if i in own}

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        # With one update a batch the policy that sampled IS this one: its old log-prob is the detached new one.
        old = stats.logp.detach() if data.old_logp is None else data.old_logp
        tokens = Tokens(stats.logp, old, data.advantage, data.response, data.selected)
        loss, clipped = policy_loss(self.algorithm, tokens)
        shown = {"policy/clip_share": clipped, "policy/entropy": stats.entropy}
        if self.importance != "none":
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
    sums = add_gradients(policy, optimizer, batch, objective, tokens_per_row=tokens_per_row, max_tokens=max_tokens)
    parts = {f"optim/grad_norm/{part}": norm for part, norm in optimizer.part_norms().items()}
    norm = optimizer.clip()
    if not norm < float("inf"):
        optimizer.clear()
        raise TrainError(
            f"the gradient is not finite ({norm}) although the loss is; the weights were not changed",
            hint="lower optim.lr, or use model.dtype = float32; the last checkpoint is unharmed",
        )
    optimizer.step(lr)
    return sums | {"optim/grad_norm": norm, "optim/lr": lr} | parts


def add_gradients(
    policy: Policy, optimizer: Optimizer, batch: StepBatch, objective: Objective, *, tokens_per_row: int,
    max_tokens: int,
) -> dict[str, float]:  # fmt: skip
    """The gradient of a step, row by row, added to what the parameters have. As `update`, which it is the body of."""
    trained = [n for theirs in batch.world.gather([batch.num_trained(i) for i in batch.items]) for n in theirs]
    dead = [n for group in batch.dead_tokens.values() for n in group]
    total = Denominator.of(objective.aggregation, trained, max_tokens, dead)
    selected = objective.select(policy, batch, tokens_per_row)
    sums: dict[str, float] = {"loss/total": 0.0}
    mismatch = Mismatch()
    bad: list[str] = []
    for items in batch.rows(tokens_per_row):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device)
            stats = policy(row, batch.reference_of(items, policy))
            data = _token_data(row, items, batch, selected)
            loss_K, shown = objective.loss(stats, data)
            if not bool(torch.isfinite(loss_K).all()):
                bad += _not_finite(loss_K, data, batch)
                if batch.world.size == 1:
                    break  # others would wait for this process's backward pass
            if items[-1].trajectory == FILLER:
                loss_K = torch.where(data.trajectory == FILLER, 0.0 * loss_K, loss_K)
                shown = {name: values * (data.trajectory != FILLER) for name, values in shown.items()}
            loss = aggregate(loss_K, data.response_tokens, total)
            loss.backward()
        sums["loss/total"] += float(loss.detach())
        for name, values in shown.items():
            sums[name] = sums.get(name, 0.0) + float(global_mean(values, total))
        mismatch.add(stats.logp.detach(), data.sampler_logp)
    _stop_unless_finite(bad, batch.world, optimizer)
    sums = _over_processes(sums, batch.world)
    return sums | Mismatch.joined(batch.world.gather(mismatch)).metrics()


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
            found |= _by_trajectory(row, items, getattr(stats, name))


@torch.no_grad()
def fill_reference(reference: Policy | ReferencePolicy, batch: StepBatch, tokens_per_row: int) -> None:
    """Keep of the reference what the full KL of the batch needs."""
    batch.ref_head = reference.head
    for items in batch.rows(tokens_per_row):
        with batch.naming(items, reference.device):
            row = make_row(items, reference.device)
            batch.ref_hidden |= _by_trajectory(row, items, reference.states(row).cpu())


def _by_trajectory(row: PackedRow, items: Sequence[TrainItem], values_K: Tensor) -> dict[int, Tensor]:
    owner = torch.tensor(row.trajectories, device=row.span_K.device)[row.span_K].to(values_K.device)
    return {i.trajectory: values_K[owner == i.trajectory] for i in items if i.trajectory != FILLER}


def _token_data(row: PackedRow, items: Sequence[TrainItem], batch: StepBatch, selected: dict[int, Tensor]) -> TokenData:
    device = row.target_K.device
    trajectory = torch.tensor(row.trajectories, device=device)[row.span_K]
    counts = torch.tensor([batch.num_trained(i) for i in items], device=device)
    response = torch.repeat_interleave(torch.arange(len(items), device=device), counts)
    sampled = [
        x for i in items for s in i.segments if s.trained for x in (s.sampler_logp or [float("nan")] * len(s.ids))
    ]
    advantage = [batch.advantage_of(i.trajectory, batch.num_trained(i)) for i in items]

    def join(by: Mapping[int, Tensor]) -> Tensor | None:
        if not by:
            return None
        parts = [by[i.trajectory] if i.trajectory != FILLER else torch.zeros(batch.num_trained(i)) for i in items]
        return torch.cat([p.to(device) for p in parts])

    chosen = join(selected)

    return TokenData(
        advantage=torch.cat(advantage).to(device),
        sampler_logp=torch.tensor(sampled, device=device, dtype=torch.float32),
        old_logp=join(batch.old_logp),
        ref_logp=join(batch.ref_logp),
        trajectory=trajectory,
        response=response,
        response_tokens=counts[response],
        selected=None if chosen is None else chosen.bool(),
        old_value=join(batch.old_value),
        value_target=join(batch.value_target),
    )


def _not_finite(loss_K: Tensor, data: TokenData, batch: StepBatch) -> list[str]:
    """Names of the responses with a loss that is not finite."""
    return [batch.names_S[i] for i in sorted(set(data.trajectory[~torch.isfinite(loss_K)].tolist())) if i != FILLER]


def _stop_unless_finite(bad: list[str], world: World, optimizer: Optimizer) -> None:
    everywhere = [name for theirs in world.gather(bad) for name in theirs]
    if everywhere:
        optimizer.clear()
        names = ", ".join(everywhere[:5])
        raise TrainError(
            f"the loss is not finite for {len(everywhere)} response(s): {names}; the weights were not changed",
            hint="look at these rows with `vlmrl report`; a lower optim.lr or model.dtype = float32 often helps",
        )


def _over_processes(sums: dict[str, float], world: World) -> dict[str, float]:
    """Metrics of the whole step from those of each process. A process of fillers alone has all names too."""
    parts = world.gather(sums)
    return {n: sum(theirs.get(n, 0.0) for theirs in parts) for n in dict.fromkeys(n for p in parts for n in p)}
