"""Cells of the algorithm table: class `Algorithm`, each cell declared once with its facts, and the values it may have.

The recipe's table `[algo]`, its JSON Schema, the help of `vlmrl recipe explain`, the check for keys that do nothing,
and the rules for a resume are derived from these fields. A new key of `[algo]` is a new field of `Algorithm`. The
names that cells may hold are in choices.py. Neither torch nor numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from vlmrl.algo.cells import When, cell, cells_of
from vlmrl.algo.choices import (
    AGGREGATIONS,
    DEMONSTRATION_LOSSES,
    DEMONSTRATIONS,
    DIVERGENCES,
    ESTIMATORS,
    KL_ESTIMATORS,
    PERCEPTIONS,
    RATIOS,
    SCALES,
    SURROGATES,
    TEACHER_WEIGHTS,
    TEACHING,
    Surrogate,
)
from vlmrl.key_facts import (
    ABOVE_ONE,
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    NUMBER,
    PATCH,
    POSITIVE,
    POSITIVE_FRACTION,
    POSITIVE_INT,
    OnResume,
    Range,
)

KL = OnResume("asked", "the algorithm and the weight of its KL", ("kl",))


def _by_surrogate(
    cell: str, otherwise: str = "the surrogate of `{row}` is `{value}`", hint: str = ""
) -> tuple[When, ...]:
    """Return the condition of a cell that only some surrogates read: the surrogate is one of them."""
    return (When("surrogate", tuple(n for n, s in SURROGATES.items() if cell in s.reads), otherwise, hint),)


_WHOLE_SCORES = When(
    "advantage",
    tuple(name for name, e in ESTIMATORS.items() if not e.needs_group or e.energy),
    "the advantage `{value}` compares whole scores",
    "remove it, or use reinforce++, remax, ppo or otb",
)
_CRITIC = When(
    "advantage",
    tuple(name for name, e in ESTIMATORS.items() if e.critic),
    "the advantage `{value}` has no critic",
    'remove it, or set algo.name = "ppo"',
)
_KL = When("kl_coef", hint="set algo.kl_coef, such as 0.001")
_KL_TARGET = When("kl_target", otherwise="without `algo.kl_target` the coefficient is fixed")
_FILTER = When("filter", ("spread",))
_WITH_DEMONSTRATIONS = When("demonstrations", tuple(DEMONSTRATIONS)[1:], "`algo.demonstrations` is `none`", "remove it")
_HINT = When("demonstrations", ("hint",))
_TEACHER_LOSS = When("teacher", ("loss",))
_VISUAL = When("teacher_weights", ("visual",))
_OWN_MEAN = When("demonstration_loss", ("nll", "unsure", "both"))
_MASKED = When("perception", ("loss", "select"), "`algo.perception` is `none`", "remove it, or use papo or vppo")
_MASKED_LOSS, _SELECT = When("perception", ("loss",)), When("perception", ("select",))


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Row of the algorithm table. All fields but the first two are cells, which recipe keys `algo.<cell>` override.

    Args:
        summary: one line for `vlmrl recipe list --algos`, with the source.
    """

    name: str
    summary: str
    advantage: str = cell(
        "group_mean_std",
        "Estimator of the advantage, with its baseline.",
        open_list=True,
        choices={name: e.remark for name, e in ESTIMATORS.items()},
    )
    scale: str | None = cell(
        None, "Divisor of the advantage; left out = the default of the estimator.", choices=SCALES, open_list=True
    )
    gamma: float = cell(
        1.0,
        "Discount of the token returns; 1 = every token has the whole score.",
        range=POSITIVE_FRACTION,
        used_when=(_WHOLE_SCORES,),
        neutral=1.0,
    )
    gae_lambda: float = cell(
        0.95,
        "Lambda of gae: how far the rewards after a token count before the critic's prediction replaces them: 0 = for "
        "one token, 1 = to the end of the response.",
        range=FRACTION,
        used_when=(_CRITIC,),
    )
    value_coef: float = cell(0.1, "Weight of the critic's loss.", range=NOT_NEGATIVE, used_when=(_CRITIC,))
    value_clip: float = cell(
        0.2,
        "Limit of the change of a critic's value in a step. A value that has moved towards its target by more than "
        "this since before the first update gets no gradient; large = no limit.",
        range=POSITIVE,
        used_when=(_CRITIC,),
    )
    ratio: str = cell(
        "token",
        "Level of the probability ratio.",
        choices=RATIOS,
        open_list=True,
        used_when=_by_surrogate("ratio", "the surrogate `{value}` has no ratio to choose", "remove it"),
    )
    surrogate: str = cell("clip", "Form of the policy loss.", choices=tuple(SURROGATES), open_list=True)
    clip_low: float | None = cell(
        None,
        "Lower clip of the probability ratio: the ratio counts down to 1 - clip_low; with the surrogate gmpo the "
        "log-ratio counts down to -clip_low.",
        range=Range(ge=1e-9, lt=1),
        used_when=_by_surrogate("clip_low"),
    )
    clip_high: float | None = cell(
        None,
        "Upper clip of the probability ratio: the ratio counts up to 1 + clip_high; with the surrogate gmpo the "
        "log-ratio counts up to clip_high.",
        range=POSITIVE,
        used_when=_by_surrogate("clip_high"),
    )
    dual_clip: float | None = cell(
        None,
        "With a negative advantage the loss is at most this times the advantage's size; 3 is usual.",
        range=ABOVE_ONE,
        used_when=_by_surrogate("dual_clip"),
    )
    tau_positive: float = cell(
        1.0,
        "Temperature of the gate for positive advantages; larger = narrower gate.",
        range=POSITIVE,
        used_when=_by_surrogate("tau_positive"),
    )
    tau_negative: float = cell(
        1.05,
        "Temperature of the gate for negative advantages; larger = narrower gate.",
        range=POSITIVE,
        used_when=_by_surrogate("tau_negative"),
    )
    power_positive: float = cell(
        2.0,
        "Power k in the weight W^k exp(d (1 - W)) of a positive advantage, where W is the response's ratio.",
        range=NOT_NEGATIVE,
        used_when=_by_surrogate("power_positive"),
    )
    decay_positive: float = cell(
        3.0,
        "Decay d in the weight W^k exp(d (1 - W)) of a positive advantage; larger = faster beyond W = k / d.",
        range=POSITIVE,
        used_when=_by_surrogate("decay_positive"),
    )
    power_negative: float = cell(
        3.0,
        "Power k in the weight of a negative advantage; see power_positive.",
        range=NOT_NEGATIVE,
        used_when=_by_surrogate("power_negative"),
    )
    decay_negative: float = cell(
        2.0,
        "Decay d in the weight of a negative advantage; see decay_positive.",
        range=POSITIVE,
        used_when=_by_surrogate("decay_negative"),
    )
    cov_share: float = cell(
        2e-4,
        "Share of an update's tokens that the surrogate picks (at least one token).",
        range=POSITIVE_FRACTION,
        used_when=_by_surrogate("cov_share"),
    )
    cov_low: float = cell(
        1.0,
        "Smallest covariance of log-prob and advantage from which tokens are picked.",
        range=NUMBER,
        used_when=_by_surrogate("cov_low"),
    )
    cov_high: float = cell(
        5.0,
        "Largest covariance of log-prob and advantage from which tokens are picked.",
        range=NUMBER,
        used_when=_by_surrogate("cov_high"),
    )
    cov_kl_coef: float = cell(
        1.0,
        "Weight of the penalty, |log-ratio|, on the tokens that were picked.",
        range=NOT_NEGATIVE,
        used_when=_by_surrogate("cov_kl_coef"),
    )
    aggregation: str = cell(
        "token_mean",
        "Reduction of the token losses to one number. verl calls token_mean, sequence_mean, sequence_sum and constant "
        "token-mean, seq-mean-token-mean, seq-mean-token-sum and seq-mean-token-sum-norm; TRL dapo, grpo, luspo and "
        "dr_grpo.",
        choices=AGGREGATIONS,
        open_list=True,
    )
    kl: str = cell(
        "k3",
        "Estimator of the KL to the reference.",
        choices=KL_ESTIMATORS,
        open_list=True,
        used_when=(_KL,),
        on_resume=KL,
    )
    kl_in: str = cell(
        "loss",
        "Where the KL goes: a term of the loss, or taken off the reward token by token.",
        choices=("loss", "reward"),
        used_when=(_KL,),
        on_resume=KL,
    )
    kl_coef: float = cell(
        0.0, "Weight of the KL; 0 = off, and no reference model is loaded.", range=NOT_NEGATIVE, on_resume=KL
    )
    kl_target: float | None = cell(
        None,
        "Mean KL per token, in nats, that kl_coef is steered to from step to step; left out = kl_coef is fixed.",
        range=POSITIVE,
        used_when=(_KL,),
        on_resume=KL,
    )
    kl_horizon: float = cell(
        10_000.0,
        "How slowly kl_coef is steered, in responses: the larger, the slower.",
        range=POSITIVE,
        used_when=(_KL, _KL_TARGET),
    )
    entropy_coef: float = cell(0.0, "Weight of the entropy bonus; 0 = off.", range=NUMBER, of_row=False)
    filter: str = cell(
        "none",
        "spread: prompts whose scores differ by no more than `min_spread` are replaced by newly drawn ones (DAPO).",
        choices=("none", "spread"),
    )
    min_spread: float = cell(
        0.0,
        "Largest minus smallest score that a prompt must exceed to pass the filter.",
        range=NOT_NEGATIVE,
        used_when=(_FILTER,),
    )
    filter_tries: int = cell(
        10,
        "Maximum number of draws of prompts in one step under the filter; the step then takes the prompts that passed.",
        range=POSITIVE_INT,
        used_when=(_FILTER,),
    )
    importance: str = cell(
        "auto",
        "Correction for the difference between the engine's and the trainer's log-probs. none: no correction. "
        "truncate: the loss of a token is multiplied by the trainer's probability over the engine's, at most "
        "importance_cap. mask: the same, but 0 outside [1 / importance_cap, importance_cap]. ratio: the engine's "
        "log-probs become the old log-probs of the probability ratio, so that its clip is around the policy that "
        "sampled; if dual_clip is left out, it is then importance_cap. auto: none if the trainer itself generates or "
        "with top_p or top_k; truncate with another engine; with `rollout.overlap` ratio, or mask for rows without a "
        "clip or with a ratio of whole responses.",
        choices=("auto", "none", "truncate", "mask", "ratio"),
    )
    importance_level: str = cell(
        "token",
        "Level of the correction. token: each token has its own weight. sequence: the product over the response.",
        choices=("token", "sequence"),
        used_when=(When("importance", ("auto", "truncate", "mask"), hint="remove it"),),
    )
    importance_cap: float = cell(
        2.0,
        "Limit of the correction: truncate at this weight, mask outside [1 / cap, cap].",
        range=ABOVE_ONE,
        used_when=(When("importance", ("auto", "truncate", "mask", "ratio"), hint="remove it"),),
    )
    overlong_tokens: int = cell(
        0,
        "Number of tokens before the token limit. A response that ends in this range loses score, linearly up to "
        "`overlong_penalty` at the limit (DAPO); 0 = off.",
        range=COUNT,
    )
    overlong_penalty: float = cell(
        1.0,
        "Score that a response at the token limit loses under `overlong_tokens`.",
        range=NOT_NEGATIVE,
        used_when=(When("overlong_tokens"),),
    )
    truncated_score: float | None = cell(
        None, "Score of a response cut by the token limit, in place of the reward's.", range=NUMBER
    )
    count_dead: bool = cell(
        True,
        "Whether the responses of groups of equal scores count in the denominator of the loss. They add nothing "
        "to it and never enter a forward pass; counted, the gradient is that of all responses, as in verl and TRL. "
        "false = the mean is over the others alone, so that a step weighs as much however many groups are left. "
        "Groups that a filter refused never count.",
    )
    truncated: str = cell(
        "keep",
        "Responses cut by the token limit: trained on (keep), scored but not trained on (mask), left out of "
        "the group (drop).",
        choices=("keep", "mask", "drop"),
        of_row=False,
    )

    demonstrations: str = cell(
        "none",
        "Place of the demonstrations (`data.demonstrations`) in a step. A prompt without one is trained as usual.",
        choices=DEMONSTRATIONS,
    )
    demonstration_loss: str = cell(
        "nll",
        "Loss of the tokens of a demonstration.",
        choices=DEMONSTRATION_LOSSES,
        used_when=(_WITH_DEMONSTRATIONS,),
    )
    demonstration_coef: float = cell(
        1.0,
        "Weight of the loss of demonstrations that has a mean of its own; with mu_peak, mu takes its place.",
        range=NOT_NEGATIVE,
        used_when=(_WITH_DEMONSTRATIONS, _OWN_MEAN),
    )
    shaping: float = cell(
        0.1,
        "Number in p / (p + shaping): the smaller, the more it pays to learn an unlikely token.",
        range=POSITIVE,
        used_when=(_WITH_DEMONSTRATIONS, When("demonstration_loss", ("shaped", "both"))),
    )
    entropy_gain: float = cell(
        0.1,
        "With demonstration_loss both, a sample that solves its prompt has the advantage entropy_gain * exp(H), any "
        "other -1.",
        range=POSITIVE,
        used_when=(_WITH_DEMONSTRATIONS, When("demonstration_loss", ("both",))),
    )
    most_solved: int = cell(
        0,
        "Number of samples up to which a prompt counts as not solved.",
        range=COUNT,
        used_when=(When("demonstrations", ("failed",)),),
    )
    mu_peak: float = cell(
        0.0,
        "Largest mu: the loss is (1 - mu) times that of the samples plus mu times that of the demonstrations; 0 = "
        "demonstration_coef is fixed, and samples count in full.",
        range=FRACTION,
        used_when=(_WITH_DEMONSTRATIONS, _OWN_MEAN),
    )
    mu_valley: float = cell(
        0.02, "mu at the end of its way.", range=FRACTION, used_when=(_WITH_DEMONSTRATIONS, When("mu_peak"))
    )
    mu_warmup: int = cell(
        200, "Steps in which mu grows from 0.", range=COUNT, used_when=(_WITH_DEMONSTRATIONS, When("mu_peak"))
    )
    mu_decay: int = cell(
        400,
        "Steps after them in which mu falls to mu_valley, as half a cosine.",
        range=COUNT,
        used_when=(_WITH_DEMONSTRATIONS, When("mu_peak")),
    )
    hint_most: float = cell(
        1.0, "Largest share of a demonstration that is a hint, at step 0.", range=POSITIVE_FRACTION, used_when=(_HINT,)
    )
    hint_steps: int = cell(
        100, "Steps in which that share falls to 0, as half a cosine.", range=POSITIVE_INT, used_when=(_HINT,)
    )

    perception: str = cell(
        "none",
        "Use of how much the tokens of a response depend on the images: the KL (k3, at most 10 nats) of a token to the "
        "policy behind the same images with random black patches.",
        choices=PERCEPTIONS,
    )
    perception_coef: float = cell(
        0.01, "Weight of that KL, which is taken off the loss.", range=NOT_NEGATIVE, used_when=(_MASKED_LOSS,)
    )
    perception_gradient: str = cell(
        "policy",
        "Passes that get a gradient. policy: the one behind the images; the other one is made once, before the updates "
        "of a step. both: the one behind masked images too, with the current weights.",
        choices=("policy", "both"),
        used_when=(_MASKED_LOSS,),
    )
    perception_entropy: float = cell(
        0.0,
        "Weight of an entropy penalty, which is added to the loss. With perception_gradient both it is the entropy of "
        "both passes, else -log p of the policy's own tokens.",
        range=NOT_NEGATIVE,
        used_when=(_MASKED,),
    )
    perception_share: float = cell(
        0.2,
        "Share of the tokens of a response that are trained on (rounded up).",
        range=POSITIVE_FRACTION,
        used_when=(_SELECT,),
    )
    perception_floor: float = cell(
        0.9,
        "Weight of the response of an update that depends least on the images; their mean weight is 1.",
        range=POSITIVE_FRACTION,
        used_when=(_SELECT,),
    )
    mask_share: float = cell(0.6, "Probability of a patch to be black.", range=FRACTION, used_when=(_MASKED,))
    mask_patch: int = cell(
        14,
        "Side of a patch in pixels of the stored image. Where the model sees an image smaller, so are the patches.",
        range=PATCH,
        used_when=(_MASKED,),
    )

    teacher: str = cell(
        "none", "What the policy learns from the teacher (`[teacher]`), beside its reward.", choices=TEACHING
    )
    teacher_coef: float = cell(
        1.0, "Weight of what is learned from it.", range=NOT_NEGATIVE, used_when=(When("teacher", ("loss", "reward")),)
    )
    divergence: str = cell("reverse", "Divergence from the teacher.", choices=DIVERGENCES, used_when=(_TEACHER_LOSS,))
    jsd_weight: float = cell(
        0.5,
        "Weight w of jsd, w KL(q || m) + (1 - w) KL(p || m) with m = w q + (1 - w) p. Its ends are the two KLs.",
        range=Range(gt=0, lt=1),
        used_when=(_TEACHER_LOSS, When("divergence", ("jsd",))),
    )
    teacher_top_k: int = cell(
        0,
        "Number of the teacher's most likely tokens that are compared one by one; all others count as one. 0 = the "
        "whole vocabulary, one by one.",
        range=COUNT,
        used_when=(_TEACHER_LOSS,),
    )

    teacher_weights: str = cell(
        "equal",
        "Weights of the tokens in the divergence from the teacher.",
        choices=TEACHER_WEIGHTS,
        used_when=(_TEACHER_LOSS,),
    )
    visual_share: float = cell(
        0.2,
        "Share of a response's tokens that count as visual: those that lose most of their probability under the "
        "teacher when the images lose their details.",
        range=POSITIVE_FRACTION,
        used_when=(_TEACHER_LOSS, _VISUAL),
    )
    visual_weight: float = cell(
        0.5,
        "Weight of the visual tokens of a response together; the others have the rest.",
        range=FRACTION,
        used_when=(_TEACHER_LOSS, _VISUAL),
    )
    visual_temperature: float = cell(
        1.0,
        "Temperature of the weights of a prompt's responses: the higher, the more equal.",
        range=POSITIVE,
        used_when=(_TEACHER_LOSS, _VISUAL),
    )
    image_scale: float = cell(
        0.1,
        "Scale at which images lose their details, in width and height.",
        range=POSITIVE_FRACTION,
        used_when=(_TEACHER_LOSS, _VISUAL),
    )

    @cached_property
    def masks(self) -> bool:
        """Return whether responses are read behind masked images, too."""
        return self.perception != "none"

    @cached_property
    def masks_both(self) -> bool:
        """Return whether the pass behind masked images gets a gradient."""
        return self.perception == "loss" and self.perception_gradient == "both"

    @cached_property
    def perceives_all(self) -> bool:
        """Return whether the perception terms of the loss act on groups of equal scores, too."""
        penalty = self.masks and self.perception_entropy > 0
        return penalty or (self.perception == "loss" and self.perception_coef > 0)

    @cached_property
    def one_mean(self) -> bool:
        """Return whether tokens of demonstrations are in one mean with those of the samples."""
        return self.demonstration_loss in ("shaped", "both")

    @cached_property
    def weighs_by_entropy(self) -> bool:
        """Return whether losses are weighed by the policy's mean entropy, and samples have the advantage +1 or -1."""
        return self.demonstrations != "none" and self.demonstration_loss == "both"

    def mu_at(self, step: int) -> float | None:
        """Return mu at a step: linear from 0 to its peak, then half a cosine to its valley; None = there is no mu.

        Source: CHORD, arXiv:2508.11408.
        Example: peak 0.5, valley 0.1, warmup 2, decay 2 -> 0, 0.25, 0.5, 0.3, 0.1, 0.1 ...
        """
        if self.demonstrations == "none" or not self.mu_peak:
            return None
        if step < self.mu_warmup:
            return self.mu_peak * step / self.mu_warmup
        share = min(1.0, (step - self.mu_warmup) / self.mu_decay) if self.mu_decay else 1.0
        return self.mu_valley + (self.mu_peak - self.mu_valley) * 0.5 * (1.0 + math.cos(math.pi * share))

    def hint_share_at(self, step: int) -> float:
        """Return the largest share of a demonstration that is a hint at a step; 0 from `hint_steps` on.

        Source: UFT, arXiv:2505.16984.
        Example: most 1, steps 100 -> 1, 0.5 and 0 at the steps 0, 50 and 100.
        """
        share = min(1.0, step / self.hint_steps)
        return self.hint_most * 0.5 * (1.0 + math.cos(math.pi * share))

    @cached_property
    def needs_group(self) -> bool:
        """Return whether the estimator compares the samples of a prompt, so that one sample is not enough."""
        return ESTIMATORS[self.advantage].needs_group

    @cached_property
    def needs_critic(self) -> bool:
        """Return whether the policy gets a value head, which predicts the score before every token."""
        return ESTIMATORS[self.advantage].critic

    @cached_property
    def needs_energy(self) -> bool:
        """Return whether the estimator uses the squared size of each token's gradient, from a pass of the policy."""
        return ESTIMATORS[self.advantage].energy

    @cached_property
    def joins_tokens(self) -> bool:
        """Return whether the surrogate weighs each token by what all tokens of its response have."""
        return self.surrogate in ("gmpo", "vespo")

    @cached_property
    def limits_ratio(self) -> bool:
        """Return whether the surrogate bounds the effect of a token whose probability is far above the old one."""
        facts = SURROGATES.get(self.surrogate, Surrogate())
        return facts.gate or ("clip_high" in facts.reads and self.clip_high is not None)

    def importance_of(self, *, own_engine: bool, filtered: bool, stale: bool) -> str:
        """Return the `importance` of a run, with "auto" resolved.

        "auto" is "none" when the trainer samples with its own weights or when sampling is filtered, and "truncate" when
        another engine samples with the same weights.

        With an engine whose weights are one step older, "auto" is "ratio": the bounds of PPO-like surrogates are meant
        to be around the policy that sampled. Bounds around the trainer's weights would allow the policy to move twice
        as far away from it. "auto" is "mask" instead if nothing bounds a token's ratio, or if the ratio is that of a
        whole response (its bounds are narrower than the usual difference between two engines). With "mask", a token has
        no gradient if it is much less likely under one of the two policies than under the other.

        Args:
            own_engine: whether the trainer samples with its own weights.
            filtered: whether sampling uses top-p or top-k.
            stale: whether the engine samples with weights that are older than the trainer's.
        Returns: "none", "truncate", "mask" or "ratio".
        """
        if self.importance != "auto":
            return self.importance
        if own_engine or filtered:
            return "none"
        if not stale:
            return "truncate"
        return "ratio" if self.limits_ratio and self.ratio == "token" else "mask"

    @cached_property
    def counts_dead(self) -> bool:
        """Return whether dead groups count in the denominator. After a filter they never do: it has removed them."""
        return self.count_dead and self.filter == "none"

    @cached_property
    def selects(self) -> bool:
        """Return whether the surrogate treats some tokens differently, picked from all tokens of an update."""
        return SURROGATES[self.surrogate].selects


CELLS = {each.name: each for each in cells_of(Algorithm)}
"""Name -> cell, in the order of the fields. A recipe may override each cell."""
CHOICES = {name: tuple(each.choices) for name, each in CELLS.items() if each.choices}
"""Name of a cell -> its possible values. Only for cells with names as values, not numbers or booleans."""
