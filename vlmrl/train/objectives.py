"""Objectives that an update minimises: the GRPO family's policy gradient, and cross-entropy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.losses import ESTIMATORS as KL_ESTIMATORS
from vlmrl.algo.losses import (
    Tokens,
    applied_weight,
    clipped_value_loss,
    cross_entropy,
    importance_weight,
    policy_loss,
    select_tokens,
)
from vlmrl.model.packing import TokenStats
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Recipe
from vlmrl.train.forward_passes import fill_logps
from vlmrl.train.step_batch import StepBatch
from vlmrl.train.tally import on_cpu


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
    """Objective of an update: losses and metrics per token."""

    @property
    def aggregation(self) -> str: ...

    def select(self, policy: Policy, batch: StepBatch, tokens_per_row: int) -> dict[int, Tensor]:
        """Return the tokens that this update treats differently: trajectory -> [trained tokens]; {} = none.

        Called once, before the first backward.
        """
        ...

    def loss(self, stats: TokenStats, data: TokenData) -> tuple[Tensor, dict[str, Tensor]]:
        """Return (loss_K with gradient, metric name -> values_K).

        The metrics are averaged over the step's tokens.
        """
        ...


@dataclass(frozen=True)
class PolicyGradient:
    """Objective of the GRPO family: the algorithm's surrogate, plus KL, entropy and value terms.

    All terms are per token and share one denominator.

    Args:
        algorithm: the row of the algorithm table.
        kl_coef: weight of the KL to the reference in the loss (0 where it is in the reward); an adaptive one changes
            from step to step.
        entropy_coef: weight of the entropy bonus.
        importance: use of the engine's log-probs. "truncate" or "mask": multiply the loss by importance weights.
            "ratio": take them as the old log-probs. "none": neither.
    """

    algorithm: Algorithm
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    importance: str = "none"

    @property
    def aggregation(self) -> str:
        return self.algorithm.aggregation

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
        tokens = Tokens(stats.logp, old, data.advantage, data.response, data.selected)
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
        metrics["loss/policy"] = loss.detach()
        if self.entropy_coef:
            loss = loss - self.entropy_coef * stats.entropy
        if self.kl_coef > 0:
            kl = self._kl(stats, data)
            loss = loss + self.kl_coef * kl
            metrics["loss/kl"] = kl.detach()
        if self.algorithm.needs_critic:
            assert stats.value is not None and data.old_value is not None and data.value_target is not None
            value = clipped_value_loss(
                stats.value, data.old_value, data.value_target, clip_range=self.algorithm.value_clip
            )
            loss = loss + self.algorithm.value_coef * value
            metrics["loss/value"] = value.detach()
        return loss, metrics

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
