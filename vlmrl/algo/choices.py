"""Names that are possible values of cells of the algorithm table, with facts about them. No torch, no numpy.

The functions with these names are in advantages.py (estimators, scales), losses.py (surrogates, ratios), aggregate.py
and kl.py, which need numpy or torch. Tests compare the names. For a new surrogate or estimator, add an entry here and a
function there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Surrogate:
    """Facts about a surrogate of losses.py.

    Args:
        reads: the cells that the surrogate reads. A recipe that sets such a cell gets a warning if its own surrogate
            does not read it. Cells that apply to every surrogate, such as `aggregation`, are not listed.
        gate: whether the surrogate limits the effect of every token by a smooth function instead of a clip.
        selects: whether the surrogate picks tokens from all tokens of an update and treats them differently.
    """

    reads: tuple[str, ...] = ()
    gate: bool = False
    selects: bool = False


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(("ratio", "clip_low", "clip_high", "dual_clip")),
    "reinforce": Surrogate(),
    "cispo": Surrogate(("ratio", "clip_low", "clip_high")),
    "gmpo": Surrogate(("clip_low", "clip_high")),
    "sapo": Surrogate(("ratio", "tau_positive", "tau_negative"), gate=True),
    "clip_cov": Surrogate(
        ("ratio", "clip_low", "clip_high", "dual_clip", "cov_share", "cov_low", "cov_high"), selects=True
    ),
    "kl_cov": Surrogate(("ratio", "cov_share", "cov_kl_coef"), selects=True),
}
"""Name of a surrogate in losses.py -> facts. losses.py is not imported, because it needs torch; a test compares the
two."""
RATIOS = {
    "token": "",
    "sequence": "length-normalised ratio of the whole response",
    "sequence_token": "the value of sequence, with each token's own gradient",
}
"""Level of the probability ratio in losses.py -> remark for users."""
AGGREGATIONS = {
    "token_mean": "all tokens count the same",
    "sequence_mean": "all responses count the same",
    "constant": "the sum over responses x rollout.max_new_tokens",
}
"""Name of an aggregation in aggregate.py -> remark for users."""
KL_ESTIMATORS = {
    "k1": "",
    "k2": "",
    "k3": "",
    "low_var_kl": "k3, at most 10",
    "abs": "",
    "full": "exact: the sum over the vocabulary; keeps the reference's hidden states of a step in main memory",
}
"""Name of a KL estimator in kl.py -> remark for users. The estimator "full" is in model/logprobs.py."""
SCALES = {
    "none": "",
    "group": "standard deviation of the group's scores",
    "batch": "standard deviation of all scores",
    "alive": "share of live samples",
    "samples": "centred and divided over all samples",
    "tokens": "centred and divided over all tokens",
    "tokens_keep_mean": "as tokens, with the mean added back",
}
"""Name of a scale, a divisor of the advantages -> remark for users. advantages.py computes it (`_scaled`)."""
CRITIC_SCALES = ("none", "tokens", "tokens_keep_mean")
"""Scales that may be used with a critic. Others divide by the spread of scores, which can be 0 although advantages are
not 0."""


@dataclass(frozen=True)
class Estimator:
    """Facts about an estimator of the advantage. Its baseline is a function in advantages.py.

    Args:
        scale: the default scale, one of `SCALES`.
        needs_group: whether the estimator compares the samples of a prompt, so that one sample is not enough.
        critic: whether the estimator uses the values of a critic; then no group is dead.
        remark: a few words for users.
    """

    scale: str = "none"
    needs_group: bool = True
    critic: bool = False
    remark: str = ""


ESTIMATORS: dict[str, Estimator] = {
    "group_mean": Estimator(),
    "group_mean_std": Estimator("group"),
    "leave_one_out": Estimator(),
    "length_weighted": Estimator(),
    "best_of_group": Estimator(),
    "part_by_part": Estimator("samples", remark="each reward part on its own"),
    "greedy": Estimator(needs_group=False, remark="score of one greedy answer per prompt"),
    "none": Estimator(needs_group=False),
    "gae": Estimator(needs_group=False, critic=True, remark="a critic"),
}
