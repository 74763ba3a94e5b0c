"""What a process asks of the operating system about itself."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
from typing import TextIO

_PR_SET_PDEATHSIG = 1
"""From <sys/prctl.h>."""


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which started this one, ends in whatever way; at once if it already has.

    Linux (prctl PR_SET_PDEATHSIG). Elsewhere the kernel is asked nothing: a closed pipe or lost peers end the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


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


class _Lasting(io.FileIO):
    """A file that turns into /dev/null when it is a pipe or a terminal that nobody reads any more, or a full disk."""

    def write(self, data, /) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            _drop(self.fileno())
            return len(memoryview(data).cast("B"))


class _Output(io.FileIO):
    """A file that ends the command when it is a pipe that nobody reads any more, as SIGPIPE would."""

    def write(self, data, /) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            _drop(self.fileno())  # the interpreter will try again at its end
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            raise


def _drop(fd: int) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, fd)
    os.close(nowhere)


def _stream(fd: int, like: TextIO | None, kind: type[io.FileIO]) -> TextIO:
    raw = kind(fd, "w", closefd=False)
    if not isinstance(like, io.TextIOWrapper):
        return io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", "backslashreplace", line_buffering=True)
    how = {"line_buffering": like.line_buffering, "write_through": like.write_through}
    return io.TextIOWrapper(io.BufferedWriter(raw), like.encoding, like.errors, **how)
