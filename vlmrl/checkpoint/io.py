"""Saving and loading checkpoints: all or nothing, and exact."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from vlmrl.checkpoint.format import ADAPTER, DATA, HF, MODEL, OPTIMIZER, PROOF, RNG, SCHEMA, VALUE_HEAD, read_meta
from vlmrl.checkpoint.shards import TensorSpec, read_tensors, split_shards
from vlmrl.dist.fsdp import own_part, own_rows, sharded_as, whole
from vlmrl.dist.world import ALONE, World
from vlmrl.errors import CheckpointError, StoreError
from vlmrl.model.lora import adapter_tensors, has_adapter, write_adapter
from vlmrl.store.faults import crash_point
from vlmrl.store.files import remove_tree, sync_folder, temp_path, write_atomic, write_json
from vlmrl.store.layout import COMPLETE, META, checkpoint_dir

T = TypeVar("T")

MAX_FILES = 64
"""Files that weights or optimizer state are cut into, at most twice as many; each is copied in memory to be written."""
MIN_FILE_BYTES = 64 * 2**20
"""Smaller files than this are not made, but for the last."""


@dataclass(frozen=True)
class Saved:
    """What goes into a checkpoint besides tensors.

    Args:
        step: policy version of the weights.
        meta: base model, dtype and so on (JSON values); with an adapter, `base` has `path` and `revision`.
        data: data position and training state (JSON values).
        proof: tensors of `proof.safetensors`.
        value_head: the critic's; {} = there is none.
    """

    step: int
    meta: Mapping[str, Any]
    data: Mapping[str, Any]
    proof: Mapping[str, Tensor] = field(default_factory=dict)
    value_head: Mapping[str, Tensor] = field(default_factory=dict)


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The weights by name, each storage once: a tied weight is saved under the first of its names."""
    names: dict[int, str] = {}
    tied = {n for n, p in model.named_parameters(remove_duplicate=False) if names.setdefault(id(p), n) != n}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        part = own_part(tensor)
        key = (part.data_ptr(), tuple(part.shape))
        if name in tied or (part.numel() and key in seen):
            continue
        seen.add(key)
        tensors[name] = tensor
    return tensors


def save_checkpoint(
    run_dir: Path, saved: Saved, model: Any, processor: Any, optimizer_tensors: Mapping[str, Tensor],
    world: World = ALONE, dtypes: Mapping[str, torch.dtype] | None = None,
) -> Path:  # fmt: skip
    """Write `checkpoints/step-<step>/`. Killed at any instant, the folder is complete or, for any reader, not there.

    Args:
        world: the processes that hold the shards of the tensors; each writes its own, rank 0 the rest.
        dtypes: parameter of the model -> what it is saved in, where that is not its own.
    Returns: the folder. Raises: CheckpointError on all of them when the disk refuses; older checkpoints are untouched.
    """
    final = checkpoint_dir(run_dir, saved.step)
    temp = world.from_main(lambda: temp_path(final))
    try:
        _write_folder(temp, saved, model, processor, optimizer_tensors, world, dtypes or {})
        _together(world, lambda: _put_in_place(temp, final), alone=True)
    except (OSError, StoreError, SafetensorError) as error:
        raise CheckpointError(f"the checkpoint of step {saved.step} could not be saved: {error}", where=str(final),
                              hint="free disk space; older checkpoints are untouched") from error  # fmt: skip
    finally:
        if world.is_main and temp.exists():
            remove_tree(temp)
    return final


def _put_in_place(temp: Path, final: Path) -> None:
    if final.exists():
        remove_tree(final)
    os.replace(temp, final)
    sync_folder(final.parent)
    crash_point("before-complete")
    write_atomic(final / COMPLETE, _sha256(final / META).encode())


def _together(world: World, action: Callable[[], T], *, alone: bool = False) -> T | None:
    """Do a part of the saving on all processes (`alone`: on rank 0), which all wait for. It fails for all or for none.

    Raises: what the action raised; OSError with its words on the others.
    """
    found = error = None
    if world.is_main or not alone:
        try:
            found = action()
        except (OSError, StoreError, SafetensorError) as raised:
            error = raised
    told = next((t for t in world.gather(None if error is None else str(error)) if t is not None), None)
    if error is not None:
        raise error
    if told is not None:
        raise OSError(told)
    return found


def _write_folder(
    folder: Path, saved: Saved, model: Any, processor: Any, optimizer_tensors: Mapping[str, Tensor], world: World,
    dtypes: Mapping[str, torch.dtype],
) -> None:  # fmt: skip
    """Everything but COMPLETE, on the disk when this returns."""
    _together(world, lambda: folder.mkdir(parents=True), alone=True)
    if has_adapter(model):
        base, narrow = saved.meta["base"], next(iter(dtypes.values()), None)  # an adapter is of one dtype
        adapter = {n: whole(t if narrow is None else t.to(narrow)) for n, t in adapter_tensors(model).items()}
        _together(
            world,
            lambda: write_adapter(folder / ADAPTER, model, base["path"], base["revision"], adapter.items()),
            alone=True,
        )
    else:
        weights = {n: t.to(dtypes.get(n, t.dtype)) for n, t in model_tensors(model).items()}
        _together(world, lambda: _write_tensors(folder / MODEL, weights, world))
    crash_point("mid-save")
    if optimizer_tensors:
        _together(world, lambda: _write_tensors(folder / OPTIMIZER, dict(optimizer_tensors), world))
    value_head = {k: whole(v).detach().cpu().contiguous() for k, v in saved.value_head.items()}
    states = {_rng_name(rank): state for rank, state in enumerate(world.gather(torch.random.get_rng_state()))}

    def write_rest() -> list[str]:
        if value_head:
            save_file(value_head, folder / VALUE_HEAD)
        _write_hf_files(folder / HF, model, processor)
        (folder / RNG).parent.mkdir()
        save_file(states, folder / RNG)
        # Rollouts of one prompt share its pixels; safetensors wants every tensor in memory of its own.
        save_file({k: v.detach().cpu().contiguous().clone() for k, v in saved.proof.items()}, folder / PROOF)
        write_json(folder / DATA, dict(saved.data))
        return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())

    names = world.gather(_together(world, write_rest, alone=True))[0]
    assert names is not None
    mine = [names[i] for i in world.mine(len(names))]  # hashing is shared too
    table = world.interleave(_together(world, lambda: [_file_facts(folder / name) for name in mine]) or [])

    def write_meta() -> None:
        files = dict(zip(names, table, strict=True))
        meta = {"schema": SCHEMA, "vlmrl": __version__, "step": saved.step, **saved.meta, "files": files}
        write_json(folder / META, meta)
        _sync_tree(folder)

    _together(world, write_meta, alone=True)


def _rng_name(rank: int) -> str:
    return "torch" if rank == 0 else f"torch.{rank}"


def load_weights(folder: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into a model of the same architecture, in place. Ties stay ties.

    Raises: CheckpointError when a tensor is missing, has another shape, or a file was changed since it was saved.
    """
    check_files(folder, MODEL)
    own = model_tensors(model)
    stored = _stored_names(folder / MODEL)
    if own.keys() != stored:
        missing, extra = sorted(own.keys() - stored), sorted(stored - own.keys())
        raise CheckpointError(
            f"the checkpoint does not fit the model: {len(missing)} tensors missing, {len(extra)} unknown",
            where=str(folder), hint=f"first of them: {(missing + extra)[0]}; was the base model changed?",
        )  # fmt: skip
    with torch.no_grad():
        for name, tensor in _read_tensors(folder / MODEL, own).items():
            own[name].copy_(tensor)


def load_optimizer_tensors(folder: Path, like: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What the optimizer saved, as `<kind>.<parameter name>`. Empty when nothing was (no step had been taken).

    Args: like: parameters by name. Of what is as large as its parameter, and that sharded, only this process's part is
        read. However many processes saved it.
    """
    if not (folder / OPTIMIZER).is_dir():
        return {}
    check_files(folder, OPTIMIZER)
    found: dict[str, Tensor] = {}
    for name, stored in read_tensors(sorted((folder / OPTIMIZER).glob("*.safetensors"))).items():
        parameter = (like or {}).get(name.partition(".")[2])
        if parameter is None or stored.shape != tuple(parameter.shape):
            found[name] = stored.whole()
        else:
            found[name] = sharded_as(stored.rows(*own_rows(parameter)).to(own_part(parameter).device), parameter)
    return found


def load_value_head(folder: Path) -> dict[str, Tensor]:
    """The critic's value head. Raises: CheckpointError when the checkpoint has none, or it was changed."""
    check_files(folder, VALUE_HEAD)
    return load_file(folder / VALUE_HEAD)


def load_data(folder: Path) -> dict[str, Any]:
    """data.json: data position and training state."""
    check_files(folder, DATA)
    try:
        return json.loads((folder / DATA).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{DATA} cannot be read: {error}", where=str(folder)) from error


def load_rng(folder: Path, world: World = ALONE) -> None:
    """Put back torch's random state of this process; one that did not exist then keeps the state it has."""
    check_files(folder, RNG)
    states = load_file(folder / RNG)
    if _rng_name(world.rank) in states:
        torch.random.set_rng_state(states[_rng_name(world.rank)])


def load_proof(folder: Path) -> dict[str, Tensor]:
    """Tensors of the proof; empty when the checkpoint has none."""
    check_files(folder, PROOF)
    return load_file(folder / PROOF)


def check_files(folder: Path, under: str = "") -> list[str]:
    """Compare the files under `folder/under` with the table in meta.json: names, sizes and sha256.

    Returns: the names checked. Raises: CheckpointError naming the first file that is missing or differs.
    """
    table = {n: f for n, f in read_meta(folder)["files"].items() if n == under or n.startswith(under and f"{under}/")}
    if not table:
        raise CheckpointError(f"{META} says nothing of {under or 'any file'}", where=str(folder),
                              hint="use another checkpoint of the run")  # fmt: skip
    for name, wanted in table.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != wanted["bytes"] or _sha256(path) != wanted["sha256"]:
            state = "was changed since it was saved" if path.is_file() else "is missing"
            hint = "use another checkpoint of the run; --resume takes the one before when this folder is gone"
            raise CheckpointError(f"{name} {state}", where=str(folder), hint=hint)
    return sorted(table)


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor], world: World) -> None:
    """Each process writes what it holds; of what all hold (no shards) one writes it."""
    several = world.size > 1
    with _plain_errors():
        writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_of(tensors), save_distributed=several)
        save({k: v.detach().contiguous() for k, v in tensors.items()}, storage_writer=writer, no_dist=not several)


def _file_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The file, from 1, that each tensor goes into. The writer makes each file in memory first: many small ones."""
    limit = max(MIN_FILE_BYTES, sum(t.nbytes for t in tensors.values()) // MAX_FILES)
    specs = [TensorSpec(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    return {spec.name: file for file, shard in enumerate(split_shards(specs, limit), 1) for spec in shard}


def _read_tensors(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    target = {k: torch.empty_like(v, memory_format=torch.contiguous_format) for k, v in like.items()}
    try:
        with _plain_errors():
            load(target, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except (ValueError, RuntimeError, OSError, SafetensorError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"the weights cannot be read: {first}", where=str(folder)) from error
    return target


def _stored_names(folder: Path) -> set[str]:
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names |= set(file.keys())
    return names


@contextmanager
def _plain_errors() -> Iterator[None]:
    """torch warns that no process group exists, which is what a single process means, and wraps what went wrong in an
    exception that is no `Exception`: the first cause is raised instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        try:
            yield
        except CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise cause from error


def _write_hf_files(folder: Path, model: Any, processor: Any) -> None:
    folder.mkdir()
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # how the base was held in memory is no property of the model
        del config.quantization_config
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)
    processor.save_pretrained(folder)


def _file_facts(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()  # hashlib.file_digest needs Python 3.11
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
