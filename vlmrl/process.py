"""Operating-system functions for this process and its descendants: signals, parents, standard streams."""

from __future__ import annotations

import atexit
import ctypes
import io
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

DEBUG_RANK = "VLMRL_DEBUG_RANK"
"""Environment variable with the rank that has the terminal (`--debug-rank`). It is set in all processes of the run."""
DEBUG_SECONDS = 7 * 86_400.0
"""Time limit under a debugger: one week, in seconds."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""Option of prctl(2), from <sys/prctl.h>."""
_RLIMIT_LOCKS = 10
"""Limit that Linux does not use any more. Processes inherit it, whatever session or environment they choose."""
_CLONE_NEWNS, _MS_REC_SLAVE, _MNT_DETACH = 0x20000, 0x84000, 2
_SHARED_MEMORY = "/dev/shm"


def has_terminal() -> bool:
    """Return whether this process has the terminal, so that `breakpoint()` works in it and in its rewards."""
    return os.environ.get(DEBUG_RANK) == os.environ.get("RANK", "0")


def give_terminal(rank: int = 0) -> None:
    """Give the terminal to a rank of this command. Call it before other processes are started."""
    os.environ[DEBUG_RANK] = str(rank)


def patience(seconds: float) -> float:
    """Return the time limit for work that should take `seconds`: under a debugger it is one week."""
    return DEBUG_SECONDS if DEBUG_RANK in os.environ else seconds


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when its parent `parent` ends for any reason. End now if it has ended already.

    Linux only (prctl PR_SET_PDEATHSIG). Elsewhere a closed pipe or lost peers end the process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def leave(code: int) -> NoReturn:
    """End this process now, after its threads and exit functions, without tearing the interpreter down.

    For processes with torch's gloo groups: a thread of gloo that still holds a tensor while the interpreter is torn
    down aborts the process (SIGABRT), and a run that has ended well would count as failed.
    """
    threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def end_on_sigterm() -> None:
    """Make SIGTERM end this process as Ctrl-C does: by a KeyboardInterrupt, so that cleanup code runs.

    An existing handler is kept. A forked child process is not affected: SIGTERM ends it at once, because process pools
    end their workers with SIGTERM.
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
    """Become the parent of every descendant whose own parent ends, so that no process is lost.

    Linux only (prctl PR_SET_CHILD_SUBREAPER). On other systems, the first process of the system becomes the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def set_mark(mark: int) -> None:
    """Mark this process and all that it will start, for `marked`. Linux only."""
    with suppress(ValueError, OSError):  # the limit is lower already
        resource.setrlimit(_RLIMIT_LOCKS, (mark, mark))


def marked(mark: int) -> list[int]:
    """Return the living processes that have a mark, unless they have removed it; [] where there is no /proc."""
    line = f"Max file locks {mark} {mark} locks".split()
    processes = []
    for pid in filter(str.isdigit, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError):  # it has just ended
            limits, state = (Path(f"/proc/{pid}/{name}").read_text() for name in ("limits", "stat"))
            if line in map(str.split, limits.splitlines()) and state.rpartition(")")[2].split()[0] != "Z":
                processes.append(int(pid))
    return processes


def kill_all(find: Callable[[], Iterable[int]]) -> bool:
    """Kill processes that may start others: all are stopped first. Return whether there were any."""
    stopped: set[int] = set()
    while new := set(find()) - stopped:
        send(new, signal.SIGSTOP)
        stopped |= new
    send(stopped, signal.SIGKILL)
    return bool(stopped)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to processes (negative: process groups), as far as they exist and this is allowed."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def own_shared_memory() -> None:
    """Lay a layer over /dev/shm that this process and its descendants alone write to, and that ends with them.

    Only root may do so; for others, and in containers that forbid to mount, nothing changes.
    """
    if sys.platform != "linux" or os.geteuid() or not os.path.isdir(_SHARED_MEMORY):
        return
    libc, place = ctypes.CDLL(None), _SHARED_MEMORY.encode()
    is_apart = libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, _MS_REC_SLAVE, None) == 0
    below = os.open(_SHARED_MEMORY, os.O_PATH)
    if is_apart and libc.mount(b"tmpfs", place, b"tmpfs", 0, b"mode=1777") == 0:
        for name in ("upper", "work"):
            os.mkdir(f"{_SHARED_MEMORY}/{name}")
        os.chmod(f"{_SHARED_MEMORY}/upper", 0o1777)
        layers = f"lowerdir=/proc/self/fd/{below},upperdir={_SHARED_MEMORY}/upper,workdir={_SHARED_MEMORY}/work"
        if libc.mount(b"overlay", place, b"overlay", 0, layers.encode()):
            libc.umount2(place, _MNT_DETACH)
    os.close(below)


def descendants(pid: int) -> list[int]:
    """Return the processes that `pid` started, those that they started, and so on; [] where there is no /proc.

    Zombies are included. A process that starts meanwhile may be missing.
    """
    processes, todo = [], [pid]
    while todo:
        new = children(todo.pop())
        processes += new
        todo += new
    return processes


def private_memory(pids: Iterable[int]) -> int:
    """Return the main memory of processes without files and shared parts, in bytes. Those that have ended have none."""
    pages = 0
    for pid in pids:
        with suppress(OSError, ValueError):
            _, resident, shared, *_ = Path(f"/proc/{pid}/statm").read_text().split()
            pages += int(resident) - int(shared)
    return pages * resource.getpagesize()


def ending_of(pid: int) -> str:
    """Return how a process ended that its parent has not reaped: `exit 3`, or the name of a signal; "" if unknown."""
    until = time.monotonic() + 0.5  # its files are closed before it has ended
    while time.monotonic() < until:
        try:
            state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
            code = os.waitstatus_to_exitcode(int(numbers[-1]))
        except (OSError, ValueError):
            return ""
        if state == "Z":
            return f"exit {code}" if code >= 0 else signal_name(-code)
        time.sleep(0.01)
    return ""


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def children(pid: int) -> list[int]:
    """Return the processes that any thread of a process started."""
    words: list[str] = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            words += Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    except OSError:  # the process has just ended
        pass
    return [int(word) for word in words]


def keep_standard_streams() -> None:
    """Make the standard streams reliable; called once, before any other file is opened.

    A stream that was closed when this process started (`<&-`, `2>&-`) becomes /dev/null. Otherwise the next opened file
    or pipe would get the number of this stream, and messages for people would be written into that file. When standard
    error has no reader any more, the work continues; when standard output has none, the command ends with exit code
    141.
    """
    for fd, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(fd)
        except OSError:
            opened = os.open(os.devnull, mode)  # the system gives the lowest free number, which is this one
            os.set_inheritable(opened, True)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is sys.__stdout__:  # not replaced by code that captures the output
        sys.stdout = _stream(1, sys.stdout, _Output)
    if sys.stderr is sys.__stderr__:
        sys.stderr = lasting(2, sys.stderr)


def lasting(fd: int, like: TextIO | None = None) -> TextIO:
    """Return a text stream for messages on a file descriptor. When its reader has ended, further text is dropped.

    Args:
        like: stream whose encoding and buffering are used; default: UTF-8, line by line.
    """
    return _stream(fd, like, _Lasting)


class _Stream(io.TextIOWrapper):
    """Text stream on a file descriptor that handles a failed write once, and not again when the interpreter ends.

    Errors are caught at the level of text, above the buffer. If an exception from a signal were raised inside the raw
    file's `write`, the text would be written twice.
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
        """Redirect the rest of the output to /dev/null."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class _Lasting(_Stream):
    """Stream that drops its output if it is a pipe or terminal without a reader, or a file on a full disk."""


class _Output(_Stream):
    """Stream that ends the command if it is a pipe without a reader, as SIGPIPE would."""

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
