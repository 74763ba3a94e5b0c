"""Worker of a reward as its pool uses it: a process, four channels, and its current request.

Its descriptors have high numbers in this process and in the worker. So a standard descriptor that was closed (`vlmrl
check <&-`) is never taken for a pipe, and a reward that writes to all low descriptors reaches none of them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vlmrl.process import has_terminal, kill_all, marked, patience, send
from vlmrl.redaction.redact import CUT_MARGIN, excerpt
from vlmrl.rewards.sandbox.frames import (
    ASK,
    END,
    MOST_ANSWER_BYTES,
    MOST_BLOB_BYTES,
    TOKEN_BYTES,
    WHOLE,
    Frame,
    FrameBuffer,
    pack_frame,
)
from vlmrl.rewards.sandbox.images import HELD_SHARE, HeldImages, ImageKeys
from vlmrl.rewards.sandbox.outcomes import Place
from vlmrl.rewards.worker_code import UserReward, WorkerReward
from vlmrl.types import RewardInput

LOAD_SECONDS = 60.0
"""Minimum time limit for importing the user's file, in seconds of wall clock."""
OUTPUT_BYTES = 4096
"""Number of bytes of a reward's output that are kept to be shown with its error."""
MOST_READ_BYTES = 1 << 20
"""Maximum number of bytes to read from a channel at once: a reward that prints without end must not block the pool."""
END_SECONDS = 30.0
"""Longest wait for a keeper to end its processes."""
LOWEST_FD, LAST_RESORT_FD = 200, 3
SENT = (
    "response",
    "truth",
    "columns",
    "finish",
    "num_tokens",
    "prompt",
    "token_ids",
    "step",
    "prompt_id",
    "sample",
    "seen_sizes",
)
"""Fields of a RewardInput that are sent as they are.

Images are sent as pixels (images.py), references and turns as JSON objects.
"""
MOST_MARK = 1 << 62
BOOT = (
    "import sys; sys.path[:] = sys.argv[6:]; "
    "from vlmrl.rewards.sandbox.keeper import main; main(*map(int, sys.argv[1:6]))"
)


class Worker:
    """Worker and its keeper (keeper.py).

    Attributes:
        busy: places of the inputs that it has not answered yet.
        deadline: time at which it will be ended.
        request: number of its current request.
        item: index of the next answer.
        answered: number of items of all requests so far.
        loaded: facts about the function; None until the file is imported.
        sent_bytes: bytes of all requests so far.
        pid: process id of the worker itself.
    """

    def __init__(self, runs: WorkerReward, memory_mb: int) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        request_read, self.request_fd = _pipe()
        self.response_fd, response_write = _pipe()
        self.output_fd, output_write = _pipe()
        self._control, control = (_raised(end.detach()) for end in socket.socketpair())
        passed_fds = (request_read, response_write, control)
        self._mark = secrets.randbelow(MOST_MARK)
        argv = [sys.executable, "-c", BOOT, *map(str, (*passed_fds, os.getpid(), self._mark)), *sys.path]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        stdin, printed = (None, None) if has_terminal() else (subprocess.DEVNULL, output_write)
        try:
            self._keeper = subprocess.Popen(
                argv, stdin=stdin, stdout=printed, stderr=printed, pass_fds=passed_fds, env=env, start_new_session=True
            )
        finally:
            for fd in (*passed_fds, output_write):
                os.close(fd)
        for fd in (self.request_fd, self.response_fd, self.output_fd):
            os.set_blocking(fd, False)
        self._frames = FrameBuffer(self._token, (MOST_ANSWER_BYTES, MOST_BLOB_BYTES))
        self._output, self.output_open = b"", True
        self.loaded: dict[str, Any] | None = None
        self.busy: list[Place] = []
        self.pid = self.request = self.answered = self.item = self.sent_bytes = 0
        self._held = HeldImages((memory_mb << 20) // HELD_SHARE)
        self.deadline = time.monotonic() + patience(LOAD_SECONDS)
        kind = "user" if isinstance(runs, UserReward) else "builtin"
        load = pack_frame(
            self._token, 0, WHOLE, os.getpid(), {"op": "load", kind: asdict(runs), "memory_mb": memory_mb}
        )
        self.unsent = memoryview(self._token + load)

    @property
    def printed(self) -> str:
        """End of the output since the last answer."""
        return excerpt(self._output.decode(errors="replace"), OUTPUT_BYTES, end=True)

    @property
    def receiving(self) -> bool:
        """Return whether a part of an answer has arrived, and the rest has not."""
        return self._frames.has_part

    @property
    def has_ended(self) -> bool:
        return self._keeper.poll() is not None

    def assign(
        self, places: Sequence[Place], inputs: Mapping[Place, RewardInput], keys: ImageKeys, timeout: float
    ) -> None:
        """Queue one request. The clock starts now. Images that the worker has are not sent again."""
        self.busy, self._output = list(places), b""
        self.request, self.item = self.request + 1, 0
        own = [inputs[place] for place in places]
        parcel, items = self._held.parcel(own, keys), []
        for x, of_x in zip(own, parcel.keys, strict=True):
            item = {name: getattr(x, name) for name in SENT}
            item |= {"media": [asdict(m) for m in x.media], "turns": [asdict(turn) for turn in x.turns]}
            items.append({**item, "images": of_x})
        body = {"op": "score", "items": items, "sent": parcel.sent, "dropped": parcel.dropped}
        self.unsent = memoryview(pack_frame(self._token, self.request, WHOLE, os.getpid(), body, parcel.blobs))
        self.sent_bytes += len(self.unsent)
        self.deadline = time.monotonic() + patience(timeout)

    def send(self) -> None:
        """Write as much as the pipe takes. A closed pipe is noticed by `receive`."""
        try:
            self.unsent = self.unsent[os.write(self.request_fd, self.unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.unsent = memoryview(b"")

    def receive(self) -> bool:
        """Read what has arrived. Return False if no process holds the other end any more."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.response_fd, MOST_READ_BYTES)
            self._frames.feed(data)
            return bool(data)
        return True

    def frame(self) -> Frame | None:
        """Return the next whole frame. Raises: GarbledError."""
        return self._frames.pop()

    def drain(self) -> None:
        """Keep the end of the function's output. If it prints without end, read only what fits MOST_READ_BYTES."""
        total = 0
        with contextlib.suppress(BlockingIOError):
            while total < MOST_READ_BYTES and (data := os.read(self.output_fd, 1 << 16)):
                total += len(data)
                self._output = (self._output + data)[-OUTPUT_BYTES - CUT_MARGIN :]
            self.output_open = total > 0

    def forget_output(self) -> None:
        """Drop the output: it belongs to the answer that has come."""
        self._output = b""

    def end(self, *, ask: bool = False) -> str:
        """End the process and all that it started, and close the channels.

        Args:
            ask: the worker seems to have ended by itself: its keeper waits a moment to see how.
        Returns: how it ended, in the keeper's words (keeper.py); "" if even the keeper was killed.
        """
        word = b""
        with contextlib.suppress(OSError):
            os.write(self._control, ASK if ask else END)
        try:
            self._keeper.wait(END_SECONDS)
            with contextlib.suppress(OSError):
                word = os.read(self._control, 100)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        if not word:  # the keeper was killed
            send({-self.pid} if self.pid else (), signal.SIGKILL)
            until = time.monotonic() + END_SECONDS
            while kill_all(lambda: marked(self._mark)) and time.monotonic() < until:
                time.sleep(0.001)
        self.drain()
        for fd in (self.request_fd, self.response_fd, self.output_fd, self._control):
            os.close(fd)
        return word.decode()


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, as descriptors that are no standard ones."""
    read, write = os.pipe()
    return _raised(read), _raised(write)


def _raised(fd: int) -> int:
    """Return the same file under a high descriptor that is not inherited; `fd` is closed."""
    for lowest in (LOWEST_FD, LAST_RESORT_FD):
        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
            break
        except OSError:  # the limit of open files is low
            if lowest == LAST_RESORT_FD:
                raise
    os.close(fd)
    return high
