"""Names that the cells of the algorithm table may hold, with the facts about them. No torch, no numpy.

The functions are in advantages.py (estimators, scales), losses.py (surrogates, ratios), aggregate.py and kl.py, which
need numpy or torch; tests compare the names. A new surrogate or estimator is an entry here and its function there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Surrogate:
    """Facts about a surrogate of losses.py.

    Args:
        reads: the cells that it reads. Cells that apply to the loss of every surrogate, such as `aggregation`, are not
            listed. If a recipe sets one of these cells for a surrogate that does not read it, it gets a warning.
        gate: whether it limits the effect of every token without a clip.
        selects: whether it treats some tokens differently, which are picked from all tokens of an update.
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
"""The surrogates of losses.py, which must not be imported here: it needs torch. A test compares names and cells."""
RATIOS = {
    "token": "",
    "sequence": "length-normalised ratio of the whole response",
    "sequence_token": "the value of sequence, with each token's own gradient",
}
"""Levels of the probability ratio in losses.py -> remark."""
AGGREGATIONS = {
    "token_mean": "all tokens count the same",
    "sequence_mean": "all responses count the same",
    "constant": "the sum over responses x rollout.max_new_tokens",
}
"""Names of the aggregations in aggregate.py -> remark."""
KL_ESTIMATORS = {
    "k1": "",
    "k2": "",
    "k3": "",
    "low_var_kl": "k3, at most 10",
    "abs": "",
    "full": "exact: the sum over the vocabulary; keeps the reference's hidden states of a step in main memory",
}
"""Names of the KL estimators in kl.py -> remark; "full" is in model/logprobs.py."""
SCALES = {
    "none": "",
    "group": "standard deviation of the group's scores",
    "batch": "standard deviation of all scores",
    "alive": "share of live samples",
    "samples": "centred and divided over all samples",
    "tokens": "centred and divided over all tokens",
    "tokens_keep_mean": "as tokens, with the mean added back",
}
"""Names of the scales that advantages are divided by -> remark for users; see `_scaled`."""
CRITIC_SCALES = ("none", "tokens", "tokens_keep_mean")
"""Scales that a critic may have. The others divide by a spread of scores, which can be 0 while advantages are not."""


@dataclass(frozen=True)
class Estimator:
    """Facts about an estimator of the advantage, whose baseline is in advantages.py.

    Args:
        scale: the default scale, one of `SCALES`.
        needs_group: whether it compares the samples of a prompt, so that one sample is not enough.
        critic: whether it uses the values of a critic; no group is dead then.
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
