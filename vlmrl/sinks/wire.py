"""Messages between a run and the process of a logger: JSON, then raw bytes (image files), in the frames of rewards.

Both ends are vlmrl's own code, and a message has no number: messages are answered in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmrl.rewards.sandbox.frames import TOKEN_BYTES, WHOLE, FrameBuffer, pack_frame

TOKEN = b"logger".ljust(TOKEN_BYTES)


def pack(body: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Return one message as bytes. NaN and infinities are kept; a value that JSON cannot hold becomes its text."""
    return pack_frame(TOKEN, 0, WHOLE, os.getpid(), dict(body), blobs)


class Messages:
    """Buffer that takes bytes as they come and yields messages when they are complete."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer(TOKEN)

    def take(self, data: bytes) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Yield the messages that these bytes complete, each as (JSON object, blobs).

        Raises: GarbledError for bytes that are no message.
        """
        self._buffer.feed(data)
        while (frame := self._buffer.pop()) is not None:
            yield frame.body, frame.blobs
