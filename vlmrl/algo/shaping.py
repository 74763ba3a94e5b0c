"""Changes of scores before advantages are computed, and control of the KL coefficient after a step. No torch.

The module has the length and truncation rules for a score, the spread that DAPO's filter compares, and the controller
of the KL coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_KL_ERROR = 0.2
"""Maximum relative error of the KL that its controller uses; larger errors are limited to it."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """Return the penalty for a long response: 0 up to `max_tokens - buffer` tokens, then linear down to -penalty.

    Args:
        num_tokens: length of the response.
        max_tokens: token limit of a response.
        buffer: number of tokens before the limit in which the penalty grows; 0 or less = no penalty.
        penalty: size of the penalty at the limit, >= 0.
    Returns: a number in [-penalty, 0], to be added to the score.
    Source: DAPO, arXiv:2503.14476 eq. 13 (soft overlong punishment).
    Example: limit 100, buffer 20, penalty 1: 80 tokens -> 0, 90 -> -0.5, 100 and more -> -1.
    """
    if buffer <= 0:
        return 0.0
    over = num_tokens - (max_tokens - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0) if over > 0 else 0.0


def shaped_score(
    score: float,
    *,
    num_tokens: int,
    was_cut: bool,
    max_tokens: int,
    overlong_tokens: int = 0,
    overlong_weight: float = 1.0,
    truncated_score: float | None = None,
) -> float:
    """Return the score for the advantages: the reward's score, changed by the recipe's length rules.

    Args:
        was_cut: whether the token limit ended the response.
        max_tokens: token limit of a response.
        overlong_tokens: length of DAPO's buffer before the limit, in tokens; 0 = off.
        overlong_weight: maximum that a long response loses.
        truncated_score: score of a cut response instead of the reward's, like MAYE's penalty for a missing end token;
            None = off.
    """
    if was_cut and truncated_score is not None:
        return truncated_score
    return score + overlong_penalty(num_tokens, max_tokens=max_tokens, buffer=overlong_tokens, penalty=overlong_weight)


def spread(scores: Sequence[float]) -> float:
    """Return the largest minus the smallest finite score; 0 for fewer than two finite scores.

    DAPO's filter uses the spread, not the mean: with scores between 0 and 1, a dead group can have any mean.

    Source: DAPO, arXiv:2503.14476 eq. 11. For scores of 0 and 1, its condition 0 < number correct < G means spread > 0.
    """
    finite = [s for s in scores if np.isfinite(s)]
    return max(finite) - min(finite) if len(finite) > 1 else 0.0


def next_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """Return the KL coefficient for the next step: larger when the KL is above its target, smaller when below.

    It is coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).

    Args:
        coef: coefficient of this step.
        kl: mean KL per token of this step, in nats.
        target: the KL to steer to, in nats per token, > 0.
        horizon: number of responses; the larger, the slower the coefficient changes.
        samples: responses of this step.
    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    Example: coef 0.1, kl 0.2, target 0.1, horizon 1000, 100 samples -> 0.1 * (1 + 0.2 * 0.1) = 0.102.
    """
    error = min(max(kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1.0 + error * samples / horizon)
