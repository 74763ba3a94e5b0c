"""What makes a GPU wait for the CPU, or the CPU for it: numbers read back, tensors made from Python lists. Countable on
a CPU, too.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode

READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero", "equal")
UPLOADS = ("tensor", "as_tensor", "from_numpy")


class Waits(TorchFunctionMode):
    """Counts calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in READS or name in UPLOADS:
            self.count[name] += 1
        elif name in ("__setitem__", "__getitem__") and isinstance(args[1], list):
            self.count["list as index"] += 1
        elif name == "__getitem__" and getattr(args[1], "dtype", None) is torch.bool:
            self.count["mask as index"] += 1
        return func(*args, **(kwargs or {}))

    @property
    def reads(self) -> int:
        """How often a number was asked of the device."""
        return sum(n for name, n in self.count.items() if name not in UPLOADS and name != "list as index")
