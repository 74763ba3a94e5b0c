"""How many bytes of tensors are alive at most: every tensor that an operation makes is counted until it is gone."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TensorBytes(TorchDispatchMode):
    """Inside, live storages are counted. Attributes: now, peak: bytes."""

    def __init__(self, monkeypatch: Any) -> None:
        super().__init__()
        self._live: dict[int, tuple[Any, int]] = {}
        self.now = self.peak = 0
        for name in ("alloc_storage", "free_storage"):  # FSDP resizes storages behind the dispatcher's back
            monkeypatch.setattr(_fsdp_param, name, self._watched(getattr(_fsdp_param, name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return out

    def begin(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def _count(self, tensor: torch.Tensor) -> None:
        storage = getattr(tensor, "_local_tensor", tensor).untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._live.get(key)
        if known is not None and known[0]() is storage:
            self.now += size - known[1]
            self._live[key] = known[0], size
        else:
            self._live[key] = weakref.ref(storage, lambda _: self._gone(key)), size
            self.now += size
        self.peak = max(self.peak, self.now)

    def _gone(self, key: int) -> None:
        found = self._live.pop(key, None)
        self.now -= found[1] if found else 0

    def _watched(self, change: Any) -> Any:
        def changed(tensor: torch.Tensor) -> None:
            change(tensor)
            self._count(tensor)

        return changed
