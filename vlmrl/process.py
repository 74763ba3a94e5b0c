"""What a process asks of the operating system about itself and the processes below it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

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
