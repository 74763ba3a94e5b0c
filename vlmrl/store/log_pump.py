"""Thread that copies the output of processes from pipes to their log files, with secrets hidden.

C libraries and an interpreter that exits print directly, so vlmrl code in a process cannot check all of its output. So
the process prints into a pipe. A thread of its parent process reads the pipe line by line and writes the log. The
output stays in the pipe if the process dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from vlmrl.redaction.redact import redact_beginning, redact_text

MOST_BYTES = 1 << 16
"""Maximum number of bytes that are held back until a line or a private key is complete."""
_KEY = re.compile(rb"-----BEGIN [A-Z0-9 ]{0,24}PRIVATE KEY(?!.*-----END )", re.DOTALL)
"""Pattern of the beginning of a private key whose end has not been read yet."""


@dataclass
class _Stream:
    """One pipe and its log. Until `path` is set, the output is kept in memory."""

    fd: int
    path: Path | None
    waiting: bytearray = field(default_factory=bytearray)
    held: list[bytes] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    begun: bool = False
    broken: bool = False

    def feed(self, data: bytes) -> None:
        self.waiting += data
        last = max(self.waiting.rfind(b"\n"), self.waiting.rfind(b"\r")) + 1
        if key := _KEY.search(self.waiting):
            last = self.waiting.rfind(b"\n", 0, key.start()) + 1
        if not last and len(self.waiting) > MOST_BYTES:
            beginning, rest = redact_beginning(self.waiting.decode("utf-8", "surrogateescape"))
            self.waiting[:] = rest.encode("utf-8", "surrogateescape")
            self._write(beginning.encode("utf-8", "surrogateescape"))
        self._take(last)

    def flush(self) -> None:
        """Write the bytes that are held back."""
        self._take(len(self.waiting))

    def write_to(self, path: Path) -> None:
        self.path = path
        held, self.held = self.held, []
        for content in held:
            self._write(content)

    def _take(self, count: int) -> None:
        if count:
            content = redact_text(self.waiting[:count].decode("utf-8", "surrogateescape"))
            del self.waiting[:count]
            self._write(content.encode("utf-8", "surrogateescape"))

    def _write(self, content: bytes) -> None:
        if self.path is None:
            self.held.append(content)
            return
        try:
            if not self.begun:  # later, a folder that is gone was removed on purpose
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.begun = True
            with open(self.path, "ab") as file:
                file.write(content)
        except OSError as error:
            if not self.broken:  # warn once and go on reading, or the printing process would wait
                self.broken = True
                print(f"warning: the log {self.path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


class LogPump:
    """Thread that reads pipes, from the first call of `add` to `close`."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._selector: selectors.BaseSelector
        self._wake = self._woken = -1

    def add(self, name: str, fd: int, path: Path | None = None) -> None:
        """Copy the output of the pipe `fd` to a log. The path may be given later; `fd` is closed when the pipe ends."""
        if self._thread is None:
            self._selector = selectors.DefaultSelector()
            self._wake, self._woken = os.pipe()
            os.set_blocking(self._wake, False)
            self._selector.register(self._wake, selectors.EVENT_READ, None)
            self._thread = threading.Thread(target=self._run, name="logs", daemon=True)
            self._thread.start()
        os.set_blocking(fd, False)
        with self._lock:
            stream = self._streams[name] = _Stream(fd, path)
            self._selector.register(fd, selectors.EVENT_READ, stream)
        os.write(self._woken, b".")

    def __contains__(self, name: str) -> bool:
        return name in self._streams

    def write_to(self, name: str, path: Path) -> None:
        """Set the log of a pipe. The output that was read so far is written to it first."""
        stream = self._streams[name]
        if stream.path is None:
            with self._lock:
                stream.write_to(path)

    def held(self, name: str) -> str:
        """Return the output of a pipe whose log has no path yet."""
        stream = self._streams.get(name)
        with self._lock:
            return b"".join(stream.held).decode("utf-8", "replace") if stream is not None else ""

    def wait(self, name: str, seconds: float) -> None:
        """Wait until all writers of a pipe have ended and their output is in the log, but at most `seconds`."""
        self._streams[name].ended.wait(seconds)

    def close(self, seconds: float = 2.0) -> None:
        """Wait at most `seconds` for the pipes to end, write the output that is held back, and stop the thread."""
        if self._thread is None:
            return
        end = time.monotonic() + seconds
        for stream in self._streams.values():
            stream.ended.wait(max(0.0, end - time.monotonic()))
        self._closing = True
        os.write(self._woken, b".")
        self._thread.join()
        for stream in self._streams.values():
            if not stream.ended.is_set():
                self._end(stream)
        self._selector.close()
        os.close(self._wake)
        os.close(self._woken)
        self._thread = None

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                else:
                    self._read(key.data)

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.fd, MOST_BYTES)
        except BlockingIOError:
            return
        if not data:
            self._end(stream)
            return
        with self._lock:
            stream.feed(data)

    def _end(self, stream: _Stream) -> None:
        with self._lock:
            self._selector.unregister(stream.fd)
            os.close(stream.fd)
            stream.flush()
        stream.ended.set()
