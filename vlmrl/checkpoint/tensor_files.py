"""Tensors of a checkpoint in safetensors files of limited size, written and read by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vlmrl.dist.fsdp import own_part
from vlmrl.dist.world import World
from vlmrl.errors import CheckpointError
from vlmrl.model.safetensors_blocks import TensorSpec, split_shards

MAX_FILES = 64
"""Approximate number of files into which weights or optimizer state are split; at most twice as many are made.

A file is copied in memory before it is written, so many small files need less memory than a few large ones.
"""
MIN_FILE_BYTES = 64 * 2**20
"""Minimum size of each of these files except the last, in bytes."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Write this rank's shards. A tensor that is not sharded is written by one of the ranks."""
    several = world.size > 1
    with plain_errors():
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_of(tensors), save_distributed=several)
        # The shards of a single rank are whole tensors.
        whole_or_shards = {k: (v if several else own_part(v)).detach().contiguous() for k, v in tensors.items()}
        save(whole_or_shards, storage_writer=writer, no_dist=not several, process_group=world.group)


def _file_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the file number of each tensor, from 1.

    There are many small files, because the writer builds each file in memory.
    """
    limit = max(MIN_FILE_BYTES, sum(t.nbytes for t in tensors.values()) // MAX_FILES)
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    return {spec.name: file for file, shard in enumerate(split_shards(specs, limit), 1) for spec in shard}


def read_shards(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    target = {k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in like.items()}
    try:
        with plain_errors():
            load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"the weights cannot be read: {first}", where=str(folder)) from error
    return target


@contextmanager
def plain_errors() -> Iterator[None]:
    """Context manager that raises the first cause of a CheckpointException, and hides a warning of torch.

    torch wraps errors in a CheckpointException, which is not a subclass of `Exception`. It also warns that there is no
    process group, but this is normal for a single process.
    """
    # The filter stays, because restoring the old filters would change the warnings of other threads.
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise cause from error
