"""Functions from hidden states to numbers per token: log-prob, entropy, and the divergence from another model.

They work chunk by chunk: the logits `[T, V]` never exist all at once. A distribution is log-softmax(logits /
temperature) with banned ids at -inf. All numbers from the logits on are float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vlmrl.model.device_memory import free_bytes, upload
from vlmrl.model.memory import HeadChunks, head_chunks


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


def _blocks(logits: Tensor, parts: int = 1) -> Iterator[slice]:
    size = max(1, chunks_for(logits.device).block // logits.shape[-1] // parts)
    return (slice(start, start + size) for start in range(0, len(logits), size))


@torch.no_grad()
def gradient_energy(
    hidden_KD: Tensor,
    target_K: Tensor,
    head: Callable[[Tensor], Tensor],
    *,
    temperature: float,
    banned_ids: Sequence[int] = (),
) -> Tensor:
    """Return the squared size of d log pi(target) / d logits at each position, for logits divided by the temperature.

    With pi = softmax(logits) it is (1 - pi_target)^2 plus the sum of all other pi_j^2.

    Args:
        hidden_KD, target_K, head, temperature, banned_ids: see `token_logprobs`.
    Returns: [K] float32, between 0 and 2, without gradient.
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
        if not self.top_k or self.top_k >= logp.shape[-1]:
            value, pull = self._of_outcomes(logp, ref)
        else:
            ids = ref.topk(self.top_k).indices  # [T, k]
            # [T, V] -> [T, k + 1] -> [T, V]
            outcomes, theirs = (torch.cat([x.gather(-1, ids), _rest(x, ids)], -1) for x in (logp, ref))
            value, pull = self._of_outcomes(outcomes, theirs)
            pull = pull[:, -1:].expand_as(logp).scatter(-1, ids, pull[:, :-1])
        p = logp.exp()
        return value, p - (logp + pull).exp() if self.kind == "forward" else p * pull

    def _of_outcomes(self, logp: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        """Return (value, pull). The gradient for a logit is p * pull; for "forward", p - p * exp(pull)."""
        d = (ref - logp).nan_to_num(0.0, 0.0, 0.0)  # an impossible outcome has -inf - -inf
        if self.kind == "forward":
            return (ref.exp() * d).sum(-1), d
        if self.kind == "reverse":
            value = -(logp.exp() * d).sum(-1)
            return value, -d - value[:, None]
        p, q, w = logp.exp(), ref.exp(), self.weight
        # log m - log p: 0 exactly where p = q, and without overflow where they are far apart.
        m = torch.where(d <= 0, (w * d.expm1()).log1p(), d + ((1 - w) * (-d).expm1()).log1p())
        pull = (w - 1) * m
        mean = (p * pull).sum(-1)
        return mean + w * (q * (d - m)).sum(-1), pull - mean[:, None]


def _rest(logp: Tensor, ids: Tensor) -> Tensor:
    """Return the log-prob of all outcomes but `ids` together: [T, V], [T, k] -> [T, 1]."""
    return logp.scatter(-1, ids, -math.inf).logsumexp(-1, keepdim=True)


class _DivergenceOfLogits(torch.autograd.Function):
    """Function from logits [C, V] of two models to their divergence [C], with a gradient for the first alone."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, theirs: Tensor, settings: Divergence, temperature: float, banned: Tensor | None
    ) -> Tensor:
        value, grad = torch.empty(len(logits), device=logits.device), torch.empty_like(logits)
        for rows in _blocks(logits, 4):  # `of` holds several arrays at once
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
