"""What a process asks of the operating system about itself and the processes below it."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TextIO

DEBUG_RANK = "VLMRL_DEBUG_RANK"
"""Environment variable of all processes of a run of which one has the terminal: its rank (`--debug-rank`)."""
DEBUG_SECONDS = 7 * 86_400.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""From <sys/prctl.h>."""


def has_terminal() -> bool:
    """Return whether this process was given the terminal for a debugger: `breakpoint()` works in it and its rewards."""
    return os.environ.get(DEBUG_RANK) == os.environ.get("RANK", "0")


def give_terminal(rank: int = 0) -> None:
    """Give the terminal to a rank of this command, which has one process or starts the others later."""
    os.environ[DEBUG_RANK] = str(rank)


def patience(seconds: float) -> float:
    """Return how long to wait for what should take `seconds`: a week where somebody looks on with a debugger."""
    return DEBUG_SECONDS if DEBUG_RANK in os.environ else seconds


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which started this one, ends in whatever way; at once if it already has.

    Linux (prctl PR_SET_PDEATHSIG). Elsewhere the kernel is asked nothing: a closed pipe or lost peers end the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def end_on_sigterm() -> None:
    """Let SIGTERM end this process as Ctrl-C does: by a KeyboardInterrupt, so that what was begun is put away.

    Left alone where somebody has decided already. A forked child ends as if there were no handler: pools end theirs so.
    """
    owner = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == owner:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, end)


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent ends, so that none can slip away.

    Linux (prctl PR_SET_CHILD_SUBREAPER). Elsewhere such a process goes to the system's first one, as ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, those that they started, and so on; [] where there is no /proc.

    Zombies are among them. What is started while the list is made may be missing.
    """
    found, todo = [], [pid]
    while todo:
        new = _children(todo.pop())
        found += new
        todo += new
    return found


def _children(pid: int) -> list[int]:
    """The processes that were started by any thread of a process."""
    words: list[str] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            words += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except OSError:  # it has just ended
        pass
    return [int(word) for word in words]


def keep_standard_streams() -> None:
    """Make the standard streams fit to rely on; called once, before anything else is opened.

    One that was closed when this process was started (`<&-`, `2>&-`) becomes /dev/null: its number would go to the next
    file or pipe that is opened, and what is meant for people would end there. The work goes on when nobody reads
    standard error any more; when nobody reads standard output, the command ends with exit code 141.
    """
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, mode)  # the lowest free number: this one
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # not replaced by somebody who catches the output
        sys.stdout = _stream(1, sys.stdout, _Output)
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting(2, sys.stderr)


def lasting(fd: int, like: TextIO | None = None) -> TextIO:
    """A text stream for people on a file descriptor; what it is given when its reader is gone is dropped.

    Args: like: a stream whose encoding and buffering it has; default: UTF-8, line by line.
    """
    return _stream(fd, like, _Lasting)


class _Stream(io.TextIOWrapper):
    """Text stream on a file descriptor whose refusal is handled here, once, and not again at the interpreter's end.

    Errors are caught above the buffer: a signal's exception in a raw file's own `write` would have it write twice.
    """

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._refused(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._refused(error)

    def _refused(self, error: OSError) -> None:
        """Send what is left, and what comes, nowhere."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class _Lasting(_Stream):
    """Stream that falls silent when it is a pipe or a terminal that nobody reads any more, or a full disk."""


class _Output(_Stream):
    """Stream that ends the command when it is a pipe that nobody reads any more, as SIGPIPE would."""

    def _refused(self, error: OSError) -> None:
        super()._refused(error)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(128 + signal.SIGPIPE) from None
        raise error


def _stream(fd: int, like: TextIO | None, kind: type[_Stream]) -> TextIO:
    buffer = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
    if not isinstance(like, io.TextIOWrapper):
        return kind(buffer, "utf-8", "backslashreplace", line_buffering=True)
    return kind(
        buffer, like.encoding, like.errors, line_buffering=like.line_buffering, write_through=like.write_through
    )
