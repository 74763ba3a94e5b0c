"""Handles of GPU memory (CUDA IPC) in a declared form: JSON with checked fields instead of a pickle.

Not tried on a GPU yet. The fields are the arguments of torch's own `rebuild_cuda_tensor`, which multiprocessing queues
use; see torch/multiprocessing/reductions.py.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from vlmrl.errors import EngineError

MAX_HANDLE_BYTES = 4096
"""Maximum size of each of CUDA's opaque values. Handles have 64 bytes; those of expandable segments have more."""
NUMBERS = ("size_bytes", "offset_bytes", "counter_offset", "offset")
OPAQUE = ("handle", "counter", "event")


def export(tensor: Tensor) -> dict[str, Any]:
    """Return the handle of a tensor on a GPU. The tensor must live until the receiver has copied it."""
    arguments: tuple[Any, ...] = reduce_tensor(tensor)[1]
    device, handle, size_bytes, offset_bytes = arguments[6:10]
    counter, counter_offset, event, event_sync = arguments[11:15]
    return {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "handle": _text(handle),
        "size_bytes": size_bytes,
        "offset_bytes": offset_bytes,
        "counter": _text(counter),
        "counter_offset": counter_offset,
        "event": _text(event),
        "event_sync": bool(event_sync),
        "offset": tensor.storage_offset(),
        "stride": list(tensor.stride()),
    }


def open_tensor(handle: Mapping[str, Any], shape: list[int], dtype: torch.dtype) -> Tensor:
    """Return another process's tensor, in its memory. Copy it, and delete the result, before replying.

    Raises: EngineError when the fields are not those of a handle, or the GPU is not visible here.
    """
    fields = checked(handle, len(shape))
    return rebuild_cuda_tensor(
        Tensor,
        torch.Size(shape),
        tuple(fields["stride"]),
        fields["offset"],
        torch.storage.TypedStorage,
        dtype,
        _local_gpu(fields["gpu"]),
        fields["handle"],
        fields["size_bytes"],
        fields["offset_bytes"],
        False,
        fields["counter"],
        fields["counter_offset"],
        fields["event"],
        fields["event_sync"],
    )


def checked(handle: Mapping[str, Any], dimensions: int) -> dict[str, Any]:
    """Return the fields of a handle with its opaque values as bytes. Raises: EngineError for anything else."""
    try:
        opaque = {name: base64.b64decode(handle[name], validate=True) for name in OPAQUE}
        stride = handle["stride"]
        numbers = [handle[name] for name in NUMBERS] + stride
        valid = (
            handle.keys() == {"gpu", "event_sync", "stride", *NUMBERS, *OPAQUE}
            and all(type(n) is int and 0 <= n < 1 << 48 for n in numbers)
            and all(len(x) <= MAX_HANDLE_BYTES for x in opaque.values())
            and len(stride) == dimensions
            and type(handle["gpu"]) is str
            and type(handle["event_sync"]) is bool
        )
    except (KeyError, TypeError, binascii.Error) as error:
        raise EngineError(f"a message is no handle of GPU memory: {error!r}") from error
    if not valid:
        raise EngineError("a message is no handle of GPU memory: a field has a wrong type or size")
    return {**handle, **opaque}


def _local_gpu(uuid: str) -> int:
    """Return this process's number of a GPU."""
    for i in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(i).uuid) == uuid:
            return i
    raise EngineError(
        f"the engine's process does not see the trainer's GPU {uuid}",
        hint='rollout.weight_transport = "socket" needs no common GPU',
    )


def _text(value: bytes | None) -> str:
    return base64.b64encode(value or b"").decode()
