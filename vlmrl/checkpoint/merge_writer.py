"""Writing of a merged folder's weights, tensor by tensor: whole weights, or base weights merged with an adapter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrl.checkpoint.adapter_folding import Fold, read_folds
from vlmrl.checkpoint.checked_files import check_files
from vlmrl.checkpoint.io import weight_files_of
from vlmrl.checkpoint.load import BitSums, find_base, refuse_base, saved_lora
from vlmrl.checkpoint.merge_plan import CannotStreamError, MergePlan, make_plan, match_stored, match_written
from vlmrl.model.load import DTYPES
from vlmrl.model.model_facts import quiet_transformers
from vlmrl.model.safetensors_blocks import StoredTensor, TensorSpec, read_tensors, weight_files, write_shards
from vlmrl.model.stored_weights import as_published
from vlmrl.store.checkpoints import ADAPTER, HF, MODEL, read_meta


@dataclass(frozen=True)
class WeightSource:
    """Sources of the model's tensors.

    Args:
        stored: first name in the model -> tensor on disk.
        trained: dtype of the weights in training.
        folds: first name in the model -> change of this weight by the adapter.
        fingerprint: expected checksum of the base model; None = no adapter: the checksums of the files are compared.
    """

    stored: Mapping[str, StoredTensor]
    trained: torch.dtype
    folds: Mapping[str, Fold]
    fingerprint: str | None


def write_streaming(
    checkpoint: Path, folder: Path, dtype: str | None, base: str | None, max_shard_bytes: int, own_code: bool = False
) -> int:
    """Write weights, index, config and generation config. It needs memory for a few blocks of rows only.

    Args:
        dtype: dtype of floating-point tensors; None = as trained.
        base: present folder of an adapter's base model.
        own_code: as in `make_plan`.
    Returns: number of parameters.
    Raises: CheckpointError; CannotStreamError before anything is written.
    """
    meta = read_meta(checkpoint)
    if meta.get("quantize"):
        raise CannotStreamError("a base in 4 bits is unpacked as a whole")
    trained = DTYPES[meta["dtype"]]
    check_files(checkpoint, HF)
    plan = make_plan(checkpoint / HF, trained, own_code)
    source = _whole(checkpoint, plan, trained) if saved_lora(checkpoint) is None else _folded(checkpoint, plan, base)
    out_dtype = trained if dtype is None else DTYPES[dtype]
    writer = _Writer(plan, source, out_dtype)
    write_shards(folder, writer.specs(), writer.blocks, max_shard_bytes)
    if source.fingerprint is not None and writer.fingerprint() != source.fingerprint:
        refuse_base(checkpoint)
    _write_config(plan.model, folder, out_dtype)
    return plan.parameters


def _whole(checkpoint: Path, plan: MergePlan, trained: torch.dtype) -> WeightSource:
    stored = read_tensors(weight_files_of(checkpoint, MODEL))
    return WeightSource(match_stored(plan, stored, checkpoint / MODEL), trained, {}, None)


def _folded(checkpoint: Path, plan: MergePlan, base: str | None) -> WeightSource:
    meta = read_meta(checkpoint)
    trained = DTYPES[meta["dtype"]]
    check_files(checkpoint, ADAPTER)
    lora = saved_lora(checkpoint)
    assert lora is not None
    folds = read_folds(checkpoint / ADAPTER, plan, lora, meta.get("freeze", ()))
    _same_types_as_loaded(plan, trained)
    place = find_base(checkpoint, base)
    if isinstance(place, Path):
        stored = _whole(place, plan, trained).stored
    elif not Path(place).is_dir():
        raise CannotStreamError(f"the base model `{place}` is not a local folder")
    else:
        stored = match_written(plan, read_tensors(weight_files(Path(place))))
    if {o.source for o in plan.outputs} != plan.tensors.keys():
        raise CannotStreamError("the base model's checksum counts tensors that are not written")
    return WeightSource(stored, trained, folds, meta["base"].get("fingerprint", ""))


def _same_types_as_loaded(plan: MergePlan, trained: torch.dtype) -> None:
    """Check that all weights have the dtype `trained` when the base model is loaded. Raises: CannotStreamError if not.

    The checksum depends on these dtypes, and some model families keep parts in float32.
    """
    model = plan.model
    float32_modules = getattr(model, "_keep_in_fp32_modules", None) or getattr(
        model, "_keep_in_fp32_modules_strict", None
    )
    buffers = any(b.is_floating_point() for n, b in model.named_buffers() if n in plan.tensors)
    if trained != torch.float32 and (float32_modules or buffers):
        raise CannotStreamError("this family keeps some weights in float32 when it is loaded")


class _Writer:
    """Source of the blocks of each output, in the order of the plan.

    The checksum of a base model is computed from the rows while they are read.
    """

    def __init__(self, plan: MergePlan, source: WeightSource, dtype: torch.dtype) -> None:
        self.plan, self.source, self.dtype = plan, source, dtype
        self.by_name = {o.name: o for o in plan.outputs}
        self.sums: dict[str, BitSums] = {}
        self.converted: tuple[str, dict[str, Tensor]] = ("", {})

    def specs(self) -> list[TensorSpec]:
        types = {n: self.dtype if t.dtype.is_floating_point else t.dtype for n, t in self.source.stored.items()}
        return [TensorSpec(o.name, types[o.source], o.shape) for o in self.plan.outputs]

    def blocks(self, name: str) -> Iterator[Tensor]:
        output = self.by_name[name]
        stored = self.source.stored[output.source]
        dtype = self.dtype if output.floating else stored.dtype
        if output.converted:
            yield self._arranged(output.source)[name].to(dtype)
            return
        fold = self.source.folds.get(output.source)
        for start, rows in stored.blocks():
            rows = self._as_trained(output.source, rows)
            yield (rows if fold is None else fold.add(rows, start)).to(dtype)

    def _arranged(self, source: str) -> dict[str, Tensor]:
        """Return the parts into which a tensor is split for writing.

        They are kept in memory until the next such tensor, so that each tensor is read only once.
        """
        if self.converted[0] != source:
            self.converted = ("", {})
            rows = [self._as_trained(source, block) for _, block in self.source.stored[source].blocks()]
            own = {source: torch.cat(rows) if len(rows) > 1 else rows[0]}
            self.converted = (source, as_published(self.plan.model, own))
        return self.converted[1]

    def _as_trained(self, source: str, rows: Tensor) -> Tensor:
        """Return rows of whole weights unchanged, and rows of a base model in the dtype in which it was loaded.

        float32 masters are rounded only once, when they are written.
        """
        if self.source.fingerprint is None or not rows.is_floating_point():
            return rows
        rows = rows.to(self.source.trained)
        self.sums.setdefault(source, BitSums()).add(rows)
        return rows

    def fingerprint(self) -> str:
        """Return the checksum of the base model (see `load.fingerprint`), computed from the blocks that were read."""
        digest = hashlib.sha256()
        for name in sorted(self.sums):
            shape = tuple(self.plan.tensors[name].shape)
            digest.update(f"{name} {shape} {self.source.trained} {self.sums[name].pair}".encode())
        return digest.hexdigest()


def _write_config(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json as `save_pretrained` writes them."""
    model.config.dtype = str(dtype).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    with quiet_transformers():
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)
