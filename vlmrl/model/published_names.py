"""A model's tensors as its files have them: transformers gives some other names, or keeps several of them as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def as_written(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the model's own names -> as `save_pretrained` names and arranges them."""
    from transformers.core_model_loading import revert_weight_conversion

    found = revert_weight_conversion(model, dict(tensors))
    return {name: value[0] if isinstance(value, list) else value for name, value in found.items()}


def as_published(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As `as_written`, with the names of `publishing`."""
    with publishing(model):
        return as_written(model, tensors)


@contextmanager
def publishing(model: Any) -> Iterator[None]:
    """Inside, `save_pretrained` names tensors as the family's published checkpoints have them, which engines read,
    wherever the model came from: else it leaves out prefixes (of a vision tower inside a vision model) that it has not
    seen loaded.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    seen = vars(model).get("_weight_conversions")
    model._weight_conversions = get_model_conversion_mapping(model, add_legacy=False)
    try:
        yield
    finally:
        model._weight_conversions = seen


def published_names(model: Any, shapes: Mapping[str, torch.Size]) -> dict[str, str]:
    """The model's own name -> the published one, of all tensors that are published as they are.

    Args: shapes: by the model's own names.
    """
    stand_ins = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = {id(tensor): name for name, tensor in stand_ins.items()}
    return {own[id(t)]: name for name, t in as_published(model, stand_ins).items() if id(t) in own}
