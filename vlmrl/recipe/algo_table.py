"""The table `[algo]` of a recipe. The string under a key is its help, as in schema.py."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vlmrl.recipe.table import (
    AboveOne,
    Count,
    Fraction,
    NotNegative,
    Number,
    Positive,
    PositiveFraction,
    PositiveInt,
    RecipeTable,
)


class Algo(RecipeTable):
    """The member of the GRPO family. `name` is a row of the table in algo/family.py; the other keys override cells."""

    name: str = "grpo"
    """Row of the family table: `vlmrl recipe list --algos`, which also says where rows differ from others' code."""
    advantage: str | None = None
    """Baseline of the advantage, overriding the row's: group_mean, group_mean_std, leave_one_out, length_weighted,
    best_of_group, part_by_part (each reward part on its own), greedy (one greedy answer a prompt), gae (a critic),
    none."""
    scale: str | None = None
    """What the advantage is divided by: none, group or batch (a standard deviation), alive (share of live samples),
    samples or tokens (centred and divided over the batch), tokens_keep_mean. Default: the row's."""
    gamma: PositiveFraction | None = None
    """Discount of the token returns, for the baselines none, greedy and gae; 1 = every token has the whole score."""
    gae_lambda: Fraction | None = None
    """How far gae trusts what came of a response over what the critic said: 0 = one token, 1 = to its end. Default
    0.95."""
    value_coef: NotNegative | None = None
    """Weight of the critic's loss (gae); default 0.1."""
    value_clip: Positive | None = None
    """How far a value may go from that before the updates and still learn (gae); default 0.2, large = no limit."""
    ratio: str | None = None
    """Level of the probability ratio: token, sequence, or sequence_token. Default: the row's."""
    surrogate: str | None = None
    """Form of the policy loss: clip, reinforce, cispo, gmpo, sapo, clip_cov or kl_cov. Default: the row's."""
    clip_low: Annotated[float, Field(ge=1e-9, lt=1)] | None = None
    """Lower clip of the probability ratio: the ratio counts down to 1 - clip_low."""
    clip_high: Positive | None = None
    """Upper clip of the probability ratio: the ratio counts up to 1 + clip_high."""
    dual_clip: AboveOne | None = None
    """With a negative advantage the loss is at most this times its size; 3 is usual. Default: the row's."""
    tau_positive: Positive | None = None
    """Temperature of the surrogate sapo for positive advantages; larger = narrower gate."""
    tau_negative: Positive | None = None
    """Temperature of the surrogate sapo for negative advantages."""
    cov_share: PositiveFraction | None = None
    """Share of an update's tokens that clip_cov or kl_cov picks (at least one token)."""
    cov_low: Number | None = None
    """Smallest covariance of log-prob and advantage from which clip_cov picks."""
    cov_high: Number | None = None
    """Largest covariance from which clip_cov picks."""
    cov_kl_coef: NotNegative | None = None
    """Weight of the penalty on the tokens that kl_cov picked."""
    aggregation: str | None = None
    """How token losses become one number: token_mean (all tokens count the same), sequence_mean (all responses do), or
    constant (the sum over responses x rollout.max_new_tokens). verl calls them token-mean, seq-mean-token-mean and
    seq-mean-token-sum-norm; TRL dapo, grpo and dr_grpo. Default: the row's."""
    kl: str | None = None
    """Estimator of the KL to the reference: k1, k2, k3, low_var_kl (k3, at most 10), abs, or full (exact: the sum over
    the vocabulary; keeps the reference's hidden states of a step in main memory). Default: the row's."""
    kl_in: Literal["loss", "reward"] | None = None
    """Where the KL goes: a term of the loss, or taken off the reward token by token. Default: the row's."""
    kl_coef: NotNegative | None = None
    """Weight of the KL; 0 = off, and no reference model is loaded. Default: the row's (0 but for easyr1 and maye)."""
    kl_target: Positive | None = None
    """Mean KL per token that kl_coef is steered to from step to step; left out = kl_coef is fixed."""
    kl_horizon: Positive | None = None
    """How slowly kl_coef is steered, in responses; default 10000."""
    entropy_coef: Number = 0.0
    """Weight of the entropy bonus; 0 = off."""
    filter: Literal["none", "spread"] | None = None
    """spread: prompts whose scores differ by no more than `min_spread` are replaced by newly drawn ones (DAPO)."""
    min_spread: NotNegative | None = None
    """Largest minus smallest score that a prompt must exceed to pass the filter; default 0."""
    filter_tries: PositiveInt | None = None
    """Most draws of prompts in one step under the filter; the step then takes what passed. Default 10."""
    importance: Literal["auto", "none", "truncate", "mask", "ratio"] | None = None
    """Correct for the engine's log-probs. truncate: weigh the loss by the trainer's probability over the engine's, up
    to a limit. mask: the same, and 0 for tokens that are off. ratio: take them for the old ones of the ratio, so that
    its clip is around the policy that sampled; without a dual clip of its own the row gets importance_cap. auto:
    truncate when the engine is not the trainer; with `rollout.overlap` ratio, or mask for rows without a clip or with a
    ratio of whole responses."""
    importance_level: Literal["token", "sequence"] | None = None
    """Whether the correction is by token or by the product over a response; default token."""
    importance_cap: AboveOne | None = None
    """Limit of the correction: truncate at this weight, mask outside [1 / cap, cap]. Default 2."""
    overlong_tokens: Count | None = None
    """Length before the token limit in which a response loses score, linearly up to `overlong_penalty` (DAPO);
    0 = off."""
    overlong_penalty: NotNegative | None = None
    """What a response at the token limit loses under `overlong_tokens`; default 1."""
    truncated_score: Number | None = None
    """Score of a response cut by the token limit, in place of the reward's; default: the row's (only maye has one)."""
    count_dead: bool | None = None
    """Whether the responses of groups of equal scores count in the denominator of the loss. They add nothing to it and
    never enter a forward pass; counted, the gradient is that of all responses, as in verl and TRL. false = the mean is
    over the others alone, so that a step weighs as much however many groups are left. Default: true."""
    truncated: Literal["keep", "mask", "drop"] = "keep"
    """Responses cut by the token limit: trained on (keep), scored but not trained on (mask), left out of the
    group (drop)."""
