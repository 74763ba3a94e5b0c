"""Messages between a trainer and an engine in a separate process: a JSON header and raw bytes, nothing pickled.

A message is 8 bytes of little-endian header length, the header (a JSON object whose `blobs` are the lengths of the
blobs in bytes), and the blobs.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vlmrl.data.encode import EncodedPrompt
from vlmrl.errors import EngineError
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.rollout.vllm.kept_parts import Region, cut, paste
from vlmrl.types import Media, Row, Sample

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
        raise EngineError("the bytes received over the engine's connection are no message")
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
