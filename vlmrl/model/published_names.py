"""Names of a model's tensors in its files: transformers renames some of them and merges others in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def as_written(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors from the model's own names to the names and shapes of `save_pretrained`."""
    from transformers.core_model_loading import revert_weight_conversion

    converted = revert_weight_conversion(model, dict(tensors))
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def as_published(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert tensors as `as_written` does, with the names of `publishing`."""
    with publishing(model):
        return as_written(model, tensors)


@contextmanager
def publishing(model: Any) -> Iterator[None]:
    """Context manager: `save_pretrained` names tensors as in the family's published checkpoints, which engines read.

    This holds for models from any source. Otherwise transformers leaves out prefixes (of a vision tower inside a vision
    model) that it has not seen while loading.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    seen = vars(model).get("_weight_conversions")
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    try:
        yield
    finally:
        model._weight_conversions = seen


def published_names(model: Any, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """Return own name -> published name of all tensors that are published unchanged.

    Args:
        shapes: by the model's own names.
    """
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = {id(tensor): name for name, tensor in stand_ins.items()}
    return {own[id(t)]: name for name, t in as_published(model, stand_ins).items() if id(t) in own}
