"""The wire format between a scorer and its workers: length-prefixed JSON, then raw bytes (image pixels). No pickle.

Frame: 4 bytes big-endian length, that many bytes of JSON (an object), then the blobs whose lengths are in its `blobs`.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Sequence
from typing import Any

PREFIX = struct.Struct(">I")
CONTRACT = "contract"
"""`kind` of an error in which nothing was raised: what came back is not a score."""


def pack_frame(header: dict[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """One frame as bytes. NaN and infinities are kept; a value that JSON cannot hold becomes its text."""
    head = json.dumps({**header, "blobs": [len(b) for b in blobs]}, ensure_ascii=True, default=str).encode()
    return b"".join((PREFIX.pack(len(head)), head, *blobs))


class FrameBuffer:
    """Bytes as they come, frames as they are complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def pop(self) -> tuple[dict[str, Any], list[bytes]] | None:
        """The next complete frame as (header, blobs), or None while it is not all there."""
        if len(self._bytes) < PREFIX.size:
            return None
        start = PREFIX.size + PREFIX.unpack_from(self._bytes)[0]
        if len(self._bytes) < start:
            return None
        header = json.loads(self._bytes[PREFIX.size : start])
        ends = [start]
        for size in header.pop("blobs"):
            ends.append(ends[-1] + size)
        if len(self._bytes) < ends[-1]:
            return None
        blobs = [bytes(self._bytes[a:b]) for a, b in itertools.pairwise(ends)]
        del self._bytes[: ends[-1]]
        return header, blobs
