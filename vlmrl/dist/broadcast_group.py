"""Group of processes outside the run's world, in which one process sends tensors to all others."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
