"""Merging of an adapter into the base weight that it changes, a block of rows at a time: LoRA, rsLoRA, DoRA."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmrl.checkpoint.merge_plan import CannotStreamError, MergePlan
from vlmrl.errors import CheckpointError
from vlmrl.model.lora import PEFT_PREFIX, linear_names, read_adapter, target_names

if TYPE_CHECKING:
    from vlmrl.recipe.schema import Lora

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
            raise CannotStreamError(f"the adapter sits on {weight}, which is tied to another weight")
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
