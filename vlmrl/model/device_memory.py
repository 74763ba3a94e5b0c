"""Memory of the compute device: peak use, size, out-of-memory errors; settings of the C library's heap."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import Tensor

from vlmrl.errors import Load, OutOfMemoryError, VlmrlError, gib

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


SAYINGS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
    "std::bad_alloc",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",  # message of the operating system, in errors of file and tensor libraries
    "No available memory for the cache blocks",
    "is less than desired GPU memory utilization",  # raised when vLLM starts
)
"""Phrases in error messages that mean that memory ran out, of errors that have no exception type of their own."""

VAGUE_SAYINGS = (
    "could not create a primitive",
    "could not create a memory object",
    "could not execute a primitive",  # oneDNN
    "PyObject pointer is null",  # safetensors
)
"""Phrases in error messages that can mean a lack of memory, but also something else.

They are taken as a lack of memory only if the process is near its memory limit (`NEAR`).
"""
NEAR = 0.9
"""Share of the memory limit from which on a process counts as near its limit."""


def ran_out(error: BaseException | None) -> bool:
    """Return whether this error, or one that caused it, means that memory ran out."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        # Errors of vlmrl may quote other errors, such as one of a reward whose worker reached its own memory limit.
        if not isinstance(error, VlmrlError):
            if any(phrase in str(error) for phrase in SAYINGS):
                return True
            if any(phrase in str(error) for phrase in VAGUE_SAYINGS) and _is_near_limit():
                return True
        error = error.__cause__
    return False


def memory_use(device: torch.device) -> tuple[int, int]:
    """Return (peak use since the start, limit), in bytes.

    On a GPU: torch's own allocations, and the GPU's memory. On a CPU, one of two pairs, whichever is nearer to its
    limit: resident memory and the memory of the machine or container; or address space and its limit (`ulimit -v`).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    import resource  # Windows has no such module
    import sys

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    pairs = [(usage, _machine_bytes())]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pairs.append((_status_bytes("VmPeak"), limit))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def upload(x: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the CPU to a device. The CPU does not wait for a GPU: it copies from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x.to(device)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a GPU in bytes, including what torch caches; None for other devices."""
    if device.type != "cuda":
        return None
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def use_in_words(device: torch.device) -> str:
    """Return the memory use as text. Example: `peak 3.1 GiB of 7.8 GiB`."""
    peak, limit = memory_use(device)
    return f"peak {gib(peak)} of {gib(limit)}"


def give_back(device: torch.device) -> None:
    """Free unused memory, including what torch and the C library cache."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()


@contextmanager
def asking_for(load: Callable[[], Load], device: torch.device) -> Iterator[None]:
    """Context manager: if memory runs out inside, raise an OutOfMemoryError whose message contains `load()`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not ran_out(error):
            raise
        current = load()
        raise OutOfMemoryError(
            f"out of memory with {current} at once; {use_in_words(device)}",
            where="; ".join(current.rows),
            hint=f"lower {current.budget}",
            load=current,
        ) from error


def _is_near_limit() -> bool:
    peak, limit = memory_use(torch.device("cpu"))
    return peak > NEAR * limit


def _machine_bytes() -> int:
    """Return the main memory of the machine, or the container's limit if that is lower, in bytes."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        limits.append(int(text))
    return min(limits)


def _status_bytes(name: str) -> int:
    """Return the value of a line of /proc/self/status in bytes; 0 if there is no such line or file."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
