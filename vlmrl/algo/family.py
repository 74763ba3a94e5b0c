"""Table of algorithms, the GRPO family: one row = one algorithm, one column = one choice. No torch.

A recipe names a row (`algo.name`) and overrides single cells. A new algorithm is a new row, or a new value of a cell
with its function in advantages.py, losses.py, kl.py or aggregate.py. differences.py lists where a row differs on
purpose from the code of others that has the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from vlmrl.algo.advantages import ESTIMATORS, SCALES
from vlmrl.errors import RecipeError

AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
"""Names of the aggregations in aggregate.py (repeated here because this file must not import torch)."""
RATIOS = ("token", "sequence", "sequence_token")
"""Levels of the probability ratio in losses.py."""
SURROGATES = ("clip", "reinforce", "cispo", "gmpo", "sapo", "clip_cov", "kl_cov")
"""Names of the surrogates in losses.py."""
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs", "full")
"""Names of the KL estimators in kl.py; "full" is the sum over the vocabulary in model/logprobs.py."""
CHOICES: dict[str, tuple[str, ...]] = {
    "advantage": tuple(ESTIMATORS),
    "scale": SCALES,
    "ratio": RATIOS,
    "surrogate": SURROGATES,
    "aggregation": AGGREGATIONS,
    "kl": KL_ESTIMATORS,
    "kl_in": ("loss", "reward"),
    "filter": ("none", "spread"),
    "importance": ("auto", "none", "truncate", "mask", "ratio"),
    "importance_level": ("token", "sequence"),
    "truncated": ("keep", "mask", "drop"),
}
"""Cell -> the names that it may hold. Cells that are not here hold numbers or booleans."""


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Row of the table. Every field but the first two is a cell, which the recipe key `algo.<cell>` overrides.

    Args:
        name: name of the row.
        summary: one line for `vlmrl recipe list --algos`, with the source.
        advantage: key of advantages.ESTIMATORS.
        scale: one of advantages.SCALES; None = the estimator's own.
        gamma: discount of token returns (estimators "none", "greedy" and "gae").
        gae_lambda: lambda of the estimator "gae".
        value_coef: with a critic: weight of its loss.
        value_clip: with a critic: largest distance from its value before the first update at which its value counts.
        ratio: "token"; "sequence" (length-normalised ratio of the whole response); "sequence_token" (the value of
            "sequence", with each token's own gradient).
        surrogate: one of SURROGATES.
        clip_low, clip_high: the ratio counts within [1 - clip_low, 1 + clip_high]; None = no bound. For "gmpo" the
            bounds are on the log-ratio: [-clip_low, clip_high].
        dual_clip: with a negative advantage the loss is at most dual_clip * |advantage|; None = off.
        tau_positive, tau_negative: temperatures of "sapo", by the sign of the advantage.
        cov_share: share of the tokens that "clip_cov" or "kl_cov" picks.
        cov_low, cov_high: range of the covariances that "clip_cov" picks from.
        cov_kl_coef: weight of |log-ratio| on the tokens that "kl_cov" picked.
        aggregation: one of AGGREGATIONS.
        kl: one of KL_ESTIMATORS.
        kl_in: "loss" or "reward", where the KL is added.
        kl_coef: weight of the KL, 0 = off.
        kl_target: mean KL per token that the coefficient is steered to, in nats; None = the coefficient is fixed.
        kl_horizon: responses; the larger, the slower the coefficient is steered.
        filter: "spread": prompts whose scores differ by no more than `min_spread` are replaced by others, in at most
            `filter_tries` draws per step.
        importance: "truncate" or "mask": correct for the difference between the engine's log-probs and the trainer's,
            at `importance_level`, with the limit `importance_cap`. "ratio": the surrogate's ratio takes the engine's
            log-probs as its old ones, so that its bounds are around the policy that sampled. "auto": see
            `importance_of`.
        truncated: what happens to responses cut by the token limit: "keep", "mask" (count in baselines, no loss) or
            "drop" (count nowhere).
        truncated_score: score of a cut response; None = the reward's.
        overlong_tokens: length of DAPO's soft punishment before the token limit, in tokens; 0 = off.
        overlong_penalty: largest value of that punishment.
        count_dead: whether the responses of dead groups count in the denominator of the loss. They do by default, so
            that leaving them out of the forward pass changes no gradient. Groups that a filter refused never count.
    """

    name: str
    summary: str
    advantage: str = "group_mean_std"
    scale: str | None = None
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.1
    value_clip: float = 0.2
    ratio: str = "token"
    surrogate: str = "clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    cov_share: float = 2e-4
    cov_low: float = 1.0
    cov_high: float = 5.0
    cov_kl_coef: float = 1.0
    aggregation: str = "token_mean"
    kl: str = "k3"
    kl_in: str = "loss"
    kl_coef: float = 0.0
    kl_target: float | None = None
    kl_horizon: float = 10_000.0
    filter: str = "none"
    min_spread: float = 0.0
    filter_tries: int = 10
    importance: str = "auto"
    importance_level: str = "token"
    importance_cap: float = 2.0
    truncated: str = "keep"
    truncated_score: float | None = None
    overlong_tokens: int = 0
    overlong_penalty: float = 1.0
    count_dead: bool = True

    @property
    def needs_group(self) -> bool:
        """Whether the estimator compares the samples of a prompt, so that one sample is not enough."""
        return ESTIMATORS[self.advantage].needs_group

    @property
    def needs_critic(self) -> bool:
        """Whether the policy gets a value head, which predicts the score before every token."""
        return ESTIMATORS[self.advantage].critic

    @property
    def limits_ratio(self) -> bool:
        """Whether the surrogate bounds the effect of a token whose probability is far above the old one."""
        bounded = self.surrogate in ("clip", "clip_cov", "cispo", "gmpo") and self.clip_high is not None
        return bounded or self.surrogate == "sapo"

    def importance_of(self, *, own_engine: bool, filtered: bool, stale: bool) -> str:
        """Return the `importance` of a run, with "auto" resolved.

        "auto" is "none" when the trainer samples with its own weights or when sampling is filtered, and "truncate" when
        another engine samples with the same weights.

        With an engine whose weights are one step older it is "ratio": the bounds of PPO-like surrogates are meant to be
        around the policy that sampled. Around the trainer's weights they would let the policy drift away from it twice
        as far. It is "mask" instead where nothing bounds a token's ratio, or where the ratio is that of a whole
        response (its bounds are narrower than the difference between two engines): a token that is too unlikely under
        either policy then has no gradient.

        Args:
            own_engine: whether the trainer samples.
            filtered: whether sampling uses top-p or top-k.
            stale: whether older weights sample.
        Returns: "none", "truncate", "mask" or "ratio".
        """
        if self.importance != "auto":
            return self.importance
        if own_engine or filtered:
            return "none"
        if not stale:
            return "truncate"
        return "ratio" if self.limits_ratio and self.ratio == "token" else "mask"

    @property
    def counts_dead(self) -> bool:
        """Whether dead groups count in the denominator. With a filter they never do: it has refused them."""
        return self.count_dead and self.filter == "none"

    @property
    def selects(self) -> bool:
        """Whether the surrogate treats some tokens differently, which are picked from all tokens of an update."""
        return self.surrogate in ("clip_cov", "kl_cov")


CELLS = tuple(f.name for f in fields(Algorithm) if f.name not in ("name", "summary"))
"""Names of the cells, which a recipe may override, in the order of the fields."""
PPO: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
HIGHER: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm(name="grpo", **HIGHER,
                  summary="group mean and std, token mean, clip 0.2/0.28 (arXiv:2402.03300 with DAPO's aggregation)"),
        Algorithm(name="grpo_paper", **PPO, aggregation="sequence_mean",
                  summary="as published: clip 0.2/0.2, mean of each response first (arXiv:2402.03300 eq. 3)"),
        Algorithm(name="dr_grpo", advantage="group_mean", **PPO, aggregation="constant",
                  summary="no std, constant denominator: no bias towards lengths or difficulties (arXiv:2503.20783)"),
        Algorithm(name="dapo", **HIGHER, filter="spread",
                  summary="clip-higher 0.2/0.28, token mean, prompts of equal scores replaced by others "
                          "(arXiv:2503.14476; its length punishment: overlong_tokens)"),
        Algorithm(name="gdpo", advantage="part_by_part", **HIGHER,
                  summary="each reward part normalised on its own, then their sum over the batch (arXiv:2601.05242)"),
        Algorithm(name="gspo", ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean",
                  summary="one length-normalised ratio per response, clip 3e-4/4e-4 (arXiv:2507.18071)"),
        Algorithm(name="gspo_token", ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean",
                  summary="the response's ratio with each token's own gradient (arXiv:2507.18071 eq. 13)"),
        Algorithm(name="gmpo", surrogate="gmpo", clip_low=0.4, clip_high=0.4, aggregation="sequence_mean",
                  summary="geometric mean of the token ratios, each clipped to e^-0.4..e^0.4 (arXiv:2507.20673)"),
        Algorithm(name="cispo", surrogate="cispo", clip_high=4.0,
                  summary="clipped ratio as a constant weight of the gradient, at most 5 (arXiv:2506.13585 eq. 4-5)"),
        Algorithm(name="sapo", surrogate="sapo", aggregation="sequence_mean",
                  summary="a smooth gate instead of the clip, temperatures 1 and 1.05 (arXiv:2511.20347)"),
        Algorithm(name="clip_cov", surrogate="clip_cov", clip_low=1.0, clip_high=1.0, cov_share=2e-4,
                  summary="a few tokens of high covariance, picked at random, get no gradient (arXiv:2505.22617)"),
        Algorithm(name="kl_cov", surrogate="kl_cov", cov_share=2e-3,
                  summary="the tokens of highest covariance get a KL penalty, no clip (arXiv:2505.22617)"),
        Algorithm(name="rloo", advantage="leave_one_out",
                  summary="leave-one-out baseline, no clip (arXiv:2402.14740)"),
        Algorithm(name="opo", advantage="length_weighted",
                  summary="baseline weighted by length, no clip: meant for one update per step (arXiv:2505.23585)"),
        Algorithm(name="gpg", advantage="group_mean", scale="alive", surrogate="reinforce",
                  summary="plain policy gradient, scaled up by the share of dead samples (arXiv:2504.02546)"),
        Algorithm(name="pass_at_k", advantage="best_of_group", scale="group", **HIGHER,
                  summary="only the best sample of a group counts, by its lead over the second (arXiv:2503.19595)"),
        Algorithm(name="reinforce", advantage="none", surrogate="reinforce",
                  summary="score times log-prob, no baseline (Williams 1992; cf. arXiv:2402.14740)"),
        Algorithm(name="reinforce++", advantage="none", scale="tokens", **PPO, kl="k1", kl_in="reward",
                  summary="no group: returns normalised over the batch, clip 0.2 (arXiv:2501.03262)"),
        Algorithm(name="reinforce++-baseline", advantage="group_mean", scale="tokens", **PPO, kl="k2",
                  summary="score minus group mean, normalised over the batch (arXiv:2501.03262, with baseline)"),
        Algorithm(name="ppo", advantage="gae", scale="tokens", **PPO, kl="k1", kl_in="reward",
                  summary="a value head on the policy predicts the score before every token: GAE 1/0.95, clip "
                          "0.2, value loss 0.1 clipped at 0.2 (arXiv:1707.06347, 1506.02438; numbers of "
                          "1909.08593's code)"),
        Algorithm(name="remax", advantage="greedy", surrogate="reinforce", kl="k1", kl_in="reward",
                  summary="baseline = score of one greedy answer per prompt, not trained on (arXiv:2310.10505)"),
        Algorithm(name="easyr1", clip_low=0.2, clip_high=0.3, dual_clip=3.0, kl="low_var_kl", kl_coef=0.01,
                  summary="EasyR1 with TaxonRL's settings: clip 0.2/0.3, dual clip 3, KL 0.01 in the loss (cf. GRPO, "
                          "arXiv:2402.03300)"),
        Algorithm(name="maye", advantage="none", scale="tokens_keep_mean", **PPO, kl="k3", kl_coef=0.001,
                  truncated_score=-0.1,
                  summary="MAYE's Reinforce++: whitened returns with their mean added back, KL 0.001 in the loss, -0.1 "
                          "without an end token (arXiv:2504.02587)"),
    )
}  # fmt: skip


def resolve(name: str, **overrides: Any) -> Algorithm:
    """Return a row of the table with a recipe's overrides.

    Args:
        name: name of the row.
        overrides: cell -> value; None = the row's own value stays.
    Raises: RecipeError for an unknown name or value of a cell, with the known ones; TypeError for an unknown cell.
    """
    given = {cell: value for cell, value in overrides.items() if value is not None}
    if unknown := given.keys() - set(CELLS):
        raise TypeError(f"the algorithm table has no cell {', '.join(sorted(unknown))}")
    choices = {"name": name} | {cell: value for cell, value in given.items() if cell in CHOICES}
    for cell, value in choices.items():
        known = tuple(ALGORITHMS) if cell == "name" else CHOICES[cell]
        if value not in known:
            raise RecipeError(f"unknown algo.{cell} `{value}`", hint=f"known: {', '.join(known)}")
    return replace(ALGORITHMS[name], **given)


def algorithm_of(settings: Any) -> Algorithm:
    """Return the row of a recipe's `[algo]` table with its overrides.

    Args:
        settings: recipe.schema.Algo, or any object with its fields.
    """
    return resolve(settings.name, **{cell: getattr(settings, cell, None) for cell in CELLS})


def without_greedy(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm for use without greedy answers (saved rollouts, `vlmrl try`): it uses the group mean."""
    return replace(algorithm, advantage="group_mean") if algorithm.advantage == "greedy" else algorithm


def stand_in(algorithm: Algorithm) -> str:
    """Return what replaces the model where advantages are computed without one (saved rollouts, `vlmrl try`).

    Returns: a sentence for the user; "" = the advantages need no model.
    """
    if algorithm.advantage == "greedy":
        return "the group mean replaces the score of the greedy answer"
    if algorithm.needs_critic:
        return "an untrained critic, with the value 0 everywhere, replaces the policy's: advantages before any learning"
    return ""
