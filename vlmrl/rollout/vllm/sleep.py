"""Sleep of an engine's worker: tensors that vLLM does not bring back, and a check of the memory that sleep frees.

vLLM's sleep of level 2 discards the memory in which it built the model. On wake, vLLM restores registered buffers, and
the trainer sends the parameters. A tensor that is neither is undefined then: Qwen3-VL keeps the inputs of its first
layers (deep-stack) in a plain list, and other models keep tables, such as the experts of a rank. Every sleep also
discards the key-value cache. vLLM builds it from zeros, and some attention kernels multiply numbers that no request has
written with a weight of 0, which is NaN if they are not finite.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vlmrl.errors import EngineError

SAVED_BYTES = 64 << 20
"""Maximum size of a tensor that is copied to main memory while the engine sleeps; a larger one is zeroed on wake.

A table that the model needs is far smaller. Larger tensors are work buffers: no request is open during sleep, so their
numbers are not needed, but they must be finite, and vLLM's models take 0 for "no input". A copy of each would take main
memory on every rank and seconds per step.
"""
SLACK_SHARE, SLACK_BYTES = 0.02, 128 << 20
"""Allowed lack of freed memory after sleep: a share of the plan, and at least so many bytes.

The key-value cache is rounded down to whole blocks of all layers (a few MB), and the first copies of a sleep let the
CUDA driver and cuBLAS allocate workspaces of their own, 8 to 100 MB.
"""
GIB = 1 << 30


Kind = Literal["model", "cache"]
"""Memory that sleep discards: "model" at level 2, and waking the weights maps it again; "cache" at both levels, and
waking the rest maps it again."""


class SleepingMemory(Protocol):
    """Memory of a worker's device, and what of it sleep discards."""

    def free_bytes(self) -> int:
        """Return the free memory of the device, after all its work is done."""
        ...

    def kind(self, tensor: Tensor) -> Kind | None:
        """Return what kind of memory the tensor is in. None = sleep does not touch it, or vLLM brings it back."""
        ...


class LooseTensors:
    """Tensors of a model that are neither parameters nor buffers, kept over a sleep that discards them."""

    def __init__(self) -> None:
        self._saved: list[tuple[Tensor, Tensor | None]] = []
        self._caches: list[Tensor] = []

    def save(self, model: nn.Module, memory: SleepingMemory, *, discards: bool) -> None:
        """Note the tensors that will be discarded, and copy those of at most `SAVED_BYTES` to main memory.

        Args:
            discards: whether the model's memory is discarded, and not only the cache.
        """
        kinds = [(memory.kind(tensor), tensor) for tensor in loose_tensors(model).values()]
        self._caches = [tensor for kind, tensor in kinds if kind == "cache"]
        lost = [tensor for kind, tensor in kinds if kind == "model" and discards]
        self._saved = [(t, t.detach().to("cpu", copy=True) if t.nbytes <= SAVED_BYTES else None) for t in lost]

    @torch.inference_mode()  # some tensors were made in this mode, and torch lets nobody change them outside of it
    def restore(self, *, cache: bool) -> None:
        """Give each tensor its saved numbers, or zeros. What was restored before is left alone.

        Args:
            cache: whether the memory of the cache is mapped again, too.
        """
        # Zeros first: a small tensor can be a view of a large one.
        for tensor, _ in self._saved:
            tensor.zero_()
        for tensor, saved in self._saved:
            if saved is not None:
                tensor.copy_(saved)
        self._saved = []
        if cache:
            for tensor in self._caches:
                tensor.zero_()
            self._caches = []


def loose_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return path -> tensor of all tensors that the model's modules hold and that are neither parameters nor buffers.

    Attributes of modules are searched, also inside lists, tuples, dicts, and objects of the module's own package (an
    attention backend, for example). A tensor in the memory of a parameter or buffer is left out: it is a view of it.
    """
    registered = {t.untyped_storage().data_ptr() for t in chain(model.parameters(), model.buffers())}
    seen: set[int] = set()
    loose: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        package = type(module).__module__.partition(".")[0]
        own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for path, tensor in _tensors_in(own, name, package, seen):
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in registered:
                loose[path] = tensor
    return loose


def _tensors_in(root: dict[str, Any], name: str, package: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of all tensors below `root`, each once. No recursion: such objects can be nested deeply."""
    waiting: list[tuple[str, Any]] = [(name, root)]
    while waiting:
        path, value = waiting.pop()
        if value is not root:
            if id(value) in seen:
                continue
            seen.add(id(value))
        if isinstance(value, Tensor):
            # Others have no memory of their own: torch.compile leaves its stand-ins (FakeTensor) in vLLM's objects.
            if type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and value.device.type != "meta":
                yield path, value
        elif isinstance(value, dict):
            waiting += [(f"{path}.{key}", x) for key, x in value.items() if not _is_plain(x)]
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting += [(f"{path}.{i}", x) for i, x in enumerate(value) if not _is_plain(x)]
        elif not isinstance(value, (nn.Module, type)) and type(value).__module__.partition(".")[0] == package:
            waiting += [(f"{path}.{key}", x) for key, x in getattr(value, "__dict__", {}).items() if not _is_plain(x)]


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (str, bytes, int, float))


def planned_bytes(model: nn.Module, cache_bytes: int) -> int:
    """Return the bytes that sleep has to free: the model's parameters, each memory once, and the key-value cache."""
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    return sum(storages.values()) + cache_bytes


def check_freed(before: int, after: int, planned: int) -> None:
    """Raise an EngineError when sleep freed less than planned.

    Args:
        before, after: free memory of the GPU before and after the engine went to sleep, in bytes.
        planned: bytes of the engine's weights and key-value cache on this GPU.
    """
    freed, slack = after - before, max(SLACK_BYTES, int(SLACK_SHARE * planned))
    if freed < planned - slack:
        raise EngineError(
            f"sleep of the engine freed {freed / GIB:.2f} GiB of its GPU, and its weights and key-value cache take"
            f" {planned / GIB:.2f} GiB; the free memory was {before / GIB:.2f} GiB before and {after / GIB:.2f} GiB"
            " after",
            hint="another program may have allocated memory on the GPU at the same time (see nvidia-smi);"
            ' rollout.engine = "torch" needs no sleep',
        )
