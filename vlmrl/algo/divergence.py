"""Divergence between the distributions of two models at a position, and its gradient, worked out by hand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Divergence:
    """Divergence between the policy p and another model q at a position, and its gradient.

    Args:
        kind: "reverse" is KL(p || q), "forward" is KL(q || p), "jsd" is w KL(q || m) + (1 - w) KL(p || m) with the
            mixture m = w q + (1 - w) p.
        weight: w of "jsd", strictly between 0 and 1.
        top_k: the k most likely tokens of q count one by one and all others as one outcome; 0 = all one by one.
        temperature: divisor of the other model's logits; None = the policy's.
    Source: generalised Jensen-Shannon divergence: GKD, arXiv:2306.13649 eq. 1.
    Example: p (0.5, 0.5), q (0.25, 0.75): reverse 0.1438, forward 0.1308, jsd with w = 0.5 0.0338.
    """

    kind: Literal["reverse", "forward", "jsd"] = "reverse"
    weight: float = 0.5
    top_k: int = 0
    temperature: float | None = None

    def of(self, logp: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        """Return (value, its gradient with respect to the logits of p).

        Equal distributions have the value and the gradient 0 exactly.

        Args:
            logp, ref: log-probs of p and of q, [T, V]; -inf for banned ids, in both.
        Returns: [T] in nats, and [T, V].
        """
        p = logp.exp()
        if not self.top_k or self.top_k >= logp.shape[-1]:
            value, pull = self._of_outcomes(p, logp, ref)
        else:
            ids = ref.topk(self.top_k).indices  # [T, k]
            # [T, V] -> [T, k + 1] -> [T, V]
            outcomes, theirs = (torch.cat([x.gather(-1, ids), _rest(x, ids)], -1) for x in (logp, ref))
            value, pull = self._of_outcomes(outcomes.exp(), outcomes, theirs)
            pull = pull[:, -1:].expand_as(logp).scatter(-1, ids, pull[:, :-1])
        return value, p - (logp + pull).exp() if self.kind == "forward" else p * pull

    def _of_outcomes(self, p: Tensor, logp: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        """Return (value, pull). The gradient for a logit is p * pull; for "forward", p - p * exp(pull)."""
        d = (ref - logp).nan_to_num(0.0, 0.0, 0.0)  # an impossible outcome has -inf - -inf
        if self.kind == "forward":
            return (ref.exp() * d).sum(-1), d
        if self.kind == "reverse":
            value = -(p * d).sum(-1)
            return value, -d - value[:, None]
        q, w = ref.exp(), self.weight
        # log m - log p: 0 exactly where p = q, and without overflow where they are far apart.
        m = torch.where(d <= 0, (w * d.expm1()).log1p(), d + ((1 - w) * (-d).expm1()).log1p())
        pull = (w - 1) * m
        mean = (p * pull).sum(-1)
        return mean + w * (q * (d - m)).sum(-1), pull - mean[:, None]


def _rest(logp: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of all outcomes but `ids` together: [T, V], [T, k] -> [T, 1]."""
    return logp.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)
