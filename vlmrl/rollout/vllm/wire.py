"""Messages between a trainer and an engine in a separate process: a JSON header and raw bytes, nothing pickled.

A message is 8 bytes of little-endian header length, the header (a JSON object whose `blobs` are the lengths of the
blobs in bytes), and the blobs. Handles of GPU memory (CUDA IPC) are JSON with the arguments of torch's own
`rebuild_cuda_tensor` (torch/multiprocessing/reductions.py), checked.

The parts of the weights that one worker of an engine in parts (tensor parallel) keeps are learned by watching its
loader. While a model loads its weights for the first time, every read of a sent tensor is recorded as (offset, size,
stride). vLLM's loaders cut a tensor by shape and rank alone, so later loads read the same, and later syncs send only
these numbers. The rest of the tensor is NaN, so a read that was not foreseen ends in the check after the sync.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef, rebuild_cuda_tensor, reduce_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vlmrl.data.encode import EncodedPrompt
from vlmrl.errors import EngineError
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.types import Media, Row, Sample

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


MAX_HEADER_BYTES = 1 << 30
KNOWN_BYTES = 1 << 31
"""Maximum size of the pixels that an engine keeps for each trainer; above it, the engine forgets all of them."""
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.bfloat16, torch.float16, torch.int64)}


def send(to: socket.socket, header: Mapping[str, Any], blobs: Sequence[bytes | memoryview] = ()) -> None:
    """Send a message. Raises: EngineError when the connection is closed."""
    text = json.dumps({**header, "blobs": [len(b) for b in blobs]}).encode()
    try:
        to.sendall(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            to.sendall(blob)
    except OSError as error:
        raise EngineError(f"the engine's connection was closed by the other end: {error}") from error


def receive(source: socket.socket) -> tuple[dict[str, Any], list[bytearray]]:
    """Return the next message: (header, blobs).

    Raises: EngineError when the connection is closed, or the received bytes are not a message.
    """
    (length,) = struct.unpack("<Q", _exactly(source, 8))
    if length > MAX_HEADER_BYTES:
        raise EngineError("the bytes received over the engine's connection are not a message")
    header = json.loads(_exactly(source, length))
    return header, [_exactly(source, n) for n in header.pop("blobs")]


def _exactly(source: socket.socket, count: int) -> bytearray:
    buffer = bytearray(count)
    view = memoryview(buffer)
    try:
        while view:
            count_read = source.recv_into(view, min(len(view), 1 << 30))
            if not count_read:
                raise EngineError("the engine's connection was closed by the other end")
            view = view[count_read:]
    except OSError as error:
        raise EngineError(f"the engine's connection was closed by the other end: {error}") from error
    return buffer


def entry(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return the description of a tensor in a message."""
    return {"tensor": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def pack_tensor(
    name: str, tensor: Tensor, regions: Sequence[Region] | None = None
) -> tuple[dict[str, Any], list[memoryview]]:
    """Return (header, blobs) of one tensor under its name.

    Args:
        regions: the only numbers that are sent, a blob each; None = all.
    """
    header = entry(name, tensor)
    if regions is not None:
        header["regions"] = regions
    pieces = [tensor.detach()] if regions is None else cut(tensor, regions)
    return header, [p.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data for p in pieces]


def unpack_tensor(header: Mapping[str, Any], blobs: Sequence[bytearray]) -> tuple[str, Tensor]:
    """Return (name, tensor) of a message of `pack_tensor`; NaN where nothing was sent."""
    dtype = DTYPES[header["dtype"]]
    pieces = (torch.frombuffer(blob, dtype=dtype) for blob in blobs)
    if "regions" not in header:
        return header["tensor"], next(pieces).view(header["shape"])
    return header["tensor"], paste(pieces, header["regions"], header["shape"], dtype)


@dataclass
class Known:
    """Images that the other end has: their hashes, and the bytes that they take there."""

    hashes: set[str] = field(default_factory=set)
    bytes: int = 0

    def forget(self) -> bool:
        """Return whether there are too many. If so, both ends forget all of them."""
        if self.bytes <= KNOWN_BYTES:
            return False
        self.hashes.clear()
        self.bytes = 0
        return True


def pack_requests(requests: Sequence[SamplingRequest], known: Known) -> tuple[list[dict[str, Any]], list[bytes]]:
    """Return requests as (JSON values, blobs): images by hash, and pixels of those that the other end does not have.

    Args:
        known: images that the other end has; those that are sent are added.
    """
    packed: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for r in requests:
        e, pictures = r.prompt, []
        for media, picture in zip(e.row.media, e.pictures, strict=True):
            pictures.append({"hash": media.sha256, "new": media.sha256 not in known.hashes})
            if media.sha256 not in known.hashes:
                pictures[-1]["size"] = picture.size
                blobs.append(picture.convert("RGB").tobytes())
                known.hashes.add(media.sha256)
                known.bytes += len(blobs[-1])
        packed.append(
            {
                "source": e.row.source,
                "row": e.row.prompt_id,
                "samples": r.num_samples,
                "seed": r.seed,
                "ids": list(e.prompt_ids),
                "unexpanded": list(e.unexpanded_ids),
                "pictures": pictures,
            }
        )
    return packed, blobs


def unpack_requests(
    packed: Sequence[Mapping[str, Any]], blobs: Sequence[bytes | bytearray], pictures: dict[str, Image.Image]
) -> list[SamplingRequest]:
    """Return the requests that `pack_requests` packed.

    Args:
        pictures: by hash; newly sent images are added.
    """
    remaining = iter(blobs)
    requests = []
    for p in packed:
        for picture in p["pictures"]:
            if picture["new"]:
                pictures[picture["hash"]] = Image.frombytes("RGB", tuple(picture["size"]), bytes(next(remaining)))
        media = tuple(Media(x["hash"], *pictures[x["hash"]].size) for x in p["pictures"])
        prompt = EncodedPrompt(
            row=Row(p["row"], p["source"], "", {}, media),
            text="",
            prompt_ids=tuple(p["ids"]),
            kinds=(),
            images={},
            num_images=len(p["pictures"]),
            num_image_tokens=0,
            image_sizes=(),
            unexpanded_ids=tuple(p["unexpanded"]),
            pictures=tuple(pictures[x["hash"]] for x in p["pictures"]),
        )
        requests.append(SamplingRequest(prompt, p["samples"], p["seed"]))
    return requests


def pack_samples(answers: Sequence[Sequence[Sample]]) -> list[list[list[Any]]]:
    """Return samples as JSON values. Floats are preserved exactly."""
    return [
        [[list(s.token_ids), s.text, list(s.sampler_logp), s.finish, s.version, s.seed] for s in samples]
        for samples in answers
    ]


def unpack_samples(packed: Sequence[Sequence[Sequence[Any]]]) -> list[list[Sample]]:
    """Return the samples that `pack_samples` packed."""
    return [
        [Sample(tuple(i), text, tuple(p), finish, version, seed) for i, text, p, finish, version, seed in samples]
        for samples in packed
    ]


MAX_HANDLE_BYTES = 1 << 16
"""Maximum size of each of CUDA's opaque values. Handles have 64 bytes; those of expandable segments have up to 64 for
each segment of 20 MiB."""
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
        raise EngineError(f"a message is not a handle of GPU memory: {error!r}") from error
    if not valid:
        raise EngineError("a message is not a handle of GPU memory: a field has a wrong type or size")
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
