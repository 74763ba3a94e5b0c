"""Optimizer step on a batch of trajectories: one function for reinforcement learning and for supervised learning.

Letters: K trained tokens of a packed row, S trajectories of the step. An update minimises the GRPO family's policy
gradient, or cross-entropy. Its sums and maxima stay on the device and are copied to the CPU once, because each copy
makes the CPU wait. Forward passes without gradient give log-probs, values, and the reference's hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import torch
from torch import Tensor

from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.losses import (
    KL_LOSSES,
    LOG_RATIO_LIMIT,
    Denominator,
    Tokens,
    aggregate,
    applied_weight,
    clipped_value_loss,
    cross_entropy,
    global_mean,
    importance_weight,
    k3,
    masked_perception_loss,
    own_demonstration_loss,
    perception_loss,
    policy_loss,
    select_tokens,
)
from vlmrl.dist.world import World
from vlmrl.errors import TrainError
from vlmrl.model.device_memory import upload
from vlmrl.model.packing import TokenStats, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.train.learner import Optimizer, ReferencePolicy
from vlmrl.train.step_batch import FILLER, Beside, StepBatch, hidden_states, on_cpu
from vlmrl.untrusted import number_of

PREFIX = "mismatch/"
"""Prefix of the names in a tally that belong to `Mismatch`."""


class Tally:
    """Sums and maxima over the packed rows of an update, by name. All are float64 scalars on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a number to a sum."""
        value = value.detach().double()
        self._sums[name] = value if name not in self._sums else self._sums[name] + value

    def top(self, name: str, value: Tensor) -> None:
        """Raise a maximum to a number, if that is larger."""
        value = value.detach().double()
        self._most[name] = value if name not in self._most else torch.maximum(self._most[name], value)

    def read(self) -> dict[str, float]:
        """Return all sums, then all maxima, in the order in which they began, with one copy from the device."""
        numbers = self._sums | self._most
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True)) if numbers else {}


@torch.no_grad()
def tally_mismatch(tally: Tally, logp_K: Tensor, sampler_logp_K: Tensor) -> None:
    """Add these tokens to the sums that `Mismatch.of` reads.

    Args:
        logp_K: the trainer's log-probs, in nats.
        sampler_logp_K: the engine's log-probs, in nats; NaN where no token was sampled: not counted.
    """
    if not len(logp_K):
        return
    sampled = ~torch.isnan(sampler_logp_K)
    sampler_logp_64 = sampler_logp_K.double()
    d = torch.where(sampled, logp_K.double() - sampler_logp_64, 0.0)
    weight = torch.where(sampled, d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), 0.0)
    # [K] -> one scalar per sum. Tokens that were not sampled have d = 0 and weight = 0.
    sums = {
        "tokens": sampled,
        "gap": d.abs(),
        "k3": k3(-d, torch.zeros_like(d)),
        "weight": weight,
        "square": weight.square(),
    }
    for name, values in sums.items():
        tally.add(f"{PREFIX}{name}", values.sum())
    tally.top(f"{PREFIX}gap_max", d.abs().max())


@dataclass
class Mismatch:
    """Sums over sampled tokens, with d = trainer - engine log-prob in nats and w = exp(d), the importance weight.

    Args:
        gap, k3, weight, square: sums of |d|, w - 1 - d, w and w^2.
        gap_max: largest |d|.
    Example: d = 0 and d = ln 2: gap_mean 0.3466, k3 0.1534, effective share (1 + 2)^2 / (2 * (1 + 4)) = 0.9.
    """

    tokens: int = 0
    gap: float = 0.0
    k3: float = 0.0
    weight: float = 0.0
    square: float = 0.0
    gap_max: float = 0.0

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Mismatch:
        """Return the sums of `tally_mismatch` from the numbers of a tally."""
        sums = {f.name: numbers.get(f"{PREFIX}{f.name}", 0.0) for f in fields(cls)}
        tokens = int(sums.pop("tokens"))
        return cls(tokens, **sums)

    @classmethod
    def joined(cls, parts: Sequence[Mismatch]) -> Mismatch:
        """Merge the sums of several ranks."""
        merged = cls()
        for part in parts:
            for name in ("tokens", "gap", "k3", "weight", "square"):
                setattr(merged, name, getattr(merged, name) + getattr(part, name))
            merged.gap_max = max(merged.gap_max, part.gap_max)
        return merged

    @property
    def gap_mean(self) -> float:
        """Mean |d|; 0 without tokens."""
        return self.gap / max(1, self.tokens)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the difference, over all sampled tokens.

        `policy/sampler_gap_mean` and `_max`: mean and largest |d|, in nats. `policy/sampler_k3`: an estimate of
        KL(engine || trainer), in nats. `policy/sampler_ess`: effective sample size as a share of the tokens,
        (sum w)^2 / (tokens * sum w^2), in (0, 1].

        Source: k3: J. Schulman, "Approximating KL divergence" (2020). Effective sample size: A. Kong (1992).
        """
        effective = self.weight**2 / (self.tokens * self.square) if self.tokens else 1.0
        return {
            "policy/sampler_gap_mean": self.gap_mean,
            "policy/sampler_gap_max": self.gap_max,
            "policy/sampler_k3": self.k3 / max(1, self.tokens),
            "policy/sampler_ess": effective,
        }


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
    extra = {"energy": True} if "energy" in into else {}
    for items, passes in batch.rows(tokens_per_row, policy.sharing):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device, passes, batch.filler)
            reference = batch.outputs_of(batch.reference, items, policy.device) if "kl" in into else None
            stats = policy(row, reference, **extra)
        for name, values_by_trajectory in into.items():
            values_by_trajectory |= batch.by_trajectory(items, getattr(stats, name))


@torch.no_grad()
def fill_reference(reference: Policy | ReferencePolicy, batch: StepBatch, tokens_per_row: int) -> None:
    """Store in the batch what its full KL needs: the reference and its hidden states."""
    batch.reference = Beside(reference, hidden=hidden_states(reference, batch, tokens_per_row))


@dataclass(frozen=True)
class TokenData:
    """Data of a packed row's trained tokens that an objective needs besides the policy's statistics. All [K].

    Args:
        advantage: float32.
        sampler_logp: the engine's log-probs in nats, float32; NaN where no token was sampled.
        old_logp, ref_logp: log-probs before the updates, and of the reference, in nats; None if not needed.
        trajectory: index of the token's trajectory in the step, int64; `FILLER` for a filler.
        response: index of the token's response, int64, 0-based and dense within the row.
        response_tokens: number of trained tokens in the token's response, int64.
        selected: bool, tokens that the surrogate treats differently; None = none.
        old_value, value_target: the critic's value before the updates, and its target; None without a critic.
        demonstrated: bool, tokens that a demonstration wrote; None = none.
        masked_logp: log-probs behind masked images, in nats; in the pass behind these, those of the other pass.
        weight, teacher_weight: factors of the policy's loss, and of the divergence from the teacher; None = 1.
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
    demonstrated: Tensor | None = None
    masked_logp: Tensor | None = None
    weight: Tensor | None = None
    teacher_weight: Tensor | None = None


class Objective(Protocol):
    """Objective of an update: losses and metrics per token."""

    @property
    def aggregation(self) -> str: ...

    @property
    def one_mean(self) -> bool:
        """Return whether demonstrated tokens are in the mean of `loss`; else only `loss_beside` trains on them."""
        ...

    def prepared(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> Objective:
        """Return the objective with what it needs to know of the whole update. Called once, before `select`."""
        ...

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        """Return the tokens that this update treats differently: trajectory -> [trained tokens]; {} = none.

        Called once, before the first backward.
        """
        ...

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss_K with gradient, metric name -> values_K).

        The metrics are averaged over the tokens that the policy wrote.
        """
        ...

    def loss_beside(self, stats: TokenStats) -> Tensor | None:
        """Return the loss of demonstrated tokens that has a mean of its own, for all tokens [K]; None without one."""
        ...

    def masked_loss(self, stats: TokenStats, data: TokenData) -> Tensor:
        """Return the loss of the pass behind masked images [K]; called if the batch has a `masked_prompt`."""
        ...


@dataclass(frozen=True)
class PolicyGradient:
    """Objective of the GRPO family: the algorithm's surrogate, plus KL, entropy and value terms.

    All terms are per token and share one denominator.

    Args:
        kl_coef: weight of the KL to the reference in the loss (0 where it is in the reward); an adaptive one changes
            from step to step.
        importance: use of the engine's log-probs. "truncate" or "mask": multiply the loss by importance weights.
            "ratio": take them as the old log-probs. "none": neither.
        mu: share of the demonstrations in the loss; None = samples count in full, demonstrations by their coefficient.
        mean_entropy: mean entropy of the policy over the tokens of the update that it wrote, in nats.
    """

    algorithm: Algorithm
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance: str = "none"
    mu: float | None = None
    mean_entropy: float = 0.0

    @property
    def aggregation(self) -> str:
        return self.algorithm.aggregation

    @property
    def one_mean(self) -> bool:
        return self.algorithm.one_mean

    @property
    def keeps_dead(self) -> bool:
        """Return whether dead groups are trained on: a term of the loss acts on them, or a critic learns from them.

        Groups that a filter refused stay out in any case.
        """
        acts_on_all = self.algorithm.needs_critic or bool(self.kl_coef or self.entropy_coef)
        acts_on_all |= self.algorithm.demonstrations == "hint"  # whose tokens are in the samples
        acts_on_all |= self.algorithm.teacher == "loss"
        return (acts_on_all or self.algorithm.perceives_all) and self.algorithm.filter == "none"

    def masked_loss(self, stats: TokenStats, data: TokenData) -> Tensor:
        logp = stats.logp.detach() if data.masked_logp is None else data.masked_logp  # None: a rank with fillers alone
        return masked_perception_loss(self.algorithm, logp, stats.logp, stats.entropy)

    def prepared(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> PolicyGradient:
        """Measure the policy's mean entropy, with one more forward pass, if the algorithm weighs losses by it."""
        if not self.algorithm.weighs_by_entropy:
            return self
        entropies: dict[int, Tensor] = {}
        fill_stats(policy, batch, {"entropy": entropies}, tokens_per_row)
        on_host = on_cpu(entropies)
        own = [on_host[i.trajectory][~torch.tensor(batch.demonstrated_of(i))].double() for i in batch.items]
        parts = batch.world.gather((sum(float(x.sum()) for x in own), sum(len(x) for x in own)))
        total, count = (sum(part[k] for part in parts) for k in range(2))
        return replace(self, mean_entropy=total / max(1, count))

    def loss_beside(self, stats: TokenStats) -> Tensor | None:
        loss = own_demonstration_loss(self.algorithm, stats.logp, self.mean_entropy)
        coef = self.algorithm.demonstration_coef if self.mu is None else self.mu
        return None if loss is None else coef * loss

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        """Select the tokens of Clip-Cov and KL-Cov, with one more forward pass.

        The choice needs the log-probs of all tokens of the update, on all ranks.
        """
        if not self.algorithm.selects:
            return {}
        logps: dict[int, Tensor] = {}
        fill_logps(policy, batch, logps, tokens_per_row)
        sampler_logps = {i.trajectory: batch.sampler_logp_of(i).to(policy.device) for i in batch.items}
        # trajectory -> (logp, old log-prob, advantage), [trained tokens] each
        own_tokens = {
            i: [
                logp,
                self._old(logp, batch.old_logp.get(i), sampler_logps[i]),
                batch.advantage_of(i, len(logp)).to(logp.device),
            ]
            for i, logp in logps.items()
        }
        columns = [on_cpu({i: values[k] for i, values in own_tokens.items()}) for k in range(3)]
        own_tokens = {i: [column[i] for column in columns] for i in own_tokens}
        all_tokens = {i: x for of_rank in batch.world.gather(own_tokens) for i, x in of_rank.items()}
        if not all_tokens:
            return {}
        # Sorted: the choice must not depend on which rank has which trajectory.
        trajectories = sorted(all_tokens)
        logp, old, advantage = zip(*(all_tokens[i] for i in trajectories), strict=True)
        selected = select_tokens(self.algorithm, logp, old, advantage, batch.seed)
        return {i: is_selected for i, is_selected in zip(trajectories, selected, strict=True) if i in own_tokens}

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        # Every tensor here is [K]: one number per trained token of the packed row.
        old = self._old(stats.logp, data.old_logp, data.sampler_logp)
        advantage = data.advantage
        if self.algorithm.weighs_by_entropy:  # samples have +1 or -1 here
            gain = self.algorithm.entropy_gain * math.exp(self.mean_entropy)
            advantage = torch.where(advantage > 0, gain * advantage, advantage)
            if data.demonstrated is not None:
                advantage = torch.where(data.demonstrated, data.advantage, advantage)
        tokens = Tokens(stats.logp, old, advantage, data.response, data.selected, data.demonstrated)
        loss, clipped = policy_loss(self.algorithm, tokens)
        metrics = {"policy/clip_share": clipped, "policy/entropy": stats.entropy}
        if self.importance in ("truncate", "mask"):
            weight = importance_weight(
                old,
                data.sampler_logp,
                data.response,
                mode=self.importance,
                level=self.algorithm.importance_level,
                cap=self.algorithm.importance_cap,
            )
            weight = applied_weight(self.algorithm, weight, data.response)
            loss = loss * weight  # the weight has no gradient
            metrics["policy/importance_weight"] = weight
        if data.weight is not None:
            loss = loss * data.weight
            metrics["perception/selected_share"] = (data.weight > 0).float()
        metrics["loss/policy"] = loss.detach()
        if data.masked_logp is not None:
            term, kl = perception_loss(self.algorithm, stats.logp, data.masked_logp, stats.entropy)
            loss = loss + term
            metrics["perception/kl"] = kl
        own = 1.0 if data.demonstrated is None else (~data.demonstrated).float()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * stats.entropy * own
        if self.kl_coef > 0:
            kl = self._kl(stats, data)
            loss = loss + self.kl_coef * kl * own
            metrics["loss/kl"] = kl.detach()
        if stats.teacher is not None:
            factor = 1.0 if data.teacher_weight is None else data.teacher_weight
            loss = loss + self.algorithm.teacher_coef * factor * stats.teacher * own
            metrics["loss/teacher"] = stats.teacher.detach()
        if self.algorithm.needs_critic:
            assert stats.value is not None and data.old_value is not None and data.value_target is not None
            value = clipped_value_loss(
                stats.value, data.old_value, data.value_target, clip_range=self.algorithm.value_clip
            )
            loss = loss + self.algorithm.value_coef * value
            metrics["loss/value"] = value.detach()
        return loss if self.mu is None else (1.0 - self.mu) * loss, metrics

    def _old(self, logp: Tensor, before: Tensor | None, sampler_logp: Tensor) -> Tensor:
        """Return the old log-probs of the ratio [K]: those of the policy before the updates, or the engine's.

        With a single update per batch, the policy before it IS this one: its old log-prob is the new one, detached.

        Args:
            before: log-probs before the updates; None = there is a single update.
            sampler_logp: the engine's log-probs; NaN where no token was sampled.
        """
        old = logp.detach() if before is None else before
        return old if self.importance != "ratio" else torch.where(torch.isnan(sampler_logp), old, sampler_logp)

    def _kl(self, stats: TokenStats, data: TokenData) -> Tensor:
        if self.algorithm.kl == "full":
            assert stats.kl is not None
            return stats.kl
        assert data.ref_logp is not None
        return KL_LOSSES[self.algorithm.kl](stats.logp, data.ref_logp)


@dataclass(frozen=True)
class CrossEntropy:
    """Supervised learning: negative log-likelihood of the target tokens."""

    aggregation: str = "token_mean"
    one_mean: bool = True

    def prepared(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> CrossEntropy:
        return self

    def loss_beside(self, stats: TokenStats) -> None:
        return None

    def masked_loss(self, stats: TokenStats, data: TokenData) -> Tensor:
        raise NotImplementedError

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        return {}

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        loss = cross_entropy(stats.logp)
        return loss, {"loss/cross_entropy": loss.detach(), "policy/entropy": stats.entropy}


def objective_of(recipe: Recipe, algorithm: Algorithm, kl_coef: float) -> PolicyGradient:
    """Return the objective of a step."""
    r = recipe.rollout
    importance = algorithm.importance_of(
        own_engine=r.engine != "vllm", filtered=r.top_p < 1 or r.top_k > 0, stale=r.overlap
    )
    if importance == "ratio" and algorithm.dual_clip is None:
        # The clip does not bound the ratio of a token with a negative advantage from above, and the ratio is huge where
        # the engine gave a likely token a low probability.
        algorithm = replace(algorithm, dual_clip=algorithm.importance_cap)
    return PolicyGradient(algorithm, kl_coef, recipe.algo.entropy_coef, importance)


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
    # Trained tokens of each response, on all ranks: the denominators do not depend on the packing or the ranks.
    counts = [batch.counts_of(i) for i in batch.items]
    pairs = [pair for of_rank in batch.world.gather(counts) for pair in of_rank]
    own, shown = [a for a, _ in pairs], [b for _, b in pairs]
    dead = [n for group in batch.dead_tokens.values() for n in group]
    of_policy = Denominator.of(objective.aggregation, own, max_tokens, dead)
    both = Denominator.of(objective.aggregation, [a + b for a, b in pairs], max_tokens, dead)
    total = both if objective.one_mean else of_policy
    beside = Denominator.of("token_mean", shown, max_tokens)
    objective = objective.prepared(policy, batch, tokens_per_row)
    selected = objective.select(policy, batch, tokens_per_row)
    tally, losses, logps = Tally(), [], {}
    for items, passes in batch.rows(tokens_per_row, policy.sharing):
        with batch.naming(items, policy.device):
            row = make_row(items, policy.device, passes, batch.filler)
            others = (batch.outputs_of(x, items, policy.device) for x in (batch.reference, batch.teacher))
            stats = policy(row, *others)
            logps |= batch.by_trajectory(items, stats.logp.detach()) if batch.masked_prompt is not None else {}
            data = _token_data(items, batch, selected, policy.device, one_mean=objective.one_mean)
            loss_K, token_metrics = objective.loss(stats, data)
            beside_K = objective.loss_beside(stats) if data.demonstrated is not None else None
            if data.demonstrated is not None:
                token_metrics = {name: values * ~data.demonstrated for name, values in token_metrics.items()}
            losses.append((loss_K.detach(), data.trajectory))
            if items[-1].trajectory == FILLER:  # times 0.0: it adds nothing, but its backward runs as on other ranks
                loss_K = torch.where(data.trajectory == FILLER, 0.0 * loss_K, loss_K)
                token_metrics = {name: values * (data.trajectory != FILLER) for name, values in token_metrics.items()}
            # [K] -> scalar: this packed row's share of the loss. The gradients of all packed rows add up.
            loss = aggregate(loss_K, data.response_tokens, total)
            if data.demonstrated is not None:
                logp = stats.logp.detach() * data.demonstrated
                tally.add("demonstration/logp", global_mean(logp, beside))
                if beside_K is not None:
                    term = aggregate(beside_K * data.demonstrated, data.response_tokens, beside)
                    loss = loss + term
                    tally.add("loss/demonstrations", term)
            loss.backward()
        tally.add("loss/total", loss)
        for name, values in token_metrics.items() if sum(own) else ():
            tally.add(name, global_mean(values, of_policy))
        tally.add(NOT_FINITE, (~torch.isfinite(losses[-1][0])).sum())
        tally_mismatch(tally, stats.logp.detach(), data.sampler_logp)
    if batch.masked_prompt is not None:
        behind = replace(batch.behind(batch.masked_prompt), masked_logp=logps)
        losses += _add_masked(policy, behind, objective, total, tokens_per_row, tally)
    numbers = tally.read()
    _stop_unless_finite(_not_finite(losses, batch) if numbers.pop(NOT_FINITE, 0.0) else [], batch.world, optimizer)
    parts = batch.world.gather(numbers)
    return {"loss/total": 0.0} | _summed(parts) | Mismatch.joined([Mismatch.of(part) for part in parts]).metrics()


def _add_masked(
    policy: Policy, behind: StepBatch, objective: Objective, total: Denominator, tokens_per_row: int, tally: Tally
) -> list[tuple[Tensor, Tensor]]:
    """Add the gradient through the pass behind masked images. The log-probs of the other pass are constants here.

    The two gradients add up to the whole one, and no row needs the activations of both passes at the same time.

    Args:
        behind: the batch behind masked images; its `masked_logp` has the log-probs of the other pass.
    Returns: (loss_K, trajectory_K) of each packed row.
    """
    losses = []
    for items, passes in behind.rows(tokens_per_row, policy.sharing):
        with behind.naming(items, policy.device):
            stats = policy(make_row(items, policy.device, passes, behind.filler))
            assert isinstance(stats, TokenStats)
            data = _token_data(items, behind, {}, policy.device, one_mean=objective.one_mean)
            loss_K = objective.masked_loss(stats, data)
            losses.append((loss_K.detach(), data.trajectory))
            if items[-1].trajectory == FILLER:
                loss_K = torch.where(data.trajectory == FILLER, 0.0 * loss_K, loss_K)
            loss = aggregate(loss_K, data.response_tokens, total)
            loss.backward()
        tally.add("loss/total", loss)
        tally.add(NOT_FINITE, (~torch.isfinite(losses[-1][0])).sum())
    return losses


def _token_data(
    items: Sequence[TrainItem],
    batch: StepBatch,
    selected: dict[int, Tensor],
    device: torch.device,
    *,
    one_mean: bool = True,
) -> TokenData:
    """Return the objective's inputs for a packed row. `one_mean`: as in `Objective`.

    They are built on the CPU and copied to the device as a whole: the CPU never waits for a number of the device.
    """
    # Item -> its trained tokens. Items without any are skipped, so that `response` is dense.
    counts = {k: n for k, i in enumerate(items) if (n := batch.num_trained(i))}
    lengths = [n if one_mean else max(1, batch.counts_of(items[k])[0]) for k, n in counts.items()]
    responses = [(items[k].trajectory, r, lengths[r], n) for r, (k, n) in enumerate(counts.items())]
    # (trajectory, response, length of the response) per response -> [3, K] per token
    indices_3K = [[values[column] for values in responses for _ in range(values[3])] for column in range(3)]
    trajectory, response, response_tokens = upload(torch.tensor(indices_3K, dtype=torch.long).reshape(3, -1), device)
    advantage = torch.cat([batch.advantage_of(i.trajectory, batch.num_trained(i)) for i in items])
    sampler_logp = torch.cat([batch.sampler_logp_of(i) for i in items])
    advantage, sampler_logp = upload(torch.stack([advantage, sampler_logp]), device)

    def join(by: Mapping[int, Tensor]) -> Tensor | None:
        """Join trajectory -> [trained tokens] to the packed row's [K], 0 for a filler. Return None if `by` is empty."""
        if not by:
            return None
        like = next(iter(by.values()))[:1]
        parts = [by[i.trajectory] if i.trajectory != FILLER else like.new_zeros(batch.num_trained(i)) for i in items]
        return torch.cat(parts).to(device)

    chosen = join(selected)
    has_shown = any(batch.counts_of(i)[1] for i in items)
    demonstrated = [flag for i in items for flag in batch.demonstrated_of(i)] if has_shown else []

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
        demonstrated=upload(torch.tensor(demonstrated), device) if has_shown else None,
        masked_logp=join(batch.masked_logp),
        weight=join(batch.token_weight),
        teacher_weight=join(batch.teacher_weight),
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
            f"the loss is not finite for {number_of(len(bad_of_all), 'response')}: {names}; no weight was changed",
            hint="look at these rows with `vlmrl report`; a lower optim.lr or model.dtype = float32 often helps",
        )


def _summed(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of the whole update: the sums over the ranks. A rank with only fillers has all names, too."""
    names = [n for n in dict.fromkeys(n for p in parts for n in p) if not n.startswith(PREFIX)]
    return {n: sum(p.get(n, 0.0) for p in parts) for n in names}
