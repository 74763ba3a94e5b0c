"""Differences between model families: sharing of the prompt, position ids, output head, names of the parts.

A family that is not in the table works too: on the padded path, each response runs with its own copy of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from vlmrl.errors import CheckpointError

PART_NAMES = {
    "connector": (
        "visual.merger.",
        "deepstack_merger_list.",
        "multi_modal_projector.",
        "connector.",
        "embed_vision.",
        "vision_tower.merger.",
        "model.merger.",
    ),
    "vision": ("visual.", "vision_tower.", "vision_model."),
    "embeddings": ("embed_tokens.", "lm_head.", "embed_tokens_per_layer."),
    "language": ("language_model.", "text_model."),
}
"""Part of a model, as in `model.freeze` -> name fragments. A parameter belongs to the first part that matches its name.

The connector (merger, projector) maps the vision tower's outputs to the language model's embeddings.
"""

Sharing = Literal["packed", "forked", "padded"]
Bidirectional = Literal["never", "sliding", "always"]


@dataclass(frozen=True)
class Family:
    """Properties of a model family that training depends on.

    Args:
        sharing: how the responses of a group share their prompt.
            "packed": one row `[prompt][response 1]...`. The text attention must go through transformers'
                AttentionInterface, have no state besides keys and values, and take position ids.
            "forked": the prompt runs once, and every response continues its differentiable cache. For linear attention,
                because a mask cannot separate the recurrent states of several responses.
            "padded": not shared; each response runs after its own copy of the prompt.
        rope_index: whether positions come from `model.model.get_rope_index` (three axes) instead of 0, 1, 2, ...
        kinds_name: name of the forward's argument for the token kinds (0 text, 1 image); None if it has no such
            argument.
        bidirectional: layers in which the tokens of an image see each other in both directions: "never", "sliding" or
            "always".
    """

    sharing: Sharing
    rope_index: bool = False
    kinds_name: str | None = None
    bidirectional: Bidirectional = "never"


_AXES = Family("packed", rope_index=True, kinds_name="mm_token_type_ids")
_HYBRID = Family("forked", rope_index=True, kinds_name="mm_token_type_ids")
_PLAIN = Family("packed")
FAMILIES: dict[str, Family] = {
    "qwen2_vl": _AXES,
    "qwen2_5_vl": _AXES,
    "qwen3_vl": _AXES,
    "qwen3_vl_moe": _AXES,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "glm4v": _AXES,
    "glm46v": _AXES,
    "gemma3": Family("packed", kinds_name="token_type_ids", bidirectional="always"),
    "gemma4": Family("packed", kinds_name="mm_token_type_ids", bidirectional="sliding"),
    "internvl": _PLAIN,
    "idefics3": _PLAIN,
    "smolvlm": _PLAIN,
    "minicpmv4_6": Family("forked"),
}
OTHER = Family("padded")
HEADS: dict[str, tuple[Literal["cap", "multiply", "divide"], str]] = {
    "gemma3n": ("cap", "final_logit_softcapping"),
    "gemma4": ("cap", "final_logit_softcapping"),
    "gemma4_unified": ("cap", "final_logit_softcapping"),
    "cohere_compass": ("multiply", "logit_scale"),
    "hyperclovax_vision_v2": ("multiply", "logits_scaling"),
    "granite4_vision": ("divide", "logits_scaling"),
    "granite_docling": ("divide", "logits_scaling"),
}
"""Model type -> (operation on the logits, key of the text configuration with its number).

The image-text-to-text model applies this operation. Other models leave the logits unchanged, even if their text
configuration has such a key (Gemma 3, PaliGemma, Aya Vision). `vlmrl check --deep` compares the result with the model's
own logits.
"""


def has_two_way_images(model_type: str, setting: str | None) -> bool:
    """Return whether the tokens of an image see each other in both directions, in any layer.

    Args:
        setting: `use_bidirectional_attention` of the text model's configuration; it differs between the sizes of Gemma
            4.
    """
    where = FAMILIES.get(model_type, OTHER).bidirectional
    return where == "always" or (where == "sliding" and setting == "vision")


def has_axes(model_type: str) -> bool:
    """Return whether position ids have three axes. Vision towers of such families run all images as one sequence."""
    return FAMILIES.get(model_type, OTHER).rope_index


def family_of(model: Any) -> Family:
    """Return the family of a transformers model, by `config.model_type` and by the layers of its text model.

    A text model with linear attention is never "packed". Only some sizes of Gemma 4 have bidirectional images.
    """
    family = FAMILIES.get(model.config.model_type, OTHER)
    text = model.config.get_text_config()
    layers = set(getattr(text, "layer_types", None) or ())
    if not has_two_way_images(model.config.model_type, getattr(text, "use_bidirectional_attention", None)):
        family = replace(family, bidirectional="never")
    if family.sharing == "forked" and "linear_attention" not in layers:
        family = replace(family, sharing="packed")
    known = {"full_attention", "sliding_attention"} | ({"linear_attention"} if family.sharing == "forked" else set())
    return family if layers <= known else replace(family, sharing="padded")


def head_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the function from hidden states after the last norm to logits: [..., D] -> [..., V].

    It is the output embedding (with its bias), followed by the model type's operation in `HEADS`.

    Raises: CheckpointError when the model has no output embedding.
    """
    projection = model.get_output_embeddings()
    if projection is None:
        raise CheckpointError(
            f"model type `{model.config.model_type}` has no output embedding", hint="use a chat model"
        )
    change, name = HEADS.get(model.config.model_type, ("nothing", ""))
    value = getattr(model.config.get_text_config(), name, None) if name else None
    if value is None:
        return projection
    if change == "cap":
        return lambda hidden: (projection(hidden) / value).tanh() * value
    return lambda hidden: projection(hidden) * (value if change == "multiply" else 1.0 / value)


def part_of(parameter_name: str) -> str | None:
    """Return the part of `PART_NAMES` that a parameter belongs to; None when no fragment is in its name."""
    for part, fragments in PART_NAMES.items():
        if any(fragment in f"{parameter_name}." for fragment in fragments):
            return part
    return None


def units_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of text model and vision tower that the transformers model declares as not to be split."""
    names = {n for m in model.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    return [m for m in model.modules() if type(m).__name__ in names]


def sharded_units(model: Any, sharing: str) -> list[nn.Module]:
    """Return the layers that a sharded policy gathers one by one; all other parameters are gathered once per row.

    On the padded path, which also takes models that nobody has tried, they are the layers of the text model only: a
    vision tower may run a layer once per image. A layer within another one is not a unit.
    """
    names = {module: name for name, module in model.named_modules()}
    units = [u for u in units_of(model) if sharing != "padded" or part_of(f"{names[u]}.") == "language"]
    within = {inner for unit in units for inner in unit.modules() if inner is not unit}
    return [unit for unit in units if unit not in within]
