"""Plan of a merged folder, made before any weight is read: tensors of the model, tied weights, names on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vlmrl.errors import CheckpointError
from vlmrl.model.model_facts import loading
from vlmrl.model.safetensors_blocks import StoredTensor
from vlmrl.model.stored_weights import OWN_CODE, as_published, as_written


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
            what = f"is missing: {first}" if not stored_names else f"is there twice: {' and '.join(stored_names)}"
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
