"""Aggregation of token losses into one number, with a global denominator.

The denominator is fixed before the first backward, so the gradient does not depend on how an update is split into
microbatches.

Letters: K trained tokens of a microbatch, S responses of the whole update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominator:
    """Denominator of the loss, computed once from ALL responses of an update, on all ranks.

    Args:
        aggregation: "token_mean" (all trained tokens count the same), "sequence_mean" (all responses count the
            same), or "constant" (responses x `max_tokens`: a token's weight does not depend on the length of its
            response).
        num_tokens: number of trained tokens in the whole update.
        num_sequences: number of responses with at least one trained token in the whole update.
        max_tokens: token limit of a response; used by "constant".
        num_dead_tokens: number of those `num_tokens` that never enter a forward pass, because their loss is exactly 0.
    """

    aggregation: str
    num_tokens: int
    num_sequences: int
    max_tokens: int
    num_dead_tokens: int = 0

    @classmethod
    def of(
        cls, aggregation: str, tokens_S: Sequence[int], max_tokens: int, dead_tokens_S: Sequence[int] = ()
    ) -> Denominator:
        """Return the denominator of an update with these responses.

        Args:
            tokens_S: number of trained tokens of each response that enters a forward pass.
            dead_tokens_S: number of trained tokens of each response that enters no forward pass, but counts in the
                denominator.
        """
        trained = [n for n in tokens_S if n > 0]
        dead = [n for n in dead_tokens_S if n > 0]
        return cls(aggregation, sum(trained) + sum(dead), len(trained) + len(dead), max_tokens, sum(dead))


def aggregate(loss_K: Tensor, sequence_tokens_K: Tensor, total: Denominator) -> Tensor:
    """Return this microbatch's share of the loss of its update; the shares of all microbatches add up to the loss.

    Args:
        loss_K: loss per token, trained tokens only.
        sequence_tokens_K: number of trained tokens in the response of each token.
    Returns: a scalar.
    Raises: ValueError for an unknown aggregation.
    Example: responses with losses [1, 1, 1] and [4]: token_mean (3 + 4) / 4 = 1.75; sequence_mean (1 + 4) / 2 = 2.5;
        constant with max_tokens 10: 7 / 20 = 0.35.
    """
    # max(1, ...): an update without a trained token has the loss 0, not NaN.
    if total.aggregation == "token_mean":
        return loss_K.sum() / max(1, total.num_tokens)
    if total.aggregation == "sequence_mean":
        # Each token is weighted with 1 / (length of its response), so a response's sum is its mean. [K] -> scalar
        return (loss_K / sequence_tokens_K.to(loss_K.dtype)).sum() / max(1, total.num_sequences)
    if total.aggregation == "constant":
        return loss_K.sum() / max(1, total.num_sequences * total.max_tokens)
    raise ValueError(f"unknown aggregation {total.aggregation!r}")


def global_mean(values_K: Tensor, total: Denominator) -> Tensor:
    """Return this microbatch's share of a mean over the tokens of its update that enter a forward pass.

    Args:
        values_K: a metric per token.
    Returns: a scalar, float64, without gradient.
    """
    return values_K.detach().to(torch.float64).sum() / max(1, total.num_tokens - total.num_dead_tokens)
