"""Freed memory is kept by the process: made again, it is not faulted in again."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

CHILD = """
import resource
import torch
from vlmrl.model.heap import keep_freed_memory

def faults(mebibytes):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(mebibytes * 2**18)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**20

assert keep_freed_memory()
print(faults(96), [faults(64) for _ in range(5)])  # in the place that the first one left
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    """In a process of its own: a test may run in a thread, and threads have small heaps."""
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    first, *again = map(float, re.findall(r"[0-9.]+", done.stdout))
    assert first > 90
    assert max(again) < 5
