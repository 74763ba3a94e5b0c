"""What a process asks of the operating system about itself and the processes below it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""From <sys/prctl.h>."""


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
