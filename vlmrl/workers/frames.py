"""Wire format between a pool and its workers: numbered frames of JSON, then raw bytes (such as pixels). No pickle.

A frame begins with `HEAD`: the token of the worker (16 random bytes that no stray write can contain), the number of the
request, the index of the item within it, the process that wrote it, the length of the JSON and that of the blobs. An
answer repeats the request's number and gives the index of its item. An answer that does not match is refused, and never
taken for another row's.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlmrl.redaction.redact import CUT_MARGIN, excerpt

HEAD, SIZES = struct.Struct(">16sQiI"), struct.Struct(">IQ")
TOKEN_BYTES, PIPE_BYTES = 16, 1 << 16
WHOLE = -1
"""Item of the one answer to a request as a whole."""
CONTRACT = "contract"
"""`kind` of an error in which nothing was raised: the result is not a score."""
LOST_PIPE, BROKEN = 97, 98
"""Exit codes of a worker that cannot continue: its pipes are no longer its own; its Python was changed too much."""
MOST_PROCESSES = 512
"""Maximum number of processes below a keeper. More are a fork bomb; a pool on the largest machines has fewer."""
ASK, END = b"?", b"."
"""Bytes that a pool writes to a worker's keeper; see keeper.py."""
UNAVAILABLE = "unavailable"
"""`kind` of an error that the reward did not cause: a service that it needs is down."""
MOST_ANSWER_BYTES = 1 << 20
"""Maximum length of the JSON of a worker's answer: hundreds of parts, a detail, and a note that is far too long."""
MOST_BLOB_BYTES = 8 << 20
"""Maximum size of all images in a worker's answer."""


class GarbledError(Exception):
    """Bytes that are no frame of this worker. The message says what is wrong with them."""


class _Encoder(json.JSONEncoder):
    """JSON encoder as it was when this module was loaded.

    Code that replaces functions of `json` later has no effect.
    """

    encode, iterencode = json.JSONEncoder.encode, json.JSONEncoder.iterencode

    def default(self, o: Any) -> str:
        return str(o)


class StrictEncoder(_Encoder):
    """Encoder for values that are JSON already; arrays and numbers of NumPy are accepted too.

    `encode` raises: ValueError for NaN, infinities and a value that contains itself, TypeError for anything else.
    """

    def __init__(self) -> None:
        super().__init__(allow_nan=False)

    def default(self, o: Any) -> Any:
        if hasattr(o, "dtype") and hasattr(o, "tolist"):
            if getattr(o, "nbytes", 0) > MOST_ANSWER_BYTES:
                raise ValueError(f"it holds an array of {o.nbytes:,} bytes")
            return o.tolist()
        raise TypeError(f"it holds a {type(o).__name__}")


class _Decoder(json.JSONDecoder):
    """JSON decoder as it was when this module was loaded."""

    decode, raw_decode = json.JSONDecoder.decode, json.JSONDecoder.raw_decode


_encode = _Encoder(ensure_ascii=True).encode
_decode = _Decoder().decode
_read, _write, _fstat, _getpid, _exit = os.read, os.write, os.fstat, os.getpid, os._exit


@dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Args:
        request: number of the request that it is, or answers.
        item: index within the request, or WHOLE.
        pid: the process that wrote it.
    """

    request: int
    item: int
    pid: int
    body: dict[str, Any]
    blobs: list[bytes]


def pack(body: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> bytes:
    """Return a message as bytes. NaN and infinities are kept; a value that JSON cannot hold becomes its text."""
    text = _encode({**body, "blobs": [len(b) for b in blobs]} if blobs else body).encode()
    return b"".join((SIZES.pack(len(text), sum(map(len, blobs))), text, *blobs))


def pack_frame(
    token: bytes, request: int, item: int, pid: int, body: Mapping[str, Any], blobs: Sequence[bytes] = ()
) -> bytes:
    """Return one frame as bytes: who writes which answer, and the message (see `pack`)."""
    return HEAD.pack(token, request, item, pid) + pack(body, blobs)


class FrameBuffer:
    """Buffer that takes bytes as they come and returns frames when they are complete.

    Args:
        token: the bytes that every frame must begin with.
        most: (longest JSON, most bytes of blobs) that are waited for; None = any.
    """

    def __init__(self, token: bytes, most: tuple[int, int] | None = None) -> None:
        self._token, self._most, self._bytes = token, most, bytearray()

    @property
    def has_part(self) -> bool:
        """Return whether there are bytes of a frame that is not complete."""
        return bool(self._bytes)

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def pop(self) -> Frame | None:
        """Return the next complete frame, or None while some of it is missing.

        Raises: GarbledError when the bytes are no frame; nothing after them can be trusted.
        """
        token, start = self._token, HEAD.size + SIZES.size
        if self._bytes[: len(token)] != token[: len(self._bytes)]:
            shown = excerpt(self._bytes[: 41 + CUT_MARGIN].decode("latin-1"), 40).encode("latin-1")
            raise GarbledError(f"it is {len(self._bytes):,} bytes of other data: {shown!r}")
        if len(self._bytes) < start:
            return None
        _, request, item, pid = HEAD.unpack_from(self._bytes)
        length, pixels = SIZES.unpack_from(self._bytes, HEAD.size)
        if self._most is not None and (length > self._most[0] or pixels > self._most[1]):
            raise GarbledError(f"its {length + pixels:,} bytes are too many")
        begin, start = start, start + length
        end = start + pixels
        if len(self._bytes) < end:
            return None
        body = _body(bytes(self._bytes[begin:start]))
        edges = list(itertools.accumulate(body.pop("blobs", ()), initial=start))
        if edges[-1] != end:
            raise GarbledError(f"its blobs are {edges[-1] - start:,} bytes long, not {pixels:,}")
        with memoryview(self._bytes) as view:
            blobs = [bytes(view[a:b]) for a, b in itertools.pairwise(edges)]
        del self._bytes[:end]
        return Frame(request, item, pid, body, blobs)


def _body(text: bytes) -> dict[str, Any]:
    try:
        body = _decode(text.decode())
    except (ValueError, RecursionError) as error:
        raise GarbledError(f"it is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise GarbledError("it is not a JSON object")
    return body


class Channel:
    """The two pipes from a worker to its pool. A pipe that other code has closed or replaced ends the process.

    Attributes:
        request: number of the request that is being answered.
    """

    def __init__(self, request_fd: int, response_fd: int) -> None:
        self._fds = (request_fd, response_fd)
        self._identities = tuple(map(_identity, self._fds))
        self._pid, self.request = _getpid(), 0
        self._token = b""
        while len(self._token) < TOKEN_BYTES:
            data = _read(request_fd, TOKEN_BYTES - len(self._token))
            if not data:
                _exit(0)
            self._token += data
        self._buffer = FrameBuffer(self._token)

    def requests(self) -> Iterator[tuple[dict[str, Any], list[bytes]]]:
        """Yield every request in order, until the pipe ends."""
        while True:
            while (frame := self._next()) is not None:
                self.request = frame.request
                yield frame.body, frame.blobs
            data = self._guarded(0, _read, PIPE_BYTES)
            if not data:
                return
            self._buffer.feed(data)

    def _next(self) -> Frame | None:
        try:
            return self._buffer.pop()
        except GarbledError:  # other code has read from the pipe, or replaced it
            _exit(LOST_PIPE)

    def answer(self, item: int, body: Mapping[str, Any], blobs: Sequence[bytes] = ()) -> None:
        """Send the answer to an item of the request. A child of this process ends instead."""
        self.stay_alone()
        data = memoryview(pack_frame(self._token, self.request, item, self._pid, body, blobs))
        while data:
            data = data[self._guarded(1, _write, data) :]

    def stay_alone(self) -> None:
        """End this process if it is a child that returned from the code of others: it must not answer."""
        if _getpid() != self._pid:
            _exit(0)

    def _guarded(self, end: int, call: Any, argument: Any) -> Any:
        """Read or write, if the descriptor is still the same pipe."""
        try:
            if _identity(self._fds[end]) == self._identities[end]:
                return call(self._fds[end], argument)
        except OSError:
            pass
        _exit(LOST_PIPE)


def _identity(fd: int) -> tuple[int, int]:
    status = _fstat(fd)
    return status.st_dev, status.st_ino
