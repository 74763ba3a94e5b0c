"""Freed memory is kept by the process: made again, it is not faulted in again."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from vlmrl.model.heap import keep_freed_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's mallopt")
def test_freed_memory_is_used_again_without_page_faults() -> None:
    assert keep_freed_memory()
    pages = 64 * 2**20 // resource.getpagesize()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    faults()
    assert faults() < pages / 10
