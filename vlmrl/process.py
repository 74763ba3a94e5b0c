"""What a process asks of the operating system about itself."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

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
