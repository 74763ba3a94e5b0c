"""A step's numbers as the losses of other systems hold them, [B, T] with a mask, and what ours make of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vlmrl.algo.algorithms import Algorithm
from vlmrl.algo.losses import Denominator, aggregate, select_tokens
from vlmrl.model.packing import TokenStats
from vlmrl.train.update import PolicyGradient, TokenData

MAX_TOKENS = 9


@dataclass
class Numbers:
    """A step as others hold it. All [B, T] float64 but `advantage` [B]; `mask` is 1 on trained tokens, as `long`."""

    logp: Tensor
    entropy: Tensor
    old: Tensor
    ref: Tensor
    sampler: Tensor
    advantage: Tensor
    mask: Tensor

    def rows(self, start: int, stop: int) -> Numbers:
        return Numbers(*(getattr(self, f.name)[start:stop] for f in dataclasses.fields(self)))


def token_data(x: Numbers, off_policy: bool = True) -> tuple[TokenData, Tensor]:
    """(what an objective gets of the trained tokens, where they are [B, T])."""
    where = x.mask.bool()
    counts = x.mask.sum(1)
    trajectory = torch.arange(len(counts)).repeat_interleave(counts)
    response = torch.unique(trajectory, return_inverse=True)[1]
    old, ref = (x.old[where] if off_policy else None), x.ref[where]
    right = torch.zeros_like(ref)  # what a critic says and should have said: its loss is 0
    return TokenData(
        x.advantage[trajectory],
        x.sampler[where],
        old,
        ref,
        trajectory,
        response,
        counts[trajectory],
        old_value=right,
        value_target=right,
    ), where


def ours(
    x: Numbers, algorithm: Algorithm, *, off_policy: bool = True, **terms: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """(the objective's loss of the step, what it shows of each token)."""
    data, where = token_data(x, off_policy)
    if algorithm.selects:
        each = [t.split(x.mask.sum(1).tolist()) for t in (x.logp[where].detach(), x.old[where], data.advantage)]
        data = replace(data, selected=torch.cat(select_tokens(algorithm, *each, seed=0)))
    objective = PolicyGradient(algorithm, **{"kl_coef": algorithm.kl_coef} | terms)
    loss, shown = objective.loss(TokenStats(x.logp[where], x.entropy[where], data.value_target), data)
    total = Denominator.of(objective.aggregation, x.mask.sum(1).tolist(), MAX_TOKENS)
    return aggregate(loss, data.response_tokens, total), shown


def gradients(loss: Tensor, x: Numbers) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(loss, (x.logp, x.entropy), retain_graph=True, allow_unused=True, materialize_grads=True)


def check(found: Tensor, wanted: Tensor, x: Numbers) -> None:
    """Value and gradients, by the log-probs and by the entropies, are the same; and there is a gradient at all."""
    torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-12)
    for a, b in zip(gradients(found, x), gradients(wanted, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-12)
    assert gradients(found, x)[0].abs().max() > 0
