"""Log-probs, entropies and divergences at the positions of a packed row, from hidden states, chunk by chunk.

The logits `[T, V]` never exist all at once. Log-probs are those of log-softmax(logits / temperature) with banned ids at
-inf; all numbers from the logits on are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlmrl.algo.divergence import Divergence
from vlmrl.model.device_memory import free_bytes, upload
from vlmrl.model.memory import HeadChunks, head_chunks

IMPOSSIBLE = -1e30
"""Logit of banned ids where sums are taken: 0 times -inf would be no number."""


@cache
def chunks_for(device: torch.device) -> HeadChunks:
    """Return the chunk sizes for a device.

    They are fixed at the first call, so that all passes over a row split it in the same way.
    """
    return head_chunks(device.type, free_bytes(device))


def policy_logits(logits: Tensor, temperature: float, banned: Tensor | None) -> Tensor:
    """Return the logits of the policy: float32, divided by the temperature, banned ids at -inf.

    Args:
        logits: [..., V].
        temperature: > 0.
        banned: bool [V], True = never sampled; None = nothing is banned.
    Returns: [..., V].
    """
    logits_32, is_copy = logits.float(), logits.dtype != torch.float32  # only a copy may be changed in place
    if temperature != 1.0:
        logits_32, is_copy = (logits_32.div_(temperature) if is_copy else logits_32 / temperature), True
    if banned is None:
        return logits_32
    return logits_32.masked_fill_(banned, float("-inf")) if is_copy else logits_32.masked_fill(banned, float("-inf"))


def banned_mask(banned_ids: Sequence[int], vocabulary: int, device: torch.device) -> Tensor | None:
    """Return a mask that is True at `banned_ids`, bool [V]; None if there are no banned ids.

    Ids outside the vocabulary are ignored.
    """
    ids = [i for i in banned_ids if 0 <= i < vocabulary]
    if not ids:
        return None
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[ids] = True
    return upload(mask, device)


def token_logprobs(
    hidden_KD: Tensor,
    target_K: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    banned_ids: Sequence[int] = (),
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return log pi(target) and the policy's entropy at each position.

    Letters: K positions, D hidden width, V vocabulary.

    Args:
        hidden_KD: the hidden state that predicts each target.
        target_K: token id of each target, int64.
        head: function from hidden states to logits [.., V]: all operations after the last norm, with soft caps.
        entropy_gradient: whether the entropy carries a gradient (for an entropy bonus).
    Returns: (logp_K with gradient, entropy_K), float32, in nats.
    """

    def chunk(hidden: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(hidden)
        return _LogprobAndEntropy.apply(logits, target, temperature, banned, entropy_gradient)

    if len(target_K) == 0:
        return hidden_KD.sum(-1).float(), hidden_KD.detach().sum(-1).float()
    vocabulary = head(hidden_KD[:1].detach()).shape[-1]
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)  # built once: each build makes a GPU wait
    size = max(1, chunks_for(hidden_KD.device).chunk // vocabulary)
    logps, entropies = zip(*_in_chunks(chunk, size, hidden_KD, target_K), strict=True)
    return torch.cat(logps), torch.cat(entropies)


def _in_chunks(function: Callable[..., Any], size: int, *tensors: Tensor) -> list[Any]:
    """Return a function's results for chunks of positions; the backward pass computes the logits of several again."""
    several = torch.is_grad_enabled() and len(tensors[0]) > size
    run = partial(checkpoint, function, use_reentrant=False) if several else function
    # [C, D] -> [C, V] -> [C] per chunk
    return [run(*chunk) for chunk in zip(*(x.split(size) for x in tensors), strict=True)]


class _LogprobAndEntropy(torch.autograd.Function):
    """Function from logits [C, V] to log pi(target) [C] and entropy [C]; float32, a few rows at a time.

    It keeps the logits themselves and three numbers per row for the backward pass. The backward pass is written by
    hand, because autograd would keep and read several arrays of [C, V]. The gradient overwrites the logits (autograd
    raises an error if another operation needs them in its backward pass). With pi = softmax(x): d logp / dx_j = [j =
    target] - pi_j, and d entropy / dx_j = -pi_j (log pi_j + entropy).

    Memory decides the time: each line below that names an array of [rows, V] reads or writes it once. So the entropy is
    log sum exp(x - max) - E[x - max], one product, and not the sum of pi log pi.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, banned: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, lse = (torch.empty(len(logits), device=logits.device) for _ in range(3))
        for rows in _blocks(logits):
            x = _finite_logits(logits[rows], temperature, banned)  # [rows, V], float32
            at_target, highest = x.gather(-1, target[rows, None])[:, 0], x.amax(-1)
            weight = x.sub_(highest[:, None]).exp()
            total = weight.sum(-1)
            log_total = total.log()
            logp[rows] = (at_target - highest) - log_total
            entropy[rows] = log_total - x.mul_(weight).sum(-1) / total
            lse[rows] = highest + log_total
        if banned is not None:
            logp.masked_fill_(banned[target], float("-inf"))
        ctx.save_for_backward(logits, target, lse, entropy)
        ctx.temperature, ctx.banned, ctx.entropy_gradient = temperature, banned, entropy_gradient
        ctx.is_mine = logits.grad_fn is not None  # a leaf tensor belongs to the caller: not overwritten
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, logp_grad: Tensor, entropy_grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse, entropy = ctx.saved_tensors
        grad = logits if ctx.is_mine else torch.empty_like(logits)
        pull = logp_grad / ctx.temperature
        if ctx.banned is not None:
            at_target = pull.masked_fill(ctx.banned[target], 0.0)
        else:
            at_target = pull
        for rows in _blocks(logits):
            x = _finite_logits(logits[rows], ctx.temperature, ctx.banned).sub_(lse[rows, None])
            if ctx.entropy_gradient:
                p, slope = x.exp(), (entropy_grad[rows] / ctx.temperature)[:, None]
                x = x.add_(entropy[rows, None]).mul_(slope).add_(pull[rows, None]).mul_(p).neg_()
            else:
                x.exp_().mul_(-pull[rows, None])
            grad[rows] = x.scatter_add_(-1, target[rows, None], at_target[rows, None])
        return grad, None, None, None, None


def _finite_logits(logits: Tensor, temperature: float, banned: Tensor | None) -> Tensor:
    """Return a copy of `policy_logits` with finite numbers at banned ids, whose probabilities are 0 all the same."""
    x = logits.to(torch.float32, copy=True)
    if temperature != 1.0:
        x.div_(temperature)
    return x if banned is None else x.masked_fill_(banned, IMPOSSIBLE)


def _blocks(logits: Tensor, parts: int = 1) -> Iterator[slice]:
    size = max(1, chunks_for(logits.device).block // logits.shape[-1] // parts)
    return (slice(start, start + size) for start in range(0, len(logits), size))


@torch.no_grad()
def gradient_energy(
    hidden_KD: Tensor, target_K: Tensor, head: Callable[[Tensor], Tensor], temperature: float, banned_ids: Sequence[int]
) -> Tensor:
    """Return the squared size of d log pi(target) / d logits, for logits divided by the temperature. [K], in 0 to 2.

    With pi = softmax(logits) it is (1 - pi_target)^2 plus the sum of all other pi_j^2. Arguments: see `token_logprobs`.

    Source: the logit-gradient proxy of arXiv:2602.07078.
    Example: pi = (0.5, 0.25, 0.25): 0.25 + 0.0625 + 0.0625 = 0.375 for the first token.
    """

    def chunk(hidden: Tensor, target: Tensor) -> Tensor:
        logits = head(hidden)
        energy = torch.empty(len(logits), device=logits.device)
        for rows in _blocks(logits):
            at = target[rows, None]
            logp = policy_logits(logits[rows], temperature, banned).log_softmax(-1)
            # expm1: near pi = 1, 1 - 2 pi + the sum of squares would lose all digits.
            energy[rows] = logp.exp().scatter_(-1, at, logp.gather(-1, at).expm1()).square_().sum(-1)
        return energy

    if len(target_K) == 0:
        return hidden_KD.sum(-1).float()
    vocabulary = head(hidden_KD[:1]).shape[-1]
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)
    size = max(1, chunks_for(hidden_KD.device).chunk // vocabulary)
    return torch.cat(_in_chunks(chunk, size, hidden_KD, target_K))


class _DivergenceOfLogits(torch.autograd.Function):
    """Function from logits [C, V] of two models to their divergence [C], with a gradient for the first alone."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, theirs: Tensor, settings: Divergence, temperature: float, banned: Tensor | None
    ) -> Tensor:
        value, grad = torch.empty(len(logits), device=logits.device), torch.empty_like(logits)
        for rows in _blocks(logits, 6):  # `of` holds several arrays at once
            own = policy_logits(logits[rows], temperature, banned).log_softmax(-1)
            ref = policy_logits(theirs[rows], settings.temperature or temperature, banned).log_softmax(-1)
            value[rows], pull = settings.of(own, ref)
            grad[rows] = pull.div_(temperature)
        ctx.save_for_backward(grad)
        return value

    @staticmethod
    def backward(ctx: Any, value_grad: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * value_grad[:, None].to(grad.dtype), None, None, None, None


def divergence(
    hidden_KD: Tensor,
    ref_hidden_KD: Tensor,
    head: Callable[[Tensor], Tensor],
    ref_head: Callable[[Tensor], Tensor],
    settings: Divergence,
    *,
    temperature: float,
    banned_ids: Sequence[int] = (),
) -> Tensor:
    """Return the divergence of the policy from another model at each position, chunk by chunk.

    Letters: K positions, D hidden width (the other model may have another), V vocabulary. If the two heads have numbers
    of logits that differ, those that only one of them has do not count: no token belongs to them.

    Args:
        hidden_KD, ref_hidden_KD: last hidden states of the policy and of the other model at the same positions; those
            of the other model get no gradient.
        head, ref_head: functions from hidden states to logits [.., V].
        settings: the divergence, with the other model's temperature.
        temperature, banned_ids: the policy's; the ids are banned in both distributions.
    Returns: [K] with gradient to `hidden_KD` and `head`, float32, in nats, never negative except for rounding.
    """

    def chunk(hidden: Tensor, ref_hidden: Tensor) -> Tensor:
        logits = head(hidden)
        with torch.no_grad():
            theirs = ref_head(ref_hidden)
        own, ref = (x if x.shape[-1] == vocabulary else x[..., :vocabulary] for x in (logits, theirs))
        return _DivergenceOfLogits.apply(own, ref, settings, temperature, banned)

    if len(hidden_KD) == 0:
        return hidden_KD.sum(-1).float()
    with torch.no_grad():
        vocabulary = min(f(x[:1]).shape[-1] for f, x in ((head, hidden_KD), (ref_head, ref_hidden_KD)))
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)  # built once: each build makes a GPU wait
    size = max(1, chunks_for(hidden_KD.device).chunk // vocabulary // 2)  # two distributions are held at once
    return torch.cat(_in_chunks(chunk, size, hidden_KD, ref_hidden_KD))
