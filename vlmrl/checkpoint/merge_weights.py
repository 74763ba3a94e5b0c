"""Plan of a merged folder, made before any weight is read, and the writing of its weights, tensor by tensor.

The plan has the tensors of the model, tied weights, and names on disk. An adapter (LoRA, rsLoRA, DoRA) is merged into
the base weight that it changes, a block of rows at a time.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vlmrl.checkpoint.io import check_files, weight_files_of
from vlmrl.checkpoint.load import BitSums, find_base, refuse_base, saved_lora
from vlmrl.errors import CheckpointError
from vlmrl.model.load import DTYPES
from vlmrl.model.lora import PEFT_PREFIX, linear_names, read_adapter, target_names
from vlmrl.model.model_facts import loading, quiet_transformers
from vlmrl.model.safetensors_blocks import StoredTensor, TensorSpec, read_tensors, weight_files, write_shards
from vlmrl.model.stored_weights import OWN_CODE, as_published, as_written
from vlmrl.store.checkpoints import ADAPTER, HF, MODEL, read_meta

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Lora


class CannotStreamError(Exception):
    """Error: a model's tensors cannot be written one by one. The message has the reason; the whole model is loaded."""


@dataclass(frozen=True)
class Output:
    """Tensor to write to the merged folder.

    Args:
        name, shape: its name and shape in the folder.
        source: name of the tensor in the model from which it is made.
        converted: it is a part of the source or arranged differently (experts that the model keeps as one tensor).
    """

    name: str
    shape: tuple[int, ...]
    floating: bool
    source: str
    converted: bool = False


@dataclass(frozen=True)
class MergePlan:
    """Model on the meta device, its tensors, and the tensors to write.

    Args:
        tensors: first name in the model -> tensor. A tied weight (one storage with several names) occurs once.
        names: first name in the model -> all names of the same storage.
        outputs: in the order of writing.
    """

    model: Any
    tensors: Mapping[str, Tensor]
    names: Mapping[str, tuple[str, ...]]
    outputs: tuple[Output, ...]
    parameters: int = field(default=0)


def make_plan(hf: Path, dtype: torch.dtype, own_code: bool = False) -> MergePlan:
    """Plan a merge from a checkpoint's `hf` folder.

    Args:
        own_code: whether code in the folder may be run.
    Raises: CannotStreamError if a tensor on disk must be made from several tensors of the model, or if `own_code`;
        CheckpointError if the model cannot be read.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    if own_code:
        raise CannotStreamError(OWN_CODE)
    with loading(str(hf)), torch.device("meta"):
        config = AutoConfig.from_pretrained(hf, trust_remote_code=False)
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=False)
    if (hf / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(hf)
    by_id: dict[int, list[str]] = {}
    state = model.state_dict(keep_vars=True)
    for name, tensor in state.items():
        by_id.setdefault(id(tensor), []).append(name)
    names = {group[0]: tuple(group) for group in by_id.values()}
    outputs = _outputs(model, {first: state[first] for first in names}, names)
    parameters = sum(p.numel() for p in model.parameters())
    return MergePlan(model, {first: state[first] for first in names}, names, tuple(outputs), parameters)


def _outputs(model: Any, tensors: Mapping[str, Tensor], names: Mapping[str, tuple[str, ...]]) -> list[Output]:
    """Return the tensors to write, with names and shapes as in published checkpoints.

    A tied weight is written once, under the name from which it is loaded.
    """
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    kept_names = {first: next((n for n in group if n not in tied), first) for first, group in names.items()}
    state = {name: tensors[first] for first, name in kept_names.items() if name not in ignored}
    own = {name: first for first, name in kept_names.items()}
    by_id = {id(tensor): own[name] for name, tensor in state.items()}
    written = as_published(model, state)
    outputs, parts = [], {}
    for name, tensor in written.items():
        if id(tensor) in by_id:
            outputs.append(Output(name, tuple(tensor.shape), tensor.is_floating_point(), by_id[id(tensor)]))
        else:
            parts[name] = tuple(tensor.shape)
    renamed = {o.source for o in outputs}
    for name in (n for n in state if own[n] not in renamed):
        for part, tensor in as_published(model, {name: state[name]}).items():
            if parts.pop(part, None) != tuple(tensor.shape):
                raise CannotStreamError(f"{part} is made from several tensors of the model")
            outputs.append(Output(part, tuple(tensor.shape), tensor.is_floating_point(), own[name], converted=True))
    if parts:
        raise CannotStreamError(f"{next(iter(parts))} is made from several tensors of the model")
    return outputs


def match_stored(plan: MergePlan, stored: Mapping[str, StoredTensor], where: Path) -> dict[str, StoredTensor]:
    """Return first name in the model -> tensor in a checkpoint. Every tensor must match.

    Raises: CheckpointError that names the first tensor that is missing, unknown, stored twice, or of another shape.
    """
    hint = "check whether the base model was changed, or use another checkpoint of the run"
    matched: dict[str, StoredTensor] = {}
    for first, group in plan.names.items():
        stored_names = [name for name in group if name in stored]
        if len(stored_names) != 1:
            what = f"is missing: {first}" if not stored_names else f"appears twice: {' and '.join(stored_names)}"
            raise CheckpointError(f"a tensor of the model {what}", where=str(where), hint=hint)
        matched[first] = stored[stored_names[0]]
        if matched[first].shape != tuple(plan.tensors[first].shape):
            message = f"{first} has shape {matched[first].shape}, the model's is {tuple(plan.tensors[first].shape)}"
            raise CheckpointError(message, where=str(where), hint=hint)
    unknown = sorted(stored.keys() - {t.name for t in matched.values()})
    if unknown:
        raise CheckpointError(
            f"{len(unknown)} tensors do not belong to the model, the first: {unknown[0]}", where=str(where), hint=hint
        )
    return matched


def match_written(plan: MergePlan, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return first name in the model -> tensor in a Hugging Face folder.

    The name in the folder may be one of the model's names, the published name, or the name that transformers writes for
    a model from another source.

    Raises: CannotStreamError if a tensor has none of these names, so that only transformers itself can load it.
    """
    published = {o.source: o.name for o in plan.outputs if not o.converted}
    own = {id(tensor): first for first, tensor in plan.tensors.items()}
    written = {own[id(t)]: n for n, t in as_written(plan.model, plan.tensors).items() if id(t) in own}
    matched: dict[str, StoredTensor] = {}
    for first, group in plan.names.items():
        name = next((n for n in (published.get(first), written.get(first), *group) if n in stored), None)
        if name is None or stored[name].shape != tuple(plan.tensors[first].shape):
            raise CannotStreamError(f"the base model's files do not hold {first} as it is in the model")
        matched[first] = stored[name]
    return matched


DOWN, UP, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


@dataclass(frozen=True)
class Fold:
    """Change of one weight W [rows, columns] by an adapter, in float32.

    LoRA: W + scale * up @ down. DoRA: the same sum, of which each row is scaled to its length in `magnitude`.

    Args:
        down: [rank, columns].
        up: [rows, rank].
        magnitude: [rows]; None = LoRA.
    Source: DoRA, arXiv:2402.09353, equation 5.
    """

    name: str
    down: Tensor
    up: Tensor
    scale: float
    magnitude: Tensor | None

    def add(self, rows: Tensor, start: int) -> Tensor:
        """Return the folded rows that begin at row `start`, float32 [len(rows), columns].

        Raises: CheckpointError if a value is not finite.
        """
        end = start + len(rows)
        # [r, columns] + [r, rank] @ [rank, columns]
        folded = rows.float() + (self.up[start:end] @ self.down) * self.scale
        if self.magnitude is not None:
            length = torch.linalg.norm(folded, dim=1)
            folded = (self.magnitude[start:end] / length).view(-1, 1) * folded
        if not torch.isfinite(folded).all():
            raise CheckpointError(f"the adapter cannot be folded into {self.name}: a weight would not be finite")
        return folded


def read_folds(folder: Path, plan: MergePlan, lora: Lora, freeze: Sequence[str]) -> dict[str, Fold]:
    """Return name of a weight -> the fold that changes it, from a PEFT folder: exactly those that `lora` requires.

    Raises: CheckpointError that names a tensor that is missing, unknown or of another shape; CannotStreamError if the
        adapter changes a tied weight.
    """
    tensors = read_adapter(folder)
    scale = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    folds: dict[str, Fold] = {}
    unused = set(tensors)
    for module in target_names(linear_names(plan.model), lora, freeze):
        weight = f"{module}.weight"
        if len(plan.names.get(weight, ())) != 1:
            raise CannotStreamError(f"the adapter is on {weight}, which is tied to another weight")
        rows, columns = plan.tensors[weight].shape
        shapes = {DOWN: (lora.rank, columns), UP: (rows, lora.rank)} | ({MAGNITUDE: (rows,)} if lora.dora else {})
        parts = {}
        for part, shape in shapes.items():
            name = f"{PEFT_PREFIX}{module}.{part}"
            if name not in tensors or tuple(tensors[name].shape) != shape:
                problem = (
                    "is missing" if name not in tensors else f"has shape {tuple(tensors[name].shape)}, not {shape}"
                )
                raise _does_not_fit(folder, f"{module}.{part} {problem}")
            unused.discard(name)
            parts[part] = tensors[name].float()
        folds[weight] = Fold(module, parts[DOWN], parts[UP], scale, parts.get(MAGNITUDE))
    if unused:
        raise _does_not_fit(folder, f"{min(unused).removeprefix(PEFT_PREFIX)} is on no layer of [lora]")
    return folds


def _does_not_fit(folder: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the adapter does not fit the model: {what}", where=str(folder), hint="use another checkpoint of the run"
    )


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
