"""Numbers of an update, kept on the device that makes them and read once: each reading makes the CPU wait for it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Tally:
    """Sums and maxima over the rows of an update, by name. All float64."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._most: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a number to a sum."""
        value = value.detach().double()
        self._sums[name] = value if name not in self._sums else self._sums[name] + value

    def top(self, name: str, value: Tensor) -> None:
        """Raise a maximum to a number."""
        value = value.detach().double()
        self._most[name] = value if name not in self._most else torch.maximum(self._most[name], value)

    def read(self) -> dict[str, float]:
        """All sums and maxima, in the order of their first numbers; one copy from the device."""
        every = self._sums | self._most
        return dict(zip(every, torch.stack(list(every.values())).tolist(), strict=True)) if every else {}


def on_cpu(by: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Tensors of one device and dtype, [tokens] each, on the CPU; one copy of them all."""
    if not by:
        return {}
    lengths = [len(x) for x in by.values()]
    return dict(zip(by, torch.cat(list(by.values())).cpu().split(lengths), strict=True))
