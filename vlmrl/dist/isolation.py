"""Isolation of a library (an engine) that runs in a rank's process and changes the process's global state."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

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
