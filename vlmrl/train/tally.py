"""Sums and maxima of an update, among them the difference between the sampling engine and the trained policy.

They stay on the device and are copied to the CPU once, because each copy makes the CPU wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vlmrl.algo.losses import LOG_RATIO_LIMIT, k3

PREFIX = "mismatch/"
"""Prefix of the names in a tally that belong to `Mismatch`."""


class Tally:
    """Sums and maxima over the packed rows of an update, by name. All are float64 scalars on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a number to a sum."""
        value = value.detach().double()
        self._sums[name] = value if name not in self._sums else self._sums[name] + value

    def top(self, name: str, value: Tensor) -> None:
        """Raise a maximum to a number, if that is larger."""
        value = value.detach().double()
        self._most[name] = value if name not in self._most else torch.maximum(self._most[name], value)

    def read(self) -> dict[str, float]:
        """Return all sums, then all maxima, in the order in which they began, with one copy from the device."""
        numbers = self._sums | self._most
        return dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True)) if numbers else {}


def on_cpu(by: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return tensors of one device and dtype, [tokens] each, on the CPU, with one copy for all of them."""
    if not by:
        return {}
    lengths = [len(x) for x in by.values()]
    return dict(zip(by, torch.cat(list(by.values())).cpu().split(lengths), strict=True))


@torch.no_grad()
def tally_mismatch(tally: Tally, logp_K: Tensor, sampler_logp_K: Tensor) -> None:
    """Add these tokens to the sums that `Mismatch.of` reads.

    Args:
        logp_K: the trainer's log-probs, in nats.
        sampler_logp_K: the engine's log-probs, in nats; NaN where no token was sampled: not counted.
    """
    if not len(logp_K):
        return
    sampled = ~torch.isnan(sampler_logp_K)
    sampler_logp_64 = sampler_logp_K.double()
    d = torch.where(sampled, logp_K.double() - sampler_logp_64, 0.0)
    weight = torch.where(sampled, d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp(), 0.0)
    # [K] -> one scalar per sum. Tokens that were not sampled have d = 0 and weight = 0.
    sums = {
        "tokens": sampled,
        "gap": d.abs(),
        "k3": k3(-d, torch.zeros_like(d)),
        "weight": weight,
        "square": weight.square(),
    }
    for name, values in sums.items():
        tally.add(f"{PREFIX}{name}", values.sum())
    tally.top(f"{PREFIX}gap_max", d.abs().max())


@dataclass
class Mismatch:
    """Sums over sampled tokens, with d = trainer - engine log-prob in nats and w = exp(d), the importance weight.

    Args:
        tokens: number of sampled tokens.
        gap, k3, weight, square: sums of |d|, w - 1 - d, w and w^2.
        gap_max: largest |d|.
    Example: d = 0 and d = ln 2: gap_mean 0.3466, k3 0.1534, effective share (1 + 2)^2 / (2 * (1 + 4)) = 0.9.
    """

    tokens: int = 0
    gap: float = 0.0
    k3: float = 0.0
    weight: float = 0.0
    square: float = 0.0
    gap_max: float = 0.0

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> Mismatch:
        """Return the sums of `tally_mismatch` from the numbers of a tally."""
        sums = {f.name: numbers.get(f"{PREFIX}{f.name}", 0.0) for f in fields(cls)}
        tokens = int(sums.pop("tokens"))
        return cls(tokens, **sums)

    @classmethod
    def joined(cls, parts: Sequence[Mismatch]) -> Mismatch:
        """Merge the sums of several ranks."""
        merged = cls()
        for part in parts:
            for name in ("tokens", "gap", "k3", "weight", "square"):
                setattr(merged, name, getattr(merged, name) + getattr(part, name))
            merged.gap_max = max(merged.gap_max, part.gap_max)
        return merged

    @property
    def gap_mean(self) -> float:
        """Mean |d|; 0 without tokens."""
        return self.gap / max(1, self.tokens)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the difference, over all sampled tokens.

        `policy/sampler_gap_mean` and `_max`: mean and largest |d|, in nats. `policy/sampler_k3`: an estimate of
        KL(engine || trainer), in nats. `policy/sampler_ess`: effective sample size as a share of the tokens,
        (sum w)^2 / (tokens * sum w^2), in (0, 1].

        Source: k3: J. Schulman, "Approximating KL divergence" (2020). Effective sample size: A. Kong (1992).
        """
        effective = self.weight**2 / (self.tokens * self.square) if self.tokens else 1.0
        return {
            "policy/sampler_gap_mean": self.gap_mean,
            "policy/sampler_gap_max": self.gap_max,
            "policy/sampler_k3": self.k3 / max(1, self.tokens),
            "policy/sampler_ess": effective,
        }
