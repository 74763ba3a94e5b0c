"""The C library's heap, when a model is trained on the CPU."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next allocations. Returns: whether it does now.

    A training step allocates and frees the same gigabytes again and again. glibc gives much of it back to the
    kernel and gets it again as zeroed pages, one fault for each 4 KiB: measured 0.2 to 2 s of an update of 3.2 s, most
    on virtual machines. Other C libraries have no such call: nothing is done there; nor under a limit of the address
    space (`ulimit -v`), where what this process keeps is missing to it elsewhere.
    """
    if _address_space_is_limited():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Either parameter alone switches off glibc's own adaptation of the other, which would be slower than before.
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def _address_space_is_limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def return_freed_memory() -> None:
    """Give freed memory back to the system, which `keep_freed_memory` lets the process keep (malloc_trim(3))."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
