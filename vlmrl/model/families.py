"""What differs between model families: which can share a prompt in one packed row, their head, their parts.

A family that is not in the table works too, on the padded path (each response with its own copy of the prompt).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vlmrl.errors import CheckpointError

PART_NAMES = {
    "connector": (
        "visual.merger.", "deepstack_merger_list.", "multi_modal_projector.", "connector.", "embed_vision.",
        "vision_tower.merger.",
    ),
    "vision": ("visual.", "vision_tower.", "vision_model."),
    "embeddings": ("embed_tokens.", "lm_head."),
    "language": ("language_model.", "text_model."),
}  # fmt: skip
"""Name fragments of the parts that `model.freeze` names. A parameter belongs to the first part that matches.

The connector (merger, projector) turns what the vision tower sees into the language model's embeddings.
"""


@dataclass(frozen=True)
class Family:
    """How a family is trained.

    Args:
        shared_prefix: whether a packed row works: its text attention goes through transformers' AttentionInterface,
            has no state besides keys and values, and takes position ids.
        rope_index: whether positions come from `model.model.get_rope_index` (three axes) instead of 0, 1, 2, ...
    """

    shared_prefix: bool
    rope_index: bool


FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(shared_prefix=True, rope_index=True),
    "qwen2_5_vl": Family(shared_prefix=True, rope_index=True),
    "qwen3_vl": Family(shared_prefix=True, rope_index=True),
}
OTHER = Family(shared_prefix=False, rope_index=False)


def family_of(model: Any) -> Family:
    """The family of a transformers model, by `config.model_type`."""
    return FAMILIES.get(model.config.model_type, OTHER)


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states after the last norm -> logits: the output embedding, then the soft cap where the family has one."""
    projection = model.get_output_embeddings()
    if projection is None:
        raise CheckpointError(
            f"model type `{model.config.model_type}` has no output embedding", hint="use a chat model"
        )
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if cap is None:
        return projection
    return lambda hidden: (projection(hidden) / cap).tanh() * cap


def part_of(parameter_name: str) -> str | None:
    """The part of `PART_NAMES` that a parameter belongs to; None when its name says nothing."""
    for part, fragments in PART_NAMES.items():
        if any(fragment in f"{parameter_name}." for fragment in fragments):
            return part
    return None
