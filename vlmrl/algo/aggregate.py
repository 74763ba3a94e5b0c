"""How token losses become one number. The denominator is global: it is fixed before the first backward, so the gradient
does not depend on how rows are split into microbatches.

Letters: K trained tokens of a microbatch, S responses of the whole step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Denominator:
    """What a step divides by. Made once from ALL its responses (over ranks: the sum of each rank's counts).

    Args:
        aggregation: "token_mean" (all trained tokens count the same), "sequence_mean" (all responses count the
            same), or "constant" (responses x `max_tokens`: a token weighs the same however long its response is).
        num_tokens, num_sequences: response tokens and responses with at least one, over the whole step.
        max_tokens: the token limit of a response; for "constant".
        num_dead_tokens: those of `num_tokens` that never enter a forward pass, because their loss is exactly 0.
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
        """Count the trained tokens of every response of the step.

        Args: tokens_S: of the responses that are trained on. dead_tokens_S: of those that only count here.
        """
        trained = [n for n in tokens_S if n > 0]
        dead = [n for n in dead_tokens_S if n > 0]
        return cls(aggregation, sum(trained) + sum(dead), len(trained) + len(dead), max_tokens, sum(dead))


def aggregate(loss_K: Tensor, sequence_tokens_K: Tensor, total: Denominator) -> Tensor:
    """This microbatch's share of the step's loss: a scalar; the shares of all microbatches add up to the loss.

    Args:
        loss_K: per-token loss, trained tokens only.
        sequence_tokens_K: number of trained tokens of the response each token belongs to.
    Example: responses of losses [1, 1, 1] and [4]: token_mean (3 + 4) / 4 = 1.75; sequence_mean (1 + 4) / 2 = 2.5;
        constant with max_tokens 10: 7 / 20 = 0.35.
    """
    if total.aggregation == "token_mean":
        return loss_K.sum() / max(1, total.num_tokens)
    if total.aggregation == "sequence_mean":
        return (loss_K / sequence_tokens_K.to(loss_K.dtype)).sum() / max(1, total.num_sequences)
    if total.aggregation == "constant":
        return loss_K.sum() / max(1, total.num_sequences * total.max_tokens)
    raise ValueError(f"unknown aggregation {total.aggregation!r}")


def global_mean(values_K: Tensor, total: Denominator) -> Tensor:
    """This microbatch's share of a mean over the step's tokens that are trained on, for metrics. No gradient."""
    return values_K.detach().to(torch.float64).sum() / max(1, total.num_tokens - total.num_dead_tokens)
