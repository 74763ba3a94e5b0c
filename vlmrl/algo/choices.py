"""Names that cells of the algorithm table may hold, each with a remark for users or its facts.

For a new name, add an entry here and its function in advantages.py, losses.py or divergence.py; tests compare the
names. Neither torch nor numpy.
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
    "vespo": Surrogate(("power_positive", "decay_positive", "power_negative", "decay_negative"), gate=True),
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
    "sequence_sum": "the mean over responses of the sum over their tokens",
    "constant": "the sum over responses x rollout.max_new_tokens",
}
"""Name of an aggregation in losses.py -> remark for users."""
KL_ESTIMATORS = {
    "k1": "",
    "k2": "",
    "k3": "",
    "low_var_kl": "k3, at most 10",
    "abs": "",
    "full": "exact: the sum over the vocabulary; keeps the reference's hidden states of a step in main memory",
}
"""Name of a KL estimator in kl.py -> remark for users. "full" is in algo/divergence.py."""
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


DEMONSTRATIONS = {
    "none": "",
    "mixed": "one of the responses that are compared, beside the samples of its prompt",
    "failed": "in place of the samples of a prompt that they do not solve",
    "beside": "with the samples, but not compared with them",
    "hint": "its beginning stands in front of the samples",
}
"""Place of the demonstrations in a step -> remark for users."""
DEMONSTRATION_LOSSES = {
    "shaped": "-advantage * p / (p + shaping), in one mean with the samples",
    "nll": "-log p, in a mean of its own",
    "unsure": "-p (1 - p) log p, in a mean of its own, with p (1 - p) as a constant",
    "both": "shaped, and exp(-H) nll, where H is the policy's mean entropy; see entropy_gain",
}
"""Loss of a demonstration's tokens of probability p -> remark for users."""
PERCEPTIONS = {
    "none": "",
    "loss": "the loss falls as the KL to the policy behind masked images grows",
    "select": "only the tokens that depend most on the images are trained on, and responses are weighed by this",
}
"""Use of a second pass behind masked images -> remark for users."""


TEACHING = {
    "none": "",
    "loss": "the divergence from it is a term of the loss",
    "reward": "log q - log p of each sampled token is added to its advantage",
}
"""Use of the teacher's distribution q, where p is the policy's -> remark for users."""
DIVERGENCES = {
    "reverse": "KL(p || q)",
    "forward": "KL(q || p)",
    "jsd": "generalised Jensen-Shannon divergence, see jsd_weight",
}
"""Divergence of the policy p from the teacher q (algo/divergence.py) -> remark for users."""
TEACHER_WEIGHTS = {
    "equal": "all tokens count the same",
    "visual": "more where the teacher needs the details of the images: see visual_share",
}
"""Weights of the tokens in the divergence from the teacher -> remark for users."""


@dataclass(frozen=True)
class Estimator:
    """Facts about an estimator of the advantage. Its baseline is a function in advantages.py.

    Args:
        scale: the default scale, one of `SCALES`.
        needs_group: whether the estimator compares the samples of a prompt, so that one sample is not enough.
        critic: whether the estimator uses the values of a critic; then no group is dead.
        energy: whether the estimator uses the squared size of each token's gradient by the logits.
    """

    scale: str = "none"
    needs_group: bool = True
    critic: bool = False
    energy: bool = False
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
    "zero": Estimator(needs_group=False, remark="the reward is measured and teaches nothing"),
    "gae": Estimator(needs_group=False, critic=True, remark="a critic"),
    "optimal_token": Estimator(energy=True, remark="a baseline for each token position, weighted by gradient sizes"),
}
