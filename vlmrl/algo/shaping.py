"""What changes a score before the advantages, and what follows from a step's numbers after them. No torch.

Length and truncation rules on the score, the spread that DAPO's filter asks for, the controller of the KL coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MAX_KL_ERROR = 0.2
"""The controller acts on a relative error of at most this."""


def overlong_penalty(num_tokens: int, *, max_tokens: int, buffer: int, penalty: float) -> float:
    """What is taken off the score of a long response: 0 up to `max_tokens - buffer`, then linear down to -penalty.

    Source: DAPO, arXiv:2503.14476 eq. 13 (soft overlong punishment).
    Example: limit 100, buffer 20, penalty 1: 80 tokens -> 0, 90 -> -0.5, 100 and more -> -1.
    """
    if buffer <= 0:
        return 0.0
    over = num_tokens - (max_tokens - buffer)
    return -penalty * min(max(over / buffer, 0.0), 1.0) if over > 0 else 0.0


def shaped_score(
    score: float, *, num_tokens: int, was_cut: bool, max_tokens: int, overlong_tokens: int = 0,
    overlong_weight: float = 1.0, truncated_score: float | None = None,
) -> float:  # fmt: skip
    """The score that the advantage sees: the reward's, with the length rules of the recipe.

    Args:
        was_cut: ended by the token limit.
        overlong_tokens: length of DAPO's buffer before the limit; 0 = off.     overlong_weight: most it can cost.
        truncated_score: stands in for the score of a cut response, as MAYE's penalty for a missing end token does.
    """
    if was_cut and truncated_score is not None:
        return truncated_score
    return score + overlong_penalty(num_tokens, max_tokens=max_tokens, buffer=overlong_tokens, penalty=overlong_weight)


def spread(scores: Sequence[float]) -> float:
    """Largest minus smallest score; 0 for fewer than two.

    DAPO's filter asks for it and not for the mean: with scores between 0 and 1 a dead group may lie anywhere.
    Source: DAPO, arXiv:2503.14476 eq. 11, whose condition 0 < number correct < G is this for scores of 0 and 1.
    """
    finite = [s for s in scores if np.isfinite(s)]
    return max(finite) - min(finite) if len(finite) > 1 else 0.0


def next_kl_coef(coef: float, kl: float, *, target: float, horizon: float, samples: int) -> float:
    """The KL coefficient for the next step: larger when the KL is above its target, smaller when below.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon).
    Args: kl: mean per token of this step, nats. samples: responses of this step.
    Source: Ziegler et al., arXiv:1909.08593, section 2.2.
    Example: coef 0.1, kl 0.2, target 0.1, horizon 1000, 100 samples -> 0.1 * (1 + 0.2 * 0.1) = 0.102.
    """
    error = min(max(kl / target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
    return coef * (1.0 + error * samples / horizon)
