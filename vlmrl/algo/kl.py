"""Estimators of KL(policy || reference) from the log-probs of sampled tokens, per token, in nats.

Letters: K trained tokens. The KL estimator "full" is the exact sum over the vocabulary. It needs hidden states instead
of log-probs, so it is in `model/logprobs.py`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

MAX_VALUE = 10.0
"""Largest value of `low_var_kl`, in nats."""


def _difference(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return ref_logp - logp, limited to +-20: for a token that the reference excludes, estimates would overflow."""
    return (ref_logp_K - logp_K).clamp(-20.0, 20.0)


def k1(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return logp - ref_logp: unbiased in value, may be negative.

    It is meant for the KL in the reward. As a term of the loss, its expected gradient is zero.

    Returns: [K], nats.
    Source: J. Schulman, "Approximating KL divergence" (2020), k1. Example: ref 0.5, policy 0.25 -> -0.6931.
    """
    return -_difference(logp_K, ref_logp_K)


def k2(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return (ref_logp - logp)^2 / 2: biased in value; as a loss, its expected gradient is the KL's.

    Returns: [K], nats.
    Source: J. Schulman (2020), k2. Example: ref 0.5, policy 0.25 -> 0.6931^2 / 2 = 0.2402.
    """
    return 0.5 * _difference(logp_K, ref_logp_K).square()


def k3(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return exp(d) - d - 1 with d = ref_logp - logp: unbiased in value, never negative.

    Returns: [K], nats.
    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3; GRPO, arXiv:2402.03300 eq. 4.
    Example: logp = ref_logp -> 0; ref 0.5, policy 0.25 -> d = ln 2 -> 2 - 0.6931 - 1 = 0.3069.
    """
    d = _difference(logp_K, ref_logp_K)
    return d.exp() - d - 1.0


def low_var_kl(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return k3 with its value limited to 10: a token above the limit has no gradient.

    Returns: [K], nats.
    Source: EasyR1's and verl's code.
    Example: ref 1, policy e^-5 -> exp(5) - 5 - 1 = 142.4 -> 10.
    """
    return k3(logp_K, ref_logp_K).clamp(max=MAX_VALUE)


def absolute(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """Return |logp - ref_logp|, whose gradient has the same size at any distance.

    Returns: [K], nats.
    Example: ref 0.5, policy 0.25 -> 0.6931.
    """
    return _difference(logp_K, ref_logp_K).abs()


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
    "low_var_kl": low_var_kl,
    "abs": absolute,
}
"""Name in the algorithm table -> function (policy log-probs [K], reference log-probs [K]) -> KL estimates [K]."""
