"""One packed row under torch's profiler: what is launched, how often the host waits, how long the GPU is idle. Needs
torch and transformers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from gpu_world import Case, World, one_pass
from torch.profiler import ProfilerActivity, profile

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")
"""Events in which the host waits for the GPU."""
SHOWN_KERNELS = 3


def one_row(smoke: bool) -> Iterator[dict[str, Any]]:
    """Forward and backward of a row of 16,384 tokens (Qwen2.5-VL-3B), after two passes that warm up."""
    backend = "sdpa" if smoke else "varlen"
    world = World(Case("update", "row", "Qwen2.5-VL-3B", "shared", backend, rank=64), smoke)
    cuda = world.device.type == "cuda"

    def run() -> float:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        one_pass("shared", world.policy, world.items, world.case.tokens_per_row)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(2):
        run()
    seconds = run()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities) as profiler:
        profiled = run()
    events = list(profiler.events() or ())
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA] if cuda else []
    kernels = on_gpu if cuda else [e for e in events if not e.cpu_children]  # on a CPU: operations that call no other
    busy = covered((e.time_range.start, e.time_range.end) for e in kernels) / 1e6
    by_name: Counter[str] = Counter()
    for e in kernels:
        by_name[e.name] += e.time_range.end - e.time_range.start
    total = sum(by_name.values())
    longest = [f"{name[:60]} {time / total:.0%}" for name, time in by_name.most_common(SHOWN_KERNELS)]
    yield {
        "case": f"{world.case.model}, {len(world.items)} responses, {world.case.tokens_per_row:,} tokens a row",
        "seconds": seconds,
        "profiled_seconds": profiled,
        "launches": len(kernels),
        "host_waits": sum(e.name in WAITS for e in events),
        "busy_seconds": busy,
        "idle_share": max(0.0, 1 - busy / profiled) if cuda else None,
        "longest": "; ".join(longest),
        "note": "" if cuda else "operations of a CPU stand for kernels",
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals. Example: (0, 2), (1, 3), (5, 6): 4."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(intervals):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total
