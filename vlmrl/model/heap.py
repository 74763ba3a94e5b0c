"""Settings of the C library's heap for training on the CPU."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt(3)."""


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for its next allocations. Return whether this succeeded.

    A training step allocates and frees the same gigabytes again and again. glibc returns much of it to the kernel and
    later gets it back as zeroed pages, with one page fault per 4 KiB: measured 0.2 to 2 s of an update of 3.2 s, most
    on virtual machines. Nothing is done with other C libraries, which have no such call. Nothing is done either if the
    address space is limited (`ulimit -v`): memory that the heap keeps would count against the limit and be missing
    elsewhere in the process.
    """
    if _address_space_is_limited():
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    # Both are set: setting one alone switches off glibc's automatic choice of the other, which would be slower.
    return bool(mallopt(M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def _address_space_is_limited() -> bool:
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def return_freed_memory() -> None:
    """Return the freed memory that the process kept (see `keep_freed_memory`) to the system, by malloc_trim(3)."""
    with suppress(AttributeError, OSError, TypeError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
