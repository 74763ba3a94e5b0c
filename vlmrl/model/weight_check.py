"""Check that the stored weights of a model have the names and shapes of its configuration and are finite."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from vlmrl.errors import CheckpointError
from vlmrl.model.model_files import stored_shapes

SHOWN = 3
"""Maximum number of weight names in an error message."""
HINT = "copy or download the folder again; check that all shards are there and belong to this model"


def refuse_incomplete(report: Mapping[str, Any], source: str) -> None:
    """Check that every weight of the model was in the files, with the right shape.

    Args:
        report: loading report of transformers (`output_loading_info`), which accounts for renamed and tied weights.
    Raises: CheckpointError with the first names of the weights for which this is not so.
    """
    if missing := sorted(report["missing_keys"]):
        message = f"the weights of `{source}` lack {len(missing):,} tensors of the model: {_listed(missing)}"
        raise CheckpointError(message, where=source, hint=HINT)
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, needed = mismatched[0]
        message = (
            f"{len(mismatched):,} weights of `{source}` have another shape than in its configuration: "
            f"{name} is {tuple(stored)}, not {tuple(needed)}"
        )
        raise CheckpointError(message, where=source, hint=HINT)


def refuse_non_finite(model: torch.nn.Module, source: str) -> None:
    """Raise a CheckpointError unless every floating-point weight is finite. One pass, without copies.

    Packed 4-bit weights are not checked, because they are bytes.
    """
    bad = [name for name, parameter in model.named_parameters() if not is_finite(parameter.detach())]
    if bad:
        raise non_finite(bad, source)


def non_finite(names: Collection[str], source: str) -> CheckpointError:
    """Return the error about weights that are not finite.

    Args:
        names: their names, in the model's order.
    """
    message = f"{len(names):,} weights of `{source}` hold NaN or infinity: {_listed(names)}"
    return CheckpointError(message, where=source, hint="use a checkpoint from before that, or copy the folder again")


def compare_stored(folder: Path, model: Any) -> None:
    """Compare the names and shapes in a folder's safetensors headers with a model on the meta device.

    transformers loads empty tensors with these names, so its rules for renamed and tied weights apply here too. Two
    cases are not compared: a folder without safetensors, which holds a configuration only (a checkpoint keeps its
    weights elsewhere), and weights that were stored quantized, which have other names and shapes.

    Raises: CheckpointError, see `refuse_incomplete`.
    """
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files or getattr(model.config, "quantization_config", None) is not None:
        return
    shapes = {name: shape for path in files for name, shape in stored_shapes(path).items()}
    stored = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    report = type(model).from_pretrained(
        None,
        config=model.config,
        state_dict=stored,
        device_map={"": "meta"},
        dtype=torch.float32,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )[1]
    refuse_incomplete(report, str(folder))


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers are finite. Tensors of bytes and integers are."""
    if not tensor.is_floating_point() or tensor.element_size() < 2 or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # both are NaN if any number is NaN
    return bool(low.isfinite() & high.isfinite())


def _listed(names: Collection[str]) -> str:
    return ", ".join(list(names)[:SHOWN]) + (" ..." if len(names) > SHOWN else "")
