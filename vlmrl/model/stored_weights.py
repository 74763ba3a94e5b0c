"""Models whose weights are still in their files: parameters are on the meta device and know their tensors on disk.

A sharded run builds its model in this way. Then each rank reads only the rows that it holds. transformers' own loader
runs on tensors without values, so its rules for renamed, merged, tied and missing weights apply unchanged. In memory,
transformers gives some tensors other names than the files have, and merges others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vlmrl.model import safetensors_blocks
from vlmrl.model.safetensors_blocks import StoredTensor, read_tensors

ATTRIBUTE = "stored_weight"
"""Attribute of a parameter on the meta device that holds its `StoredWeight`."""
REASON = "loaded_whole_because"
"""Attribute of a model that could not be left in its files: the reason, as text."""


OWN_CODE = "its code is in its own repository"


@dataclass(frozen=True)
class Conversion:
    """Conversion of stored tensors to a weight, as transformers does it when it loads a model.

    Args:
        transform: transformers' `WeightConverter`.
        first_name: name of its first result in the model.
        name: name of the weight in the model.
        shapes: name -> shape of all parameters of the model.
    """

    transform: Any
    first_name: str
    name: str
    shapes: Mapping[str, torch.Size]
    config: Any

    @property
    def merges(self) -> bool:
        """Return whether each stored tensor becomes one row, as the experts of a mixture do."""
        from transformers.core_model_loading import MergeModulelist

        first, *others = self.transform.operations
        return isinstance(first, MergeModulelist) and first.dim == 0 and all(map(_keeps_rows, others))

    @property
    def keeps_rows(self) -> bool:
        """Return whether each row depends only on the same row of the stored tensors."""
        return all(map(_keeps_rows, self.transform.operations))

    def convert(self, tensors: Mapping[str, Sequence[Tensor]], rows: int | None = None) -> Tensor:
        """Return the weight.

        Args:
            rows: number of rows, if the tensors are parts of those in the files.
        """

        def parameter(name: str) -> Tensor:
            shape = self.shapes[name]
            return torch.empty(shape if rows is None else (rows, *shape[1:]), device="meta")

        self.transform.collected_tensors = {pattern: list(parts) for pattern, parts in tensors.items()}
        results = self.transform.convert(
            self.first_name, model=SimpleNamespace(get_parameter=parameter), config=self.config
        )
        result = results[self.name]
        return result[0] if isinstance(result, list) else result


def _keeps_rows(operation: Any) -> bool:
    from transformers.core_model_loading import Concatenate, Conv3dToLinear, Transpose

    if isinstance(operation, Transpose):
        return min(operation.dim0, operation.dim1) >= 1
    if isinstance(operation, Concatenate):
        return operation.dim >= 1
    return isinstance(operation, Conv3dToLinear)


@dataclass(frozen=True)
class StoredWeight:
    """Weight of a model that is still in safetensors files.

    Args:
        source: folder or hub name of the model.
        dtype: dtype of the model's weight; the files may have another one.
        shape: shape of the model's weight.
        tensors: pattern of a conversion -> its tensors in files; a weight without a conversion has one tensor.
    """

    source: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    tensors: Mapping[str, Sequence[StoredTensor]]
    conversion: Conversion | None = None

    def rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) in the model's dtype. A scalar has one row.

        A conversion that mixes rows reads the whole tensor.
        """
        if first >= last:
            return torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        if self.conversion is None:
            ((tensor,),) = self.tensors.values()
            return tensor.rows(first, last).to(self.dtype)
        if self.conversion.merges:
            merged = {k: [t.whole().to(self.dtype) for t in parts[first:last]] for k, parts in self.tensors.items()}
            return self.conversion.convert(merged, last - first)
        if self.conversion.keeps_rows:
            parts = {k: [t.rows(first, last).to(self.dtype) for t in v] for k, v in self.tensors.items()}
            return self.conversion.convert(parts, last - first)
        whole = self.conversion.convert({k: [t.whole().to(self.dtype) for t in v] for k, v in self.tensors.items()})
        return whole[first:last].clone()

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield (index of the first row, rows) of rows [first, last), in blocks of about `BLOCK_BYTES`."""
        last = (self.shape or (1,))[0] if last is None else last
        step = max(1, safetensors_blocks.BLOCK_BYTES // max(1, math.prod(self.shape[1:]) * self.dtype.itemsize))
        if self.conversion is not None and not (self.conversion.merges or self.conversion.keeps_rows):
            step = max(1, last - first)
        for start in range(first, last, step):
            yield start, self.rows(start, min(start + step, last))


def stored_weight(parameter: Tensor) -> StoredWeight | None:
    """Return where a parameter's values are; None if they are in memory."""
    return getattr(parameter, ATTRIBUTE, None)


def leave_stored(parameter: Tensor, weight: StoredWeight) -> None:
    """Note that a parameter on the meta device has its values in files."""
    setattr(parameter, ATTRIBUTE, weight)


def is_stored(model: nn.Module) -> bool:
    """Return whether the weights of a model are still in their files."""
    return any(stored_weight(p) is not None for p in model.parameters())


def value_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor's values in consecutive parts, from memory or from its files."""
    weight = stored_weight(tensor)
    if weight is None:
        yield tensor
    else:
        yield from (rows for _, rows in weight.blocks())


def why_loaded_whole(model: nn.Module) -> str | None:
    """Return why the weights of a model could not be left in their files; None if nothing prevented it."""
    return getattr(model, REASON, None)


def set_loaded_whole(model: nn.Module, reason: str) -> None:
    """Note why the weights of a model could not be left in their files."""
    setattr(model, REASON, reason)


@contextmanager
def weights_left_in_files(source: str) -> Iterator[None]:
    """Context manager: `from_pretrained` leaves the parameters in their files. Buffers have their values.

    The weights of models with code of their own, and quantized weights, are loaded as usual (see `why_loaded_whole`).

    Args:
        source: folder or hub name of the model.
    """
    from transformers.modeling_utils import PreTrainedModel

    owner: Any = PreTrainedModel
    load = owner._load_pretrained_model

    def load_names(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *more: Any) -> Any:
        if reason := _why_whole(model, load_config):
            set_loaded_whole(model, reason)
            return load(model, state_dict, checkpoint_files, load_config, *more)
        weights: dict[str, StoredWeight] = {}
        stand_ins = {n: _StandIn(t) for n, t in read_tensors([Path(f) for f in checkpoint_files]).items()}
        with _recorded_conversions(source, model, weights):
            result = load(model, stand_ins, None, load_config, *more)
        _attach(model, weights)
        return result

    owner._load_pretrained_model = staticmethod(load_names)
    try:
        yield
    finally:
        owner._load_pretrained_model = staticmethod(load)


def _why_whole(model: Any, load_config: Any) -> str | None:
    if model.is_custom_code():
        return OWN_CODE
    return "its weights are stored quantized" if load_config.hf_quantizer is not None else None


class _StandIn:
    """Tensor of a file for transformers' loader, which indexes it and converts its dtype: without values."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored

    def __getitem__(self, index: Any) -> _StandIn:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(self.stored.shape, dtype=dtype or self.stored.dtype, device="meta")
        tensor.stored = self.stored  # type: ignore[attr-defined]
        return tensor


@contextmanager
def _recorded_conversions(source: str, model: Any, weights: dict[str, StoredWeight]) -> Iterator[None]:
    """Context manager: add every weight that transformers' loader makes of stand-ins to `weights`."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    kinds: tuple[Any, ...] = (WeightRenaming, WeightConverter)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}

    def recording(convert: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def convert_and_record(self: Any, layer_name: str, **arguments: Any) -> dict[str, Any]:
            parts = {k: [_result(part).stored for part in v] for k, v in self.collected_tensors.items()}
            results = convert(self, layer_name, **arguments)
            for name, value in results.items():
                value = value[0] if isinstance(value, list) else value
                is_renamed = isinstance(self, WeightRenaming)
                conversion = None if is_renamed else Conversion(self, layer_name, name, shapes, model.config)
                weights[name] = StoredWeight(source, value.dtype, tuple(value.shape), parts, conversion)
            return results

        return convert_and_record

    originals = [(kind, kind.convert) for kind in kinds]
    for kind, convert in originals:
        kind.convert = recording(convert)
    try:
        yield
    finally:
        for kind, convert in originals:
            kind.convert = convert


def _result(part: Any) -> Any:
    return part.result() if isinstance(part, Future) else part()


def _attach(model: Any, weights: Mapping[str, StoredWeight]) -> None:
    """Note for each parameter where its values are, and read the buffers."""
    parameters, buffers = dict(model.named_parameters(remove_duplicate=False)), dict(model.named_buffers())
    for name, weight in weights.items():
        parameter = parameters.get(name)
        if parameter is not None and tuple(parameter.shape) == weight.shape:  # others are refused with the report
            leave_stored(parameter, weight)
        elif name in buffers and tuple(buffers[name].shape) == weight.shape:
            put_buffer(model, name, weight.rows(0, (weight.shape or (1,))[0]))


def put_buffer(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace a buffer. transformers does not initialise it again."""
    module, _, leaf = name.rpartition(".")
    value._is_hf_initialized = True  # type: ignore[attr-defined]
    model.get_submodule(module)._buffers[leaf] = value


def tie_equal_weights(model: Any) -> None:
    """Tie weights that the configuration ties and the files hold twice, if they are equal there.

    transformers does the same with values in memory: different values stay two weights.
    """
    for name, other in list(model.all_tied_weights_keys.items()):
        a, b = model.get_parameter(name), model.get_parameter(other)
        stored, other_stored = stored_weight(a), stored_weight(b)
        if a is b or stored is None or other_stored is None:
            continue
        if stored.shape == other_stored.shape and all(
            torch.equal(rows, other_stored.rows(start, start + len(rows))) for start, rows in stored.blocks()
        ):
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, b)
        else:
            model.all_tied_weights_keys.pop(name)


def empty_model(config: Any, dtype: torch.dtype, trust_remote_code: bool = False) -> Any:
    """Return the model of a configuration with parameters on the meta device; buffers that no file holds have values.

    A model with code of its own stays on the meta device with its buffers.
    """
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    if model.is_custom_code():
        return model
    for parameter in model.parameters():
        parameter._is_hf_initialized = True
    model._move_missing_keys_from_meta_to_device(set(), None, None, None)
    model._initialize_missing_keys(False)
    return model


@torch.no_grad()
def as_written(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors from their names and shapes in memory to those that `save_pretrained` writes."""
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(model, dict(tensors))
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def as_published(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors as `as_written` does inside `publishing`."""
    with publishing(model):
        return as_written(model, tensors)


@contextmanager
def publishing(model: Any) -> Iterator[None]:
    """Context manager: `save_pretrained` names tensors as in the family's published checkpoints, which engines read.

    This works for models from any source. Without it, transformers omits prefixes (such as that of a vision tower
    inside a vision model) that were not in the files from which it loaded the model.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    seen = vars(model).get("_weight_conversions")
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    try:
        yield
    finally:
        model._weight_conversions = seen


def published_names(model: Any, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Return name in memory -> published name of the tensors that are only renamed, not merged or reshaped.

    Args:
        shapes: name in memory -> shape of the tensor.
    """
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = {id(tensor): name for name, tensor in stand_ins.items()}
    return {own[id(t)]: name for name, t in as_published(model, stand_ins).items() if id(t) in own}
