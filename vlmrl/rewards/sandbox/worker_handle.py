"""One worker of a user's reward as its pool sees it: a process, four channels, and what it has been asked.

Its descriptors lie high in the table of this process and of the worker. A standard descriptor that was closed
(`vlmrl check <&-`) is then never taken for a pipe, and a reward that writes to all low descriptors hits none of them.
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
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vlmrl.process import has_terminal, patience
from vlmrl.rewards.base import UserReward
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
from vlmrl.types import RewardInput

LOAD_SECONDS = 60.0
"""Wall clock for importing the user's file, at least."""
OUTPUT_BYTES = 4096
"""How much of what a reward printed is kept to be shown with its error."""
MOST_READ_BYTES = 1 << 20
"""Most bytes of one channel that are read at once: a reward that prints without end must not keep the pool busy."""
END_SECONDS = 30.0
"""Longest wait for a keeper that ends what it kept."""
LOWEST_FD, LAST_RESORT_FD = 200, 3
SENT = (
    "response", "truth", "columns", "finish", "num_tokens", "prompt", "token_ids", "step", "prompt_id", "sample",
    "seen_sizes",
)  # fmt: skip
"""Fields of a RewardInput that travel as they are; images travel as pixels, references and turns as JSON objects."""
BOOT = (
    "import sys; sys.path[:] = sys.argv[5:]; "
    "from vlmrl.rewards.sandbox.keeper import main; main(*map(int, sys.argv[1:5]))"
)


class Worker:
    """A worker and its keeper (keeper.py).

    Attributes:
        busy: indices of the inputs that it has not answered yet.    deadline: when it will be ended.
        request: number of the request it is at.    item: of the next answer.
        answered: items of all requests so far.
        loaded: what it found out about the function; None until the file is imported.    pid: of the worker itself.
    """

    def __init__(self, user: UserReward, memory_mb: int) -> None:
        self._token = secrets.token_bytes(TOKEN_BYTES)
        request_read, self.request_fd = _pipe()
        self.response_fd, response_write = _pipe()
        self.output_fd, output_write = _pipe()
        self._control, control = (_raised(end.detach()) for end in socket.socketpair())
        given = (request_read, response_write, control)
        argv = [sys.executable, "-c", BOOT, *map(str, (*given, os.getpid())), *sys.path]
        env = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ, "PYTHONHASHSEED": "0"}
        stdin, printed = (None, None) if has_terminal() else (subprocess.DEVNULL, output_write)
        try:
            self._keeper = subprocess.Popen(
                argv, stdin=stdin, stdout=printed, stderr=printed, pass_fds=given, env=env, start_new_session=True
            )
        finally:
            for fd in (*given, output_write):
                os.close(fd)
        for fd in (self.request_fd, self.response_fd, self.output_fd):
            os.set_blocking(fd, False)
        self._frames = FrameBuffer(self._token, (MOST_ANSWER_BYTES, MOST_BLOB_BYTES))
        self._output, self.output_open = b"", True
        self.loaded: dict[str, Any] | None = None
        self.busy: list[int] = []
        self.pid = self.request = self.answered = self.item = 0
        self.deadline = time.monotonic() + patience(LOAD_SECONDS)
        load = pack_frame(
            self._token, 0, WHOLE, os.getpid(), {"op": "load", "user": asdict(user), "memory_mb": memory_mb}
        )
        self.unsent = memoryview(self._token + load)

    @property
    def printed(self) -> str:
        """The end of what was printed since the last answer."""
        return self._output.decode(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self._keeper.poll() is not None

    def assign(self, indices: Sequence[int], inputs: Sequence[RewardInput], timeout: float) -> None:
        """Queue one request. The clock starts now."""
        self.busy, self._output = list(indices), b""
        self.request, self.item = self.request + 1, 0
        items, blobs = [], []
        for x in (inputs[i] for i in indices):
            item = {name: getattr(x, name) for name in SENT}
            item |= {"media": [asdict(m) for m in x.media], "turns": [asdict(turn) for turn in x.turns]}
            images = [image.convert("RGB") for image in x.images]
            items.append({**item, "images": [image.size for image in images]})
            blobs += [image.tobytes() for image in images]
        body = {"op": "score", "items": items}
        self.unsent = memoryview(pack_frame(self._token, self.request, WHOLE, os.getpid(), body, blobs))
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
        """Read what there is. Returns False when nobody holds the other end any more."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.response_fd, MOST_READ_BYTES)
            self._frames.feed(data)
            return bool(data)
        return True

    def frame(self) -> Frame | None:
        """The next whole frame. Raises: GarbledError."""
        return self._frames.pop()

    def drain(self) -> None:
        """Keep the end of what the function printed; of a flood, what there is now."""
        total = 0
        with contextlib.suppress(BlockingIOError):
            while total < MOST_READ_BYTES and (data := os.read(self.output_fd, 1 << 16)):
                total += len(data)
                self._output = (self._output + data)[-OUTPUT_BYTES:]
            self.output_open = total > 0

    def forget_output(self) -> None:
        """What was printed belongs to the answer that has come."""
        self._output = b""

    def end(self, *, ask: bool = False) -> str:
        """End the process and all that it started, and close the channels.

        Args: ask: it seems to have ended by itself: its keeper waits a moment to see how.
        Returns: how it ended, in the keeper's words (keeper.py); "" when even the keeper was killed.
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
        if self.pid and not word:  # the keeper was killed: this is all that is known of the processes
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self.drain()
        for fd in (self.request_fd, self.response_fd, self.output_fd, self._control):
            os.close(fd)
        return word.decode()


def _pipe() -> tuple[int, int]:
    """The ends of a pipe, as descriptors that are no standard ones."""
    read, write = os.pipe()
    return _raised(read), _raised(write)


def _raised(fd: int) -> int:
    """The same file under a high descriptor, not inherited; `fd` is closed."""
    for lowest in (LOWEST_FD, LAST_RESORT_FD):
        try:
            high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, lowest)
            break
        except OSError:  # a low limit of open files
            if lowest == LAST_RESORT_FD:
                raise
    os.close(fd)
    return high
