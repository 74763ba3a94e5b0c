"""Transport from the run to its loggers. `put` never waits.

Each logger has its own process, a queue with a limit in bytes, and a thread that sends the queue's content to the
process. Lines that a logger does not accept are counted. Each kind of problem is reported once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from vlmrl.redaction.redact import excerpt, redact_text
from vlmrl.untrusted import visible
from vlmrl.workers.frames import Frame, pack
from vlmrl.workers.pool import Limits, Lost, Pool, Worker

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
TICK_SECONDS = 0.2
"""Longest time in seconds after which the end of a logger's process is noticed, or that of the run."""


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

    def get(self, seconds: float) -> bytes | None:
        """Wait for the next frame, at most so long, and return it; None when there is none or the outbox is shut."""
        with self._changed:
            self._changed.wait_for(lambda: self._frames or self._shut, seconds)
            if self._shut or not self._frames:
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


class Feed(Pool[int, None]):
    """Logger with its process and its queue, and counts of the lines that were sent to it and that it accepted.

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
        setup = {"sink": sink, "run": dict(run)}
        super().__init__("vlmrl.loggers.host", setup, size=1, limits=Limits(float("inf"), float("inf")))
        self.name, self.sent, self.taken = name, 0, 0
        self.opened: dict[str, Any] | None = None
        self._log, self._hear, self._printed = log, self._print, b""
        self._outbox, self._frame = Outbox(queue_bytes), b""
        self._notes: deque[str] = deque()
        self._said: set[str] = set()
        self._over = threading.Event()  # set when the logger has closed, could not begin, or has ended
        self._left = threading.Event()  # set when nobody waits for the logger any more
        self._start()
        self._thread = threading.Thread(target=self._run, name=f"logger {name}", daemon=True)
        self._thread.start()

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
        self._left.set()
        self._thread.join()

    def _say(self, kind: str, text: str) -> None:
        """Add a note for the user, once per kind of problem."""
        if kind not in self._said:
            self._said.add(kind)
            self._notes.append(f"logger {self.name} {text}")

    def _run(self) -> None:
        """Send the queue's content, one frame at a time, until the logger is over or nobody waits for it."""
        try:
            while not self._over.is_set() and not self._left.is_set():
                if not self.pending and (frame := self._outbox.get(TICK_SECONDS)) is not None:
                    self._frame = frame
                    self.add([[0]])
                self.advance(TICK_SECONDS if self.pending else 0.0)
            until = time.monotonic() + EXIT_SECONDS
            while self._workers and self._over.is_set() and time.monotonic() < until:
                self.advance(0.0)
                time.sleep(0.01)
        finally:
            self._outbox.shut()
            self.close()
            self._print(b"\n")
            self._over.set()

    def _print(self, data: bytes) -> None:
        *lines, self._printed = (self._printed + data).split(b"\n")
        for line in filter(None, lines):
            self._log.write(visible(redact_text(line.decode("utf-8", "backslashreplace"))) + "\n")
        self._log.flush()

    def _message(self, worker: Worker, keys: Sequence[int]) -> bytes:
        return self._frame

    def _started(self, worker: Worker) -> None:
        assert worker.facts is not None
        if failure := worker.facts["failed"]:
            self._over.set()
            self._queue.clear()
            self._queue.append([0])
            self._frame = pack({"op": "close"})
            self._say("open", f"could not begin, and the run goes on without it: {excerpt(str(failure), MOST_CHARS)}")
            return
        opened = worker.facts["opened"]
        shown = [str(opened[name]) for name in ("url", "note") if opened.get(name)]
        if shown:
            self._notes.append(redact_text(f"logger {self.name}: {'; '.join(shown)}"))
        self.opened = {name: value for name, value in opened.items() if name != "note"}

    def _outcome(self, worker: Worker, keys: Sequence[int], frame: Frame) -> list[tuple[int, None]]:
        op, failure = frame.body["op"], frame.body["failed"]
        if self._over.is_set():
            return [(0, None)]
        self.taken += op != "close" and failure is None
        if failure is not None:
            self._say(op, f"failed, and the run goes on: {excerpt(str(failure), MOST_CHARS)}")
        if op == "close":
            self._over.set()
        return [(0, None)]

    def _lost(self, worker: Worker, lost: Lost) -> list[tuple[int, None]]:
        """Report that the logger's process ended although nobody had asked it to close."""
        if not self._over.is_set():
            self._over.set()
            how = "" if lost.code is None else f" with exit code {lost.code}"  # None: it closed its pipes
            how = f" {lost.text}" if lost.text else f" by {lost.signal}" if lost.signal else how
            self._say("gone", f"ended{how}, and the run goes on without it")
        return []
