"""Token log-probs from hidden states, chunk by chunk: the logits `[T, V]` never exist all at once.

The policy is log-softmax(logits / temperature) with banned ids at -inf; all numbers from the logits on are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlmrl.model.device_memory import free_bytes
from vlmrl.model.head_chunks import HeadChunks, head_chunks


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
    mask = torch.zeros(vocabulary, dtype=torch.bool, device=device)
    mask[ids] = True
    return mask


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
    size = chunks_for(hidden_KD.device).positions(vocabulary)
    if len(target_K) <= size:
        return chunk(hidden_KD, target_K)
    logps, entropies = [], []
    for hidden, target in zip(hidden_KD.split(size), target_K.split(size), strict=True):
        # [C, D] -> [C, V] -> [C] per chunk; its logits are computed again in the backward pass.
        if torch.is_grad_enabled():
            logp, entropy = checkpoint(chunk, hidden, target, use_reentrant=False)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            logp, entropy = chunk(hidden, target)
        logps.append(logp)
        entropies.append(entropy)
    return torch.cat(logps), torch.cat(entropies)


class _LogprobAndEntropy(torch.autograd.Function):
    """Function from logits [C, V] to log pi(target) [C] and entropy [C]; float32, a few rows at a time.

    It keeps the logits themselves and three numbers per row for the backward pass. The backward pass is written by
    hand, because autograd would keep and read several arrays of [C, V]. The gradient overwrites the logits (autograd
    raises an error if another operation needs them in its backward pass). With pi = softmax(x): d logp / dx_j = [j =
    target] - pi_j, and d entropy / dx_j = -pi_j (log pi_j + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, temperature: float, banned: Tensor | None, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor]:
        logp, entropy, lse = (torch.empty(len(logits), device=logits.device) for _ in range(3))
        for rows in _blocks(logits):
            # [rows, V], float32
            x = policy_logits(logits[rows], temperature, banned)
            lse[rows] = x.logsumexp(-1)
            logp[rows] = x.gather(-1, target[rows, None])[:, 0] - lse[rows]
            x = x - lse[rows, None]
            p = x.exp()
            entropy[rows] = -_p_logp(p, x).sum(-1)
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
        for rows in _blocks(logits):
            logp = policy_logits(logits[rows], ctx.temperature, ctx.banned) - lse[rows, None]
            g = logp.exp().mul_(-logp_grad[rows, None])
            g.scatter_add_(-1, target[rows, None], logp_grad[rows, None])
            if ctx.entropy_gradient:
                p = logp.exp()
                pull = _p_logp(p, logp)
                g -= pull.add_(p.mul_(entropy[rows, None])).mul_(entropy_grad[rows, None])
            if ctx.banned is not None:
                g.masked_fill_(ctx.banned, 0.0)
            grad[rows] = g.div_(ctx.temperature)
        return grad, None, None, None, None


def _p_logp(p: Tensor, logp: Tensor) -> Tensor:
    """Return p log p, 0 where p is 0. Overwrites `logp`."""
    return logp.masked_fill_(p == 0, 0.0).mul_(p)


def _blocks(logits: Tensor) -> Iterator[slice]:
    size = max(1, chunks_for(logits.device).block // logits.shape[-1])
    return (slice(start, start + size) for start in range(0, len(logits), size))


def full_kl(
    hidden_KD: Tensor,
    ref_hidden_KD: Tensor,
    head: Callable[[Tensor], Tensor],
    ref_head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    banned_ids: Sequence[int] = (),
) -> Tensor:
    """Return KL(policy || reference) at each position, summed over the whole vocabulary, chunk by chunk.

    Letters: K positions, D hidden width (the reference may have another), V vocabulary.

    Args:
        hidden_KD, ref_hidden_KD: last hidden states of the policy and of the reference at the same positions; those of
            the reference get no gradient.
        head, ref_head: functions from hidden states to logits [.., V].
        temperature, banned_ids: the policy's; they apply to both distributions.
    Returns: [K] with gradient to `hidden_KD` and `head`, float32, in nats, never negative except for rounding.
    Example: policy (0.5, 0.5), reference (0.25, 0.75): 0.5 ln 2 + 0.5 ln (2 / 3) = 0.1438.
    """

    def chunk(hidden: Tensor, ref_hidden: Tensor) -> Tensor:
        logits = head(hidden)
        logp = torch.log_softmax(policy_logits(logits, temperature, banned), dim=-1)
        with torch.no_grad():
            ref = torch.log_softmax(policy_logits(ref_head(ref_hidden), temperature, banned), dim=-1)
        # A banned id has probability 0 in both distributions: its term is set to 0 instead of 0 * (inf - inf) = NaN.
        difference = logp - ref if banned is None else (logp - ref).masked_fill(banned, 0.0)
        return (logp.exp() * difference).sum(-1)

    if len(hidden_KD) == 0:
        return hidden_KD.sum(-1).float()
    vocabulary = head(hidden_KD[:1].detach()).shape[-1]
    banned = banned_mask(banned_ids, vocabulary, hidden_KD.device)  # built once: each build makes a GPU wait
    size = max(1, chunks_for(hidden_KD.device).positions(vocabulary) // 2)  # two distributions are held at once
    pieces = []
    for hidden, ref_hidden in zip(hidden_KD.split(size), ref_hidden_KD.split(size), strict=True):
        if torch.is_grad_enabled() and len(hidden_KD) > size:
            pieces.append(checkpoint(chunk, hidden, ref_hidden, use_reentrant=False))
        else:
            pieces.append(chunk(hidden, ref_hidden))
    return torch.cat(pieces)
