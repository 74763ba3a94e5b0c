"""Classes for packed rows of tokens, and for the statistics that a policy returns for them. All are frozen."""

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
        input_ids_N: token ids, int64.
        kinds_N: kind of each token from the processor: 0 text, 1 image; int64.
        layout: the spans that make up the row, in order and without gaps.
        num_images: number of images of each group's prompt, in order.
        images: the processor's tensors of the row's images (`pixel_values`, `image_grid_thw`, ...), in token order.
        span_images: the part of `images` that belongs to each span (views of the same memory); empty without images.
        image_axes: for each of `images`, the axis along which images follow each other.
        predict_at_K: index of the token whose hidden state predicts each trained token.
        target_K: trained tokens.
        span_K: for each trained token, index in `layout` of the response that it belongs to.
        trajectories: index of each span's trajectory in the step; -1 for prompts.
        passes: forward passes that all ranks make for their rows at this place: whether each has images (see
            model/passes.py). () = the row's own ones.
        filler: row that filler passes run; None if there are none.
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
    passes: tuple[bool, ...] = ()
    filler: PackedRow | None = None


@dataclass(frozen=True, slots=True)
class TokenStats:
    """Token statistics of a packed row. [K] float32, one number per trained token; all in nats except `value`.

    Args:
        logp: with gradient.
        entropy: without gradient, unless the policy has `entropy_gradient`.
        value: score that the value head predicts before each trained token, with gradient; None without a value head.
        kl: KL(policy || reference) over the whole vocabulary, with gradient; None without a reference.
    """

    logp: Tensor
    entropy: Tensor
    value: Tensor | None = None
    kl: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowReference:
    """Reference model's outputs that are needed for the KL divergence over the whole vocabulary, for one row.

    Args:
        hidden_KD: hidden states that predict the row's trained tokens, without gradient.
        head: hidden states -> logits [.., V].
    """

    hidden_KD: Tensor
    head: Callable[[Tensor], Tensor]
