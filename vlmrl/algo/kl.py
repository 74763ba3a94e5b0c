"""Estimators of the KL divergence to the reference policy, per token."""

from __future__ import annotations

from torch import Tensor


def k3(logp_K: Tensor, ref_logp_K: Tensor) -> Tensor:
    """exp(d) - d - 1 with d = ref_logp - logp: unbiased in value, never negative. Shape [K], nats.

    d is limited to +-20 so that a token the reference rules out gives a large number and not an overflow.
    Source: J. Schulman, "Approximating KL divergence" (2020), estimator k3; GRPO, arXiv:2402.03300 eq. 4.
    Example: logp = ref_logp -> 0; ref 0.5, policy 0.25 -> d = ln 2 -> 2 - 0.6931 - 1 = 0.3069.
    """
    d = (ref_logp_K - logp_K).clamp(-20.0, 20.0)
    return d.exp() - d - 1.0
