"""Freed memory is kept by the process: made again, it is not faulted in again."""

from __future__ import annotations

import platform
import re
import subprocess
import sys

import pytest

CHILD = """
import resource
import sys
import torch
from vlmrl.model.device_memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(2**24)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 2**20

keep = sys.argv[1] == "keep"
assert not keep or keep_freed_memory()
print([faults() for _ in range(20)])
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
@pytest.mark.parametrize("keep", [True, False])
def test_freed_memory_is_used_again_without_page_faults(keep: bool) -> None:
    """64 MiB, made and freed again and again. The first few may lie apart: glibc sets aside up to seven small chunks of
    a size, and one of them between two free places keeps these from being one.

    In a process of its own: a test may run in a thread, and threads have small heaps.
    """
    command = [sys.executable, "-c", CHILD, "keep" if keep else "as it is"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    last = list(map(float, re.findall(r"[0-9.]+", done.stdout)))[-10:]
    assert max(last) < 5 if keep else min(last) > 60
