"""Transport from the run to its loggers. `put` never waits.

Each logger has its own process, a queue with a limit in bytes, and a thread that sends the queue's content to the
process. Lines that a logger does not accept are counted. Each kind of problem is reported once.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from vlmrl.loggers.base import Messages, pack
from vlmrl.redaction.redact import excerpt, redact_text
from vlmrl.untrusted import visible

QUEUE_BYTES = 64 << 20
"""Maximum size of a logger's queue, in bytes. If it is full, further lines are dropped."""
CLOSE_SECONDS = 60.0
"""Time limit in seconds for loggers to send the rest of their data at the end of a run."""
HURRY_SECONDS = 5.0
"""The same time limit for a run that failed or must stop at once. The launcher waits longer than this for the run."""
MOST_CHARS = 500
"""Maximum number of characters of a logger's error that are printed."""
EXIT_SECONDS = 2.0
"""Time limit in seconds for a logger's process to exit after the logger is closed."""
BOOT = "import sys; sys.path[:] = sys.argv[4:]; from vlmrl.loggers.host import main; main(*map(int, sys.argv[1:4]))"


class Outbox:
    """Queue of frames for a logger, with at most `max_bytes` bytes."""

    def __init__(self, max_bytes: int = QUEUE_BYTES) -> None:
        self._frames: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._max_bytes, self._bytes, self._shut = max_bytes, 0, False

    def put(self, frame: bytes, *, always: bool = False) -> bool:
        """Queue a frame. Return False if the queue is full or shut. `always`: queue it even if the queue is full."""
        with self._changed:
            if self._shut or (self._bytes + len(frame) > self._max_bytes and not always):
                return False
            self._frames.append(frame)
            self._bytes += len(frame)
            self._changed.notify()
        return True

    def get(self) -> bytes | None:
        """Wait for the next frame and return it; None when the outbox is shut."""
        with self._changed:
            while not self._frames and not self._shut:
                self._changed.wait()
            if self._shut:
                return None
            frame = self._frames.popleft()
            self._bytes -= len(frame)
            return frame

    def shut(self) -> None:
        """Close the queue: from now on, `put` accepts no frame and `get` returns None."""
        with self._changed:
            self._shut = True
            self._frames.clear()
            self._changed.notify_all()


class Feed:
    """Logger with its process and its queue, and counts of the lines that were sent to it and that it accepted.

    Create it in a thread that lives as long as the run, because the process dies with the thread that started it.

    Args:
        name: name of the logger in messages.
        sink: name of the logger in the recipe.
        run: fields of `SinkRun`, as JSON.
        log: file for the output of the logger's process, with secrets hidden.
        sent, taken: (attributes) number of lines and samples that were sent to the logger, and that it accepted.
        opened: (attribute) the value that `Sink.open` returned, without `note`; None until then.
    """

    def __init__(
        self, name: str, sink: str, run: Mapping[str, Any], log: TextIO, *, queue_bytes: int = QUEUE_BYTES
    ) -> None:
        self.name, self.sent, self.taken = name, 0, 0
        self.opened: dict[str, Any] | None = None
        self._log = log
        self._outbox = Outbox(queue_bytes)
        self._notes: deque[str] = deque()
        self._said: set[str] = set()
        self._over = threading.Event()  # set when the logger has closed, could not begin, or has ended
        request, self._request = os.pipe()
        self._response, response = os.pipe()
        self._output, printed = os.pipe()
        argv = [sys.executable, "-c", BOOT, str(request), str(response), str(os.getpid()), *sys.path]
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=printed,
            pass_fds=(request, response),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        for fd in (request, response, printed):
            os.close(fd)
        self._outbox.put(pack({"op": "open", "sink": sink, "run": dict(run)}), always=True)
        self._writer = threading.Thread(target=self._write, name=f"to {name}", daemon=True)
        self._reader = threading.Thread(target=self._read, name=f"from {name}", daemon=True)
        self._writer.start()
        self._reader.start()

    def put(self, frame: bytes) -> None:
        """Queue a packed line or packed samples. It returns at once."""
        self.sent += 1
        if not self._outbox.put(frame) and not self._over.is_set():
            self._say("full", "is too slow: lines are dropped until it has caught up")

    def notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def ask_to_close(self, status: str) -> None:
        """Ask the logger to close after it has processed the whole queue. The method returns at once."""
        self._outbox.put(pack({"op": "close", "status": status}), always=True)

    def end(self, deadline: float) -> None:
        """Wait until the logger has closed, or until the deadline (`time.monotonic`). Then end its process."""
        if not self._over.wait(max(0.0, deadline - time.monotonic())):
            self._say("slow", "did not finish in time, and was ended")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(EXIT_SECONDS if self._over.is_set() else 0)
        self._over.set()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._outbox.shut()
        self._writer.join()
        self._reader.join()
        os.close(self._request)

    def _say(self, kind: str, text: str) -> None:
        """Add a note for the user, once per kind of problem."""
        if kind not in self._said:
            self._said.add(kind)
            self._notes.append(f"logger {self.name} {text}")

    def _write(self) -> None:
        while (frame := self._outbox.get()) is not None:
            view = memoryview(frame)
            try:
                while view:
                    view = view[os.write(self._request, view) :]
            except OSError:  # its process has ended; `_read` reports this
                return

    def _read(self) -> None:
        """Read the logger's answers and printed lines until its process has ended.

        A child of this process may keep the pipe for printed lines open; it is not waited for.
        """
        messages, printed, alive = Messages(), b"", True
        with selectors.DefaultSelector() as selector:
            selector.register(self._response, selectors.EVENT_READ)
            selector.register(self._output, selectors.EVENT_READ)
            while events := selector.select(None if alive else 0):
                for key, _ in events:
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fd)
                    if key.fd == self._output:
                        *lines, printed = (printed + data).split(b"\n")
                        self._print(lines)
                        continue
                    alive = bool(data)
                    for answer, _ in messages.take(data):
                        self._take(answer)
        self._print([printed])
        for fd in (self._response, self._output):
            os.close(fd)
        if not self._over.is_set():
            self._gone()

    def _print(self, lines: Sequence[bytes]) -> None:
        for line in filter(None, lines):
            self._log.write(visible(redact_text(line.decode("utf-8", "backslashreplace"))) + "\n")
        self._log.flush()

    def _take(self, answer: Mapping[str, Any]) -> None:
        op, failure = answer["op"], answer["failed"]
        if op in ("log", "samples"):
            self.taken += failure is None
        if failure is not None:
            what_failed = {"open": "could not begin, and the run goes on without it"}.get(
                op, "failed, and the run goes on"
            )
            self._say(op, f"{what_failed}: {excerpt(str(failure), MOST_CHARS)}")
        elif op == "open":
            opened = answer["opened"]
            shown = [str(opened[name]) for name in ("url", "note") if opened.get(name)]
            if shown:
                self._notes.append(redact_text(f"logger {self.name}: {'; '.join(shown)}"))
            self.opened = {name: value for name, value in opened.items() if name != "note"}
        if op == "close" or (op == "open" and failure is not None):
            self._outbox.shut()
            self._over.set()

    def _gone(self) -> None:
        """Report that the logger's process ended although nobody had asked it to close."""
        code = self.process.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        self._outbox.shut()
        self._over.set()
        self._say("gone", f"ended {how}, and the run goes on without it")
