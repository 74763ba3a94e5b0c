"""An engine in a rank's process: the global state that it changes is restored, and weights are broadcast to it.

The broadcast group is outside the run's world: one process sends tensors to all others.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

WORLD_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
)
AGENT_PREFIX = "TORCHELASTIC_"
"""Prefix of variables that torchrun sets. An engine has its own world. With these variables it would behave like one of
the trainer's ranks."""


def environment_without_world() -> dict[str, str]:
    """Return this process's environment without torchrun's variables."""
    return {n: v for n, v in os.environ.items() if n not in WORLD_VARIABLES and not n.startswith(AGENT_PREFIX)}


@contextmanager
def undisturbed() -> Iterator[None]:
    """Context manager for building an engine: restore random states, threads and the launcher's variables afterwards.

    Inside, the launcher's variables are not set.
    """
    world = {name: os.environ.pop(name) for name in os.environ.keys() - environment_without_world()}
    states = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        for name in WORLD_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(world)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.random.set_rng_state(states[2])
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        torch.set_num_threads = set_threads  # vLLM's CPU worker replaces this function by a stub and sets one thread
        torch.set_num_threads(threads)


def has_world() -> bool:
    """Return whether this process has a process group of torch, with other processes or alone."""
    return dist.is_initialized()


@contextmanager
def world_kept() -> Iterator[None]:
    """Context manager: prevent a library from destroying the run's own process group; it may destroy other groups.

    vLLM destroys all groups when it ends, including those that it did not create.
    """
    real = dist.destroy_process_group

    def destroy(group: Any = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            real(group)

    dist.destroy_process_group = destroy
    try:
        yield
    finally:
        dist.destroy_process_group = real


JOIN_SECONDS = 300.0
"""Time limit in seconds until all processes have joined, and for each tensor."""


class BroadcastGroup:
    """Group whose rank 0 sends. All its processes are on one machine and create it at the same time.

    It uses NCCL on GPUs and gloo on CPUs. It is independent of torch's default group, so a process may be in both.

    Args:
        store: path of a file that all processes can write, new for each group; they meet there.
        rank, size: of this process, and number of processes.
        device: device of the tensors; "cuda" = the process's current GPU, which no other process of the group may use.
    """

    def __init__(self, store: Path, rank: int, size: int, device: str) -> None:
        limit = timedelta(seconds=JOIN_SECONDS)
        meeting: Any = dist.FileStore(str(store), size)  # pyright: ignore[reportPrivateImportUsage]
        meeting.set_timeout(limit)
        self.device = torch.device(device)
        self._group: Any
        if device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(meeting, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(meeting, rank, size, limit)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a contiguous tensor from rank 0, or receive into it. On a GPU, the current stream waits for it."""
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        # As bytes: gloo does not send every dtype.
        self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()

    def finish(self) -> None:
        """Wait until everything that this process has sent or received is done."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
