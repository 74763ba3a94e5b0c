"""Rows of the algorithm table, the GRPO family: one row = one algorithm, one cell = one choice. No torch.

A recipe selects a row (`algo.name`) and may override single cells. A new algorithm is a new row. If one of its cells
needs a value that does not exist yet, see algo_keys.py. At the end are the intended differences between a row and
algorithms of the same name in other libraries. There are no others: tests/golden/test_equal_to_verl.py and
test_equal_to_trl.py compare values and gradients of all rows with verl's and TRL's functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from vlmrl.algo.algo_keys import CELLS, CHOICES, Algorithm
from vlmrl.algo.choices import ESTIMATORS
from vlmrl.errors import unknown

PPO: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.2}
HIGHER: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.28}
PERCEPTION: dict[str, Any] = {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 3.0, "perception_entropy": 0.03}

ALGORITHMS: dict[str, Algorithm] = {
    a.name: a
    for a in (
        Algorithm(
            name="grpo",
            **HIGHER,
            summary="group mean and std, token mean, clip 0.2/0.28 (arXiv:2402.03300 with DAPO's aggregation)",
        ),
        Algorithm(
            name="grpo_paper",
            **PPO,
            aggregation="sequence_mean",
            summary="as published: clip 0.2/0.2, mean of each response first (arXiv:2402.03300 eq. 3)",
        ),
        Algorithm(
            name="dr_grpo",
            advantage="group_mean",
            **PPO,
            aggregation="constant",
            summary="no std, constant denominator: no bias towards lengths or difficulties (arXiv:2503.20783)",
        ),
        Algorithm(
            name="dapo",
            **HIGHER,
            filter="spread",
            summary="clip-higher 0.2/0.28, token mean, prompts of equal scores replaced by others "
            "(arXiv:2503.14476; its length punishment: overlong_tokens)",
        ),
        Algorithm(
            name="gdpo",
            advantage="part_by_part",
            **HIGHER,
            summary="each reward part normalised on its own, then their sum over the batch (arXiv:2601.05242)",
        ),
        Algorithm(
            name="gspo",
            ratio="sequence",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence_mean",
            summary="one length-normalised ratio per response, clip 3e-4/4e-4 (arXiv:2507.18071)",
        ),
        Algorithm(
            name="gspo_token",
            ratio="sequence_token",
            clip_low=3e-4,
            clip_high=4e-4,
            aggregation="sequence_mean",
            summary="the response's ratio with each token's own gradient (arXiv:2507.18071 eq. 13)",
        ),
        Algorithm(
            name="luspo",
            ratio="sequence",
            clip_low=2e-3,
            clip_high=2.5e-3,
            aggregation="sequence_sum",
            summary="GSPO with each response's loss times its length, clip 2e-3/2.5e-3 (arXiv:2602.05261)",
        ),
        Algorithm(
            name="gmpo",
            surrogate="gmpo",
            clip_low=0.4,
            clip_high=0.4,
            aggregation="sequence_mean",
            summary="geometric mean of the token ratios, each clipped to e^-0.4..e^0.4 (arXiv:2507.20673)",
        ),
        Algorithm(
            name="cispo",
            surrogate="cispo",
            clip_high=4.0,
            summary="clipped ratio as a constant weight of the gradient, at most 5 (arXiv:2506.13585 eq. 4-5)",
        ),
        Algorithm(
            name="sapo",
            surrogate="sapo",
            aggregation="sequence_mean",
            summary="a smooth gate instead of the clip, temperatures 1 and 1.05 (arXiv:2511.20347)",
        ),
        Algorithm(
            name="vespo",
            surrogate="vespo",
            summary="a smooth weight of the whole response's ratio, neither clipped nor divided by the length "
            "(arXiv:2602.10693)",
        ),
        Algorithm(
            name="clip_cov",
            surrogate="clip_cov",
            clip_low=1.0,
            clip_high=1.0,
            cov_share=2e-4,
            summary="a few tokens of high covariance, picked at random, get no gradient (arXiv:2505.22617)",
        ),
        Algorithm(
            name="kl_cov",
            surrogate="kl_cov",
            cov_share=2e-3,
            summary="the tokens of highest covariance get a KL penalty, no clip (arXiv:2505.22617)",
        ),
        Algorithm(name="rloo", advantage="leave_one_out", summary="leave-one-out baseline, no clip (arXiv:2402.14740)"),
        Algorithm(
            name="opo",
            advantage="length_weighted",
            summary="baseline weighted by length, no clip: meant for one update per step (arXiv:2505.23585)",
        ),
        Algorithm(
            name="otb",
            advantage="optimal_token",
            **PPO,
            summary="a baseline for each token position, weighted by gradient sizes, clip 0.2 (arXiv:2602.07078)",
        ),
        Algorithm(
            name="gpg",
            advantage="group_mean",
            scale="alive",
            surrogate="reinforce",
            summary="plain policy gradient, scaled up by the share of dead samples (arXiv:2504.02546)",
        ),
        Algorithm(
            name="pass_at_k",
            advantage="best_of_group",
            scale="group",
            **HIGHER,
            summary="only the best sample of a group counts, by its lead over the second (arXiv:2503.19595)",
        ),
        Algorithm(
            name="reinforce",
            advantage="none",
            surrogate="reinforce",
            summary="score times log-prob, no baseline (Williams 1992; cf. arXiv:2402.14740)",
        ),
        Algorithm(
            name="reinforce++",
            advantage="none",
            scale="tokens",
            **PPO,
            kl="k1",
            kl_in="reward",
            summary="no group: returns normalised over the batch, clip 0.2 (arXiv:2501.03262)",
        ),
        Algorithm(
            name="reinforce++-baseline",
            advantage="group_mean",
            scale="tokens",
            **PPO,
            kl="k2",
            summary="score minus group mean, normalised over the batch (arXiv:2501.03262, with baseline)",
        ),
        Algorithm(
            name="ppo",
            advantage="gae",
            scale="tokens",
            **PPO,
            kl="k1",
            kl_in="reward",
            summary="a value head on the policy predicts the score before every token: GAE 1/0.95, clip "
            "0.2, value loss 0.1 clipped at 0.2 (arXiv:1707.06347, 1506.02438; numbers of "
            "1909.08593's code)",
        ),
        Algorithm(
            name="remax",
            advantage="greedy",
            surrogate="reinforce",
            kl="k1",
            kl_in="reward",
            summary="baseline = score of one greedy answer per prompt, not trained on (arXiv:2310.10505)",
        ),
        Algorithm(
            name="luffy",
            advantage="group_mean",
            aggregation="constant",
            demonstrations="mixed",
            demonstration_loss="shaped",
            summary="a demonstration among the samples, shaped by p / (p + 0.1), no clip (arXiv:2504.14945)",
        ),
        Algorithm(
            name="srft",
            advantage="group_mean",
            surrogate="reinforce",
            demonstrations="mixed",
            demonstration_loss="both",
            demonstration_coef=0.5,
            summary="one stage of both: demonstrations and samples, weighed by the policy's entropy (arXiv:2506.19767)",
        ),
        Algorithm(
            name="hpt",
            advantage="group_mean",
            aggregation="constant",
            demonstrations="failed",
            demonstration_coef=0.05,
            summary="where no sample is right, supervised learning takes the place of RL (arXiv:2509.04419)",
        ),
        Algorithm(
            name="uft",
            advantage="group_mean",
            aggregation="constant",
            demonstrations="hint",
            summary="samples begin with a hint, which is learned; it gets shorter to nothing (arXiv:2505.16984)",
        ),
        Algorithm(
            name="chord",
            **PPO,
            demonstrations="beside",
            demonstration_loss="unsure",
            mu_peak=0.5,
            summary="(1 - mu) GRPO + mu SFT on unsure tokens, mu from 0 to 0.5 and down to 0.02 (arXiv:2508.11408)",
        ),
        Algorithm(
            name="papo",
            **PERCEPTION,
            perception="loss",
            perception_gradient="both",
            summary="the KL to the policy behind masked images is raised, with both gradients (arXiv:2507.06448)",
        ),
        Algorithm(
            name="papo_published",
            **PERCEPTION,
            perception="loss",
            summary="PAPO as its code runs it: no gradient through the masked images (arXiv:2507.06448)",
        ),
        Algorithm(
            name="vppo",
            **HIGHER,
            dual_clip=3.0,
            filter="spread",
            perception="select",
            perception_entropy=0.06,
            mask_share=0.5,
            summary="the 20% of the tokens that depend most on the images are trained on (arXiv:2510.09285)",
        ),
        Algorithm(
            name="opd",
            advantage="zero",
            surrogate="reinforce",
            teacher="loss",
            summary="on-policy distillation: KL(policy || teacher) on the policy's responses (arXiv:2306.13649)",
        ),
        Algorithm(
            name="opd_reward",
            advantage="zero",
            teacher="reward",
            summary="the same by sampled tokens alone: their log-ratio to the teacher is the advantage "
            "(arXiv:2306.08543)",
        ),
        Algorithm(
            name="va_opd",
            advantage="zero",
            surrogate="reinforce",
            aggregation="sequence_mean",
            teacher="loss",
            teacher_weights="visual",
            summary="opd with more weight on tokens and responses for which the teacher needs the images' details "
            "(arXiv:2605.21924)",
        ),
        Algorithm(
            name="opsd",
            advantage="zero",
            surrogate="reinforce",
            teacher="loss",
            divergence="jsd",
            summary="self-distillation: the teacher is the start of the run and reads more (`teacher.reveal`), half "
            "forward, half reverse (cf. arXiv:2601.18734)",
        ),
        Algorithm(
            name="easyr1",
            clip_low=0.2,
            clip_high=0.3,
            dual_clip=3.0,
            kl="low_var_kl",
            kl_coef=0.01,
            summary="EasyR1 with TaxonRL's settings: clip 0.2/0.3, dual clip 3, KL 0.01 in the loss (cf. GRPO, "
            "arXiv:2402.03300)",
        ),
        Algorithm(
            name="maye",
            advantage="none",
            scale="tokens_keep_mean",
            **PPO,
            kl="k3",
            kl_coef=0.001,
            truncated_score=-0.1,
            summary="MAYE's Reinforce++: whitened returns with their mean added back, KL 0.001 in the loss, -0.1 "
            "without an end token (arXiv:2504.02587)",
        ),
    )
}


def resolve(name: str, **overrides: Any) -> Algorithm:
    """Return a row of the table with a recipe's overrides.

    Args:
        overrides: name of a cell -> its value; None = the row's value is kept.
    Raises: RecipeError for an unknown row or an unknown value of a cell, with the possible ones; TypeError for an
        unknown cell.
    """
    given = {cell: value for cell, value in overrides.items() if value is not None}
    if strangers := given.keys() - set(CELLS):
        raise TypeError(f"the algorithm table has no cell {', '.join(sorted(strangers))}")
    choices = {"name": name} | {cell: value for cell, value in given.items() if cell in CHOICES}
    for cell, value in choices.items():
        known = tuple(ALGORITHMS) if cell == "name" else CHOICES[cell]
        if value not in known:
            raise unknown(f"algo.{cell}", value, known)
    return replace(ALGORITHMS[name], **given)


def algorithm_of(settings: Any) -> Algorithm:
    """Return the row of a recipe's `[algo]` table with its overrides.

    Args:
        settings: recipe.schema.Algo, or any object with the same fields.
    """
    return resolve(settings.name, **{cell: getattr(settings, cell, None) for cell in CELLS})


def value_in_row(name: str, cell: str) -> Any:
    """Return the value of a cell for recipes that select this row and do not set the cell.

    If a row sets no scale, the scale is the default of its advantage estimator.
    """
    row = ALGORITHMS[name]
    value = getattr(row, cell)
    return ESTIMATORS[row.advantage].scale if cell == "scale" and value is None else value


def without_model(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm with the group mean instead of a baseline from the model (saved rollouts, `vlmrl try`)."""
    needs_model = algorithm.advantage == "greedy" or algorithm.needs_energy
    return replace(algorithm, advantage="group_mean") if needs_model else algorithm


def stand_in(algorithm: Algorithm) -> str:
    """Describe what replaces numbers from the model when there is no model (saved rollouts, `vlmrl try`).

    Returns: a sentence for the user; "" = the advantages need no numbers from the model.
    """
    if algorithm.advantage == "greedy":
        return "the group mean replaces the score of the greedy answer"
    if algorithm.needs_energy:
        return "the group mean replaces the baseline of each token"
    if algorithm.needs_critic:
        return "an untrained critic, with the value 0 everywhere, replaces the policy's: advantages before any learning"
    return ""


EVERYWHERE = (
    "A group whose scores are all equal has an advantage of exactly 0. In verl's and MAYE's code, whitening over the"
    " batch shifts it by the mean of the batch (reinforce++, reinforce++-baseline, gdpo, maye).",
    "1e-6 is added to a standard deviation, as in verl. TRL adds 1e-4.",
    "A group of one sample has an advantage of 0 where the row compares samples. verl gives it its score.",
    "Log-ratios are limited to -20 and 20, also where others have no limit (or 10, in verl's gspo).",
    "Importance weights are on when another engine samples: per token, at most 2. verl's are off by default; TRL's are"
    " per sequence, and 0 above 3 (importance_level, importance, importance_cap).",
    "Metrics are means over the tokens that enter a forward pass; groups of equal scores enter none (see count_dead).",
)
"""Differences that concern all rows."""

_DUAL = (
    "verl's policy loss always has a dual clip (clip_ratio_c = 3); the paper and TRL have none. As verl: dual_clip = 3."
)
_NO_CLIP = "No clip of the ratio. verl clips it as its policy loss is set. As verl: clip_low = 0.2, clip_high = 0.2."

OF_ROWS: dict[str, str] = {
    "grpo": _DUAL,
    "grpo_paper": _DUAL,
    "dr_grpo": f"{_DUAL} The constant is max_new_tokens, as in TRL; verl's is its loss_scale_factor.",
    "dapo": "verl's script of the published run has a dual clip; the paper has none. As that script: dual_clip = 10.",
    "gdpo": "Advantages are normalised over samples, as in the paper and in TRL. verl's are over tokens. As verl:"
    f' scale = "tokens". {_DUAL}',
    "gspo": "The mean of the importance weights over a response counts, as in TRL. In verl's gspo every token keeps its"
    " own weight. As verl: gspo_token.",
    "vespo": "Importance weights multiply the loss. In VESPO's code and in TRL, their product over a response is a"
    ' factor of its ratio. As there, but without a limit of the weights: importance = "ratio".',
    "otb": "Energies are not multiplied by squared importance weights; verl's are, where it has weights. With several"
    " turns, positions count trained tokens; verl has another estimator for them. Where all samples were certain of all"
    f" their tokens, the advantage is 0; verl's is the return. {_DUAL}",
    "gmpo": "policy/clip_share counts the tokens that a bound changes, as in TRL. verl counts all tokens outside the"
    " bounds.",
    "cispo": "No lower bound, as in the paper and in TRL. As verl: clip_low = 0.2, clip_high = 0.2.",
    "clip_cov": "Tokens are picked from the whole update, by a seed. verl picks from each microbatch. policy/clip_share"
    " also counts the tokens that the ratio's clip removes.",
    "kl_cov": "Tokens are picked from the whole update. verl picks from each microbatch. cov_share and cov_kl_coef are"
    " the paper's. As verl's defaults: cov_share = 0.0002, cov_kl_coef = 0.1.",
    "rloo": f"{_NO_CLIP} TRL has one ratio per response; on policy its gradient is that of this row with aggregation"
    " constant.",
    "opo": _NO_CLIP,
    "gpg": "The scale is the share of samples in groups of equal scores, as in the paper. verl takes the share of"
    " scores that are 0.",
    "pass_at_k": _DUAL,
    "reinforce++": _DUAL,
    "reinforce++-baseline": _DUAL,
    "papo": "The masked pass has a gradient, as in the paper's objective, and is made again with the weights of each"
    " update. The entropies are exact, those of the masked pass too. In its published code the masked log-probs come"
    " from the batch and are constants, and an entropy is the mean of -log p over the sampled tokens. As that code:"
    " papo_published.",
    "papo_published": "The numbers are those of its scripts without a reference. As its scripts with one:"
    ' perception_coef = 0.02, perception_entropy = 0, kl = "low_var_kl", kl_coef = 0.01.',
    "vppo": "Smallest, largest and mean dependency are those of the whole update on all ranks. In its published code"
    " the smallest and largest are those of a rank, and the mean that of a microbatch. As its scripts:"
    " perception_share = 0.4, for 8B perception_entropy = 0.12. Their filter compares accuracies.",
    "ppo": f"The critic is a head on the policy. verl's is a separate model. {_DUAL} As verl's other defaults:"
    " gae_lambda = 1, value_clip = 0.5.",
    "maye": "Whitening is over the whole batch. MAYE's code whitens on each rank alone.",
}
"""Name of a row -> text with its differences, and with the keys of `[algo]` that remove them."""
