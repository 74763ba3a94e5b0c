"""Saving and loading of checkpoints: all or nothing, and exact.

Tensors are in safetensors files of limited size, written and read by all ranks. The ranks share the check of the files
among them.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from vlmrl import __version__
from vlmrl.dist.fsdp import HostCopies, own_part, own_rows, sharded_as, whole
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError, StoreError, way_out
from vlmrl.model.load import write_processor
from vlmrl.model.lora import adapter_tensors, has_adapter, write_adapter
from vlmrl.model.safetensors_blocks import StoredTensor, TensorSpec, read_tensors, split_shards
from vlmrl.model.stored_weights import StoredWeight, leave_stored, put_buffer
from vlmrl.store import checkpoints
from vlmrl.store.checkpoints import (
    ADAPTER,
    DATA,
    HF,
    MODEL,
    OPTIMIZER,
    PROOF,
    RNG,
    SCHEMA,
    VALUE_HEAD,
    file_facts,
    listed,
    sha256_of,
)
from vlmrl.store.files import crash_point, remove_tree, sync_folder, temp_path, write_atomic, write_json
from vlmrl.store.layout import COMPLETE, META, checkpoint_dir
from vlmrl.untrusted import parse_json

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


_compared: Path | None = None
"""Checkpoint whose files have all been read and compared, each by one rank of this run; None = none."""


def check_files(folder: Path, under: str = "") -> list[str]:
    """Check files as `store.checkpoints.check_files` does. Within `compared_once`, their content is not read again."""
    return checkpoints.check_files(folder, under, read=folder != _compared)


@contextmanager
def compared_once(folder: Path | None, world: World) -> Iterator[None]:
    """Context manager: at its start, each file of the checkpoint is compared by one of the ranks, and then not again.

    Raises: CheckpointError on all ranks, with the name of the first file that is missing or differs.
    """
    global _compared
    if folder is None or world.size == 1:
        yield
        return
    error: CheckpointError | None = None
    try:
        table = list(checkpoints.listed(folder).items())
        for i in world.mine(len(table)):
            checkpoints.check_file(folder, *table[i])
    except CheckpointError as problem:
        error = problem
    first = next((e for e in world.gather(error) if e is not None), None)
    if first is not None:
        raise first
    _compared = folder
    try:
        yield
    finally:
        _compared = None


def sync_tree(folder: Path) -> None:
    """Write everything in a folder, and the folder itself, to disk (fsync)."""
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointContent:
    """Content of a checkpoint besides the model and the optimizer.

    Args:
        step: policy version of the weights.
        meta: base model, dtype and so on (JSON values); with an adapter, `base` has `path` and `revision`.
        data: data position and training state (JSON values).
        proof: tensors of `proof.safetensors`.
        value_head: tensors of the critic's value head; {} = no critic.
    """

    step: int
    meta: Mapping[str, Any]
    data: Mapping[str, Any]
    proof: Mapping[str, Tensor] = field(default_factory=dict)
    value_head: Mapping[str, Tensor] = field(default_factory=dict)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name -> weight. A weight that is tied (has several names) is returned once, under its first name."""
    names: dict[int, str] = {}
    tied = {n for n, p in model.named_parameters(remove_duplicate=False) if names.setdefault(id(p), n) != n}
    storages: set[tuple[int, tuple[int, ...]]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        part = own_part(tensor)
        key = (part.data_ptr(), tuple(part.shape))
        if name in tied or (part.numel() and not part.is_meta and key in storages):
            continue
        storages.add(key)
        tensors[name] = tensor
    return tensors


@dataclass(frozen=True)
class Staged:
    """Checkpoint that is ready to be written. If its tensors are copies, training may go on meanwhile.

    Args:
        final, temp: final folder, and the temporary folder in which the checkpoint is made.
        weights: weights of the model; {} if there is an adapter.
        adapter: tensors of the adapter, unsharded on every rank; {} without an adapter.
        rng: random states of all ranks.
    """

    final: Path
    temp: Path
    saved: CheckpointContent
    model: Any
    weights: Mapping[str, Tensor]
    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, Tensor]


def stage(
    run_dir: Path,
    saved: CheckpointContent,
    model: Any,
    processor: Any,
    optimizer_tensors: Mapping[str, Tensor],
    world: World = ALONE,
    dtypes: Mapping[str, torch.dtype] | None = None,
    copies: HostCopies | None = None,
) -> Staged:
    """Collect the current content of a checkpoint, and create its folder with the small files.

    Args:
        world: the ranks that hold shards of the tensors; each writes its own shards, and rank 0 everything else.
        dtypes: parameter of the model -> dtype in which it is saved, if this differs from its own dtype.
        copies: host memory that the tensors are copied to; None = no copies, so the tensors must not change until they
            are written.
    Raises: CheckpointError as `write_staged`.
    """
    final, dtypes = checkpoint_dir(run_dir, saved.step), dtypes or {}
    temp = world.from_main(lambda: temp_path(final))
    take = copies.take if copies is not None else lambda kind, tensors: tensors

    def begin() -> None:
        temp.mkdir(parents=True)
        _write_hf_files(
            temp / HF, model, processor
        )  # not in the writing thread: two threads must not use one tokenizer

    with _saving(final, temp, world):
        _together(world, begin, alone=True)
        weights: dict[str, Tensor] = {}
        adapter: dict[str, Tensor] = {}
        if has_adapter(model):
            narrow = next(iter(dtypes.values()), None)  # an adapter has one dtype
            adapter = {n: whole(t if narrow is None else t.to(narrow)) for n, t in adapter_tensors(model).items()}
        else:
            weights = {n: t.to(dtypes.get(n, t.dtype)) for n, t in model_tensors(model).items()}
        states = {_rng_name(rank): state for rank, state in enumerate(world.gather(torch.random.get_rng_state()))}
        value_head = {k: whole(v).detach().cpu().clone() for k, v in saved.value_head.items()}
        return Staged(
            final,
            temp,
            replace(saved, value_head=value_head),
            model,
            take("weights", weights),
            take("adapter", adapter),
            take("optimizer", optimizer_tensors),
            states,
        )


def write_staged(staged: Staged, world: World = ALONE) -> Path:
    """Write a staged checkpoint and return its folder, `checkpoints/step-<step>/`.

    After a kill at any time, the folder is complete or ignored by every reader. If this runs in a thread, only this
    thread may use `world`.

    Raises: CheckpointError on all ranks if the disk fails; older checkpoints are not changed.
    """
    with _saving(staged.final, staged.temp, world):
        _write_folder(staged, world)
        _together(world, lambda: _put_in_place(staged.temp, staged.final), alone=True)
    return staged.final


@contextmanager
def _saving(final: Path, temp: Path, world: World) -> Iterator[None]:
    """Context manager: raise a CheckpointError if the disk fails; after any error, remove the unfinished folder."""
    try:
        yield
    except BaseException as error:
        if world.is_main and temp.exists():
            remove_tree(temp)
        if not isinstance(error, (OSError, StoreError, SafetensorError)):
            raise
        raise CheckpointError(
            f"the checkpoint of step {int(final.name.rpartition('-')[2])} could not be saved: {error}",
            where=str(final),
            hint=f"{way_out(error)}; older checkpoints are untouched",
        ) from error


def _put_in_place(temp: Path, final: Path) -> None:
    if final.exists():
        remove_tree(final)
    os.replace(temp, final)
    sync_folder(final.parent)
    crash_point("before-complete")
    write_atomic(final / COMPLETE, sha256_of(final / META).encode())


def _together(world: World, action: Callable[[], T], *, alone: bool = False) -> T | None:
    """Run `action` on all ranks (`alone`: only on rank 0) and wait for all. If it fails on one rank, all ranks raise.

    Raises: the action's own error; on the other ranks, an OSError with its text.
    """
    result = error = None
    if world.is_main or not alone:
        try:
            result = action()
        except (OSError, StoreError, SafetensorError) as raised:
            error = raised
    first_error = next((t for t in world.gather(None if error is None else str(error)) if t is not None), None)
    if error is not None:
        raise error
    if first_error is not None:
        raise OSError(first_error)
    return result


def _write_folder(staged: Staged, world: World) -> None:
    """Write all files except COMPLETE. They are on disk when the function returns."""
    folder, saved = staged.temp, staged.saved
    if staged.adapter:
        base, adapter = saved.meta["base"], staged.adapter.items()
        _together(
            world,
            lambda: write_adapter(folder / ADAPTER, staged.model, base["path"], base["revision"], adapter),
            alone=True,
        )
    else:
        _together(world, lambda: write_shards(folder / MODEL, staged.weights, world))
    crash_point("mid-save")
    if staged.optimizer:
        _together(world, lambda: write_shards(folder / OPTIMIZER, staged.optimizer, world))

    def write_rest() -> list[str]:
        if saved.value_head:
            save_file(dict(saved.value_head), folder / VALUE_HEAD)
        (folder / RNG).parent.mkdir()
        save_file(dict(staged.rng), folder / RNG)
        # Rollouts of one prompt share the memory of its pixels. safetensors does not allow this, so they are cloned.
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in saved.proof.items()}, folder / PROOF)
        write_json(folder / DATA, dict(saved.data))
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    names = world.gather(_together(world, write_rest, alone=True))[0]
    assert names is not None
    mine = [names[i] for i in world.mine(len(names))]  # each rank hashes some of the files
    table = world.interleave(_together(world, lambda: [file_facts(folder / name) for name in mine]) or [])

    def write_meta() -> None:
        files = dict(zip(names, table, strict=True))
        meta = {"schema": SCHEMA, "vlmrl": __version__, "step": saved.step, **saved.meta, "files": files}
        write_json(folder / META, meta)
        sync_tree(folder)

    _together(world, write_meta, alone=True)


def _rng_name(rank: int) -> str:
    return "torch" if rank == 0 else f"torch.{rank}"


def weight_files_of(folder: Path, part: str) -> list[Path]:
    """Return the safetensors files of a part of a checkpoint (`model`, `optimizer`), after comparison with meta.json.

    Raises: CheckpointError if meta.json lists none, or a file was changed since it was saved.
    """
    return [folder / name for name in check_files(folder, part) if name.endswith(".safetensors")]


def load_weights(folder: Path, model: nn.Module) -> None:
    """Load a checkpoint's weights into a model of the same architecture, in place. Tied weights stay tied.

    Raises: CheckpointError when a tensor is missing, has another shape, or a file was changed since it was saved.
    """
    own = model_tensors(model)
    _stored_tensors(folder, own)
    with torch.no_grad():
        for name, tensor in read_shards(folder / MODEL, own).items():
            own[name].copy_(tensor)


def link_weights(folder: Path, model: nn.Module) -> None:
    """Note for the parameters of a model on the meta device where a checkpoint has their values, and read the buffers.

    Raises: CheckpointError as `load_weights`.
    """
    own, parameters = model_tensors(model), dict(model.named_parameters())
    for name, stored in _stored_tensors(folder, own).items():
        tensor = own[name]
        if stored.shape != tuple(tensor.shape):
            message = f"the weights cannot be read: {name} is {stored.shape}, not {tuple(tensor.shape)}"
            raise CheckpointError(message, where=str(folder / MODEL))
        if name in parameters:
            weight = StoredWeight(str(folder), tensor.dtype, tuple(tensor.shape), {name: [stored]})
            leave_stored(parameters[name], weight)
        else:
            put_buffer(model, name, stored.whole().to(tensor.dtype))


def _stored_tensors(folder: Path, own: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    stored = read_tensors(weight_files_of(folder, MODEL))
    if own.keys() != stored.keys():
        missing, extra = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
        raise CheckpointError(
            f"the checkpoint does not fit the model: {len(missing)} tensors missing, {len(extra)} unknown",
            where=str(folder),
            hint=f"first of them: {(missing + extra)[0]}; was the base model changed?",
        )
    return stored


def load_optimizer_tensors(folder: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the saved optimizer state, with names `<kind>.<parameter name>`; {} if no update was made before saving.

    The number of ranks may differ from the number at saving.

    Args:
        like: name -> parameter. If the parameter is sharded and the saved tensor has its shape, only the shard of this
            rank is read.
    """
    if not listed(folder, OPTIMIZER):
        return {}
    tensors: dict[str, Tensor] = {}
    for name, stored in read_tensors(weight_files_of(folder, OPTIMIZER)).items():
        parameter = (like or {}).get(name.partition(".")[2])
        if parameter is None or stored.shape != tuple(parameter.shape):
            tensors[name] = stored.whole()
        else:
            tensors[name] = sharded_as(stored.rows(*own_rows(parameter)).to(own_part(parameter).device), parameter)
    return tensors


def load_value_head(folder: Path) -> dict[str, Tensor]:
    """Return the critic's value head. Raises: CheckpointError if there is none, or its file was changed."""
    check_files(folder, VALUE_HEAD)
    return load_file(folder / VALUE_HEAD)


def load_data(folder: Path) -> dict[str, Any]:
    """Return the content of data.json: data position and training state.

    Raises: CheckpointError when it cannot be read.
    """
    check_files(folder, DATA)
    try:
        return parse_json((folder / DATA).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{DATA} cannot be read: {error}", where=str(folder)) from error


def load_rng(folder: Path, world: World = ALONE) -> None:
    """Restore torch's random state of this rank. A rank that did not exist at saving keeps its current state."""
    check_files(folder, RNG)
    states = load_file(folder / RNG)
    if _rng_name(world.rank) in states:
        torch.random.set_rng_state(states[_rng_name(world.rank)])


def load_proof(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of the proof; {} when the checkpoint has none."""
    check_files(folder, PROOF)
    return load_file(folder / PROOF)


def _write_hf_files(folder: Path, model: Any, processor: Any) -> None:
    folder.mkdir()
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # only the loaded base is quantized, not the saved model
        del config.quantization_config
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    try:
        write_processor(processor, folder)
    except Exception as error:  # fast tokenizers raise a plain Exception for an OSError
        if type(error) is Exception and "os error" in str(error):
            raise OSError(str(error)) from error
        raise
