"""Messages between a run and the process of a logger: JSON, then raw bytes (image files).

They use the same frames as the workers of rewards. Both ends are vlmrl's own code. Messages need no number, because
they are answered in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmrl.rewards.sandbox.frames import TOKEN_BYTES, WHOLE, FrameBuffer, pack_frame

TOKEN = b"logger".ljust(TOKEN_BYTES)


def pack(body: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Encode one message. NaN and infinities are kept; a value that JSON cannot represent is replaced by its text."""
    return pack_frame(TOKEN, 0, WHOLE, os.getpid(), dict(body), blobs)


class Messages:
    """Buffer that collects received bytes and yields each message when it is complete."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer(TOKEN)

    def take(self, data: bytes) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Yield the messages that these bytes complete, each as (JSON object, blobs).

        Raises: GarbledError for bytes that are not a message.
        """
        self._buffer.feed(data)
        while (frame := self._buffer.pop()) is not None:
            yield frame.body, frame.blobs
