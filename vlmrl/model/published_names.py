"""Names of a model's tensors in files. In memory, transformers gives some tensors other names and merges others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


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
