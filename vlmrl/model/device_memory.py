"""Memory of the device that computes: how much was taken at most, how much there is, and whether it ran out."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from vlmrl.errors import Load, OutOfMemoryError, VlmrlError, gib
from vlmrl.model.heap import return_freed_memory

SAYINGS = (
    "DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc",
    "CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED",
    "Cannot allocate memory",  # the system's words, in errors of file and tensor libraries
    "No available memory for the cache blocks", "is less than desired GPU memory utilization",  # vLLM's start
)  # fmt: skip
"""How errors that have no type of their own say that memory ran out."""

VAGUE_SAYINGS = (
    "could not create a primitive", "could not create a memory object", "could not execute a primitive",  # oneDNN
    "PyObject pointer is null",  # safetensors
)  # fmt: skip
"""What may be a lack of memory among other things: taken for one where the process is near its limit."""
NEAR = 0.9


def ran_out(error: BaseException | None) -> bool:
    """Whether memory ran out, in this error or in one that it came of."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError, OutOfMemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        # Our own errors may quote somebody else's, such as a reward's that met the limit of its worker.
        if not isinstance(error, VlmrlError):
            if any(said in str(error) for said in SAYINGS):
                return True
            if any(said in str(error) for said in VAGUE_SAYINGS) and _is_near_limit():
                return True
        error = error.__cause__
    return False


def memory_use(device: torch.device) -> tuple[int, int]:
    """(the most that was taken since the start, what there is), in bytes.

    On a GPU: of torch's own allocations. On a CPU: resident memory against the machine's or the container's, or
    address space against the process's limit (`ulimit -v`), whichever is nearer to its end.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    import resource  # not on Windows
    import sys

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    found = [(usage, _machine_bytes())]
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        found.append((_status_bytes("VmPeak"), limit))
    return max(found, key=lambda pair: pair[0] / pair[1])


def free_bytes(device: torch.device) -> int | None:
    """Memory that nobody has taken, what torch keeps for later included; None where the device does not tell."""
    if device.type != "cuda":
        return None
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def use_in_words(device: torch.device) -> str:
    """Example: `peak 3.1 GiB of 7.8 GiB`."""
    peak, limit = memory_use(device)
    return f"peak {gib(peak)} of {gib(limit)}"


def give_back(device: torch.device) -> None:
    """Let go of what nobody holds any more, what torch and the C library keep for themselves included."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return_freed_memory()


@contextmanager
def asking_for(load: Callable[[], Load], device: torch.device) -> Iterator[None]:
    """Inside, running out of memory is an OutOfMemoryError that names `load()`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OutOfMemoryError) or not ran_out(error):
            raise
        found = load()
        raise OutOfMemoryError(
            f"out of memory with {found} at once; {use_in_words(device)}", where="; ".join(found.rows),
            hint=f"lower {found.budget}", load=found,
        ) from error  # fmt: skip


def _is_near_limit() -> bool:
    peak, limit = memory_use(torch.device("cpu"))
    return peak > NEAR * limit


def _machine_bytes() -> int:
    """Main memory of the machine, or of the container."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (text := limit.read_text().strip()).isdigit():
        found.append(int(text))
    return min(found)


def _status_bytes(name: str) -> int:
    """A line of /proc/self/status, in bytes; 0 where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)
