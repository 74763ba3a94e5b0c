"""Intended differences between rows of family.py and algorithms of the same name in other libraries. No torch.

Tests compare the values and gradients of all rows with those of verl's and TRL's functions:
tests/golden/test_equal_to_verl.py and test_equal_to_trl.py. There are no differences except those listed here.
"""

from __future__ import annotations

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
    "ppo": f"The critic is a head on the policy. verl's is a separate model. {_DUAL} As verl's other defaults:"
    " gae_lambda = 1, value_clip = 0.5.",
    "maye": "Whitening is over the whole batch. MAYE's code whitens on each rank alone.",
}
"""Name of a row -> text with its differences, and with the keys of `[algo]` that remove them."""
