"""Parts of the weights that one worker of an engine in parts (tensor parallel) keeps, found by watching its loader.

While a model loads its weights for the first time, every read of a sent tensor is recorded as (offset, size, stride) in
that tensor. vLLM's loaders cut a tensor by shape and rank alone, so later loads read the same. Later syncs send only
these numbers; the rest of the tensor is NaN, so a read that was not foreseen ends in the check after the sync.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Region = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Numbers of a contiguous tensor: (offset, size, stride), as `torch.as_strided` takes them."""


class WatchedLoad(TorchDispatchMode):
    """Context manager: record which numbers of the watched tensors are read inside."""

    def __init__(self) -> None:
        super().__init__()
        self._shapes: dict[str, torch.Size] = {}
        self._whole: set[str] = set()
        self._reads: dict[str, set[Region]] = {}
        # Address of a tensor's memory -> (that memory, its name). An address is used again when the memory is freed.
        self._names: dict[int, tuple[StorageWeakRef, str]] = {}

    def watch(self, name: str, tensor: Tensor) -> Tensor:
        """Record the reads of a tensor from now on, and return it."""
        self._shapes[name] = tensor.shape
        storage = tensor.untyped_storage()
        self._names[storage.data_ptr()] = (StorageWeakRef(storage), name)
        # A tensor that shares its memory with others cannot be told from them, nor can one that is no array in order.
        full = storage.nbytes() == tensor.nbytes and tensor.is_contiguous()
        if not (full and tensor.is_floating_point()):
            self._whole.add(name)
        return tensor

    def kept(self) -> dict[str, list[Region]]:
        """Return name -> regions of the tensors that need not be sent whole.

        Left out, and so sent whole: tensors of which everything is read, and those that no operation of torch read (a
        loader could have read them in a way that is not seen here).
        """
        return {
            name: sorted(regions)
            for name, regions in self._reads.items()
            if name not in self._whole and sum(math.prod(size) for _, size, _ in regions) < self._shapes[name].numel()
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and record what it reads; a view reads nothing."""
        if not func.is_view:
            for value in tree_leaves((args, kwargs or {})):
                if isinstance(value, Tensor) and value.device.type != "meta" and value.layout == torch.strided:
                    self._record(value)
        return func(*args, **(kwargs or {}))

    def _record(self, tensor: Tensor) -> None:
        memory, name = self._names.get(tensor.untyped_storage().data_ptr(), (None, ""))
        if memory is None or memory.expired() or not tensor.numel():
            return
        if 0 in tensor.stride():  # expanded: a number is read more than once
            self._whole.add(name)
        region = (int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride()))
        self._reads.setdefault(name, set()).add(region)


def cut(tensor: Tensor, regions: Sequence[Region]) -> list[Tensor]:
    """Return the numbers of each region of a tensor, contiguous."""
    flat = tensor.detach().contiguous()
    return [flat.as_strided(size, stride, offset).contiguous() for offset, size, stride in regions]


def paste(pieces: Iterator[Tensor], regions: Sequence[Region], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a tensor of the whole shape with the numbers of `cut`, on their device; NaN elsewhere."""
    whole: Tensor | None = None
    for piece, (offset, size, stride) in zip(pieces, regions, strict=True):
        if whole is None:
            whole = torch.full(tuple(shape), math.nan, dtype=dtype, device=piece.device)
        whole.as_strided(size, stride, offset).copy_(piece.view(size))
    assert whole is not None, "no region"
    return whole
