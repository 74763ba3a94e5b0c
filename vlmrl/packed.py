"""What trajectories are packed into, and what a policy answers: rows of tokens and their statistics. Frozen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a packed row. `response` is -1 for a group's prompt, else 0, 1, ... within the group."""

    group: int
    response: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row of a microbatch: whole groups `[prompt][response 1]...[response n]`, one after another.

    Letters: N tokens of the row, K trained tokens.
    Args:
        input_ids_N: token ids, int64.      kinds_N: 0 text, 1 image, as the processor says, int64.
        layout: the spans that make up the row, in order and without gaps.
        num_images: images of each group's prompt, in order.
        images: what the processor made of the row's images (`pixel_values`, `image_grid_thw`, ...), in token order.
        span_images: the part of `images` that belongs to each span (views of the same memory); empty without images.
        image_axes: for each of `images`, the axis along which images follow each other.
        predict_at_K: index of the token whose hidden state predicts each trained token.   target_K: trained tokens.
        span_K: index into `layout` of the response each trained token belongs to.
        trajectories: for each span, which trajectory of the step it is; -1 for prompts.
    """

    input_ids_N: Tensor
    kinds_N: Tensor
    layout: tuple[Span, ...]
    num_images: tuple[int, ...]
    images: Mapping[str, Tensor]
    span_images: tuple[Mapping[str, Tensor], ...]
    image_axes: Mapping[str, int]
    predict_at_K: Tensor
    target_K: Tensor
    span_K: Tensor
    trajectories: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokenStats:
    """What a policy says of a row's trained tokens. [K] float32; all in nats but `value`.

    Args:
        logp: with gradient.      entropy: without, unless the policy was asked for it.
        value: the score that the value head expects from here on, with gradient; None without a value head.
        kl: KL(policy || reference) over the whole vocabulary, with gradient; None where no reference was given.
    """

    logp: Tensor
    entropy: Tensor
    value: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowReference:
    """What the full KL needs of the reference for a row: `hidden_KD`, the hidden states that predict its trained tokens
    (no gradient), and `head`, hidden states -> logits [.., V]."""

    hidden_KD: Tensor
    head: Callable[[Tensor], Tensor]
