"""Packing: distribute the trajectories of a step over packed rows of whole groups, within a token budget.

The packing itself uses only integers; `make_row` creates the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmrl.errors import Load
from vlmrl.packed import PackedRow, Span
from vlmrl.types import Segment

if TYPE_CHECKING:
    from vlmrl.data.encode import EncodedPrompt


@dataclass(frozen=True)
class PromptTokens:
    """Prompt as the packer needs it. Letters: P prompt tokens.

    Args:
        ids: P token ids.
        kinds: P values, 0 text, 1 image.
        images: processor tensors of its images.
        num_images: number of its images.
        image_sizes: (width, height) of each image as the model sees it, where it is known; for error messages.
    """

    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    images: Mapping[str, Tensor]
    num_images: int
    image_sizes: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, prompt: EncodedPrompt) -> PromptTokens:
        return cls(prompt.prompt_ids, prompt.kinds, prompt.images, prompt.num_images, prompt.image_sizes)


@dataclass(frozen=True)
class TrainItem:
    """Trajectory to train on.

    Args:
        prompt: the prompt that it follows.
        group: index of its group; the items of a group have the same prompt.
        segments: its tokens behind the prompt.
        trajectory: its index in the step.
        kinds: 0 text, 1 image for each token of the segments; () = all text.
        images: processor tensors of the images within the segments (a tool's answer), in token order.
    Raises: ValueError when `kinds` has another length than the tokens, or when it has image tokens but `images` is
        empty, or the reverse.
    """

    prompt: PromptTokens
    group: int
    segments: tuple[Segment, ...]
    trajectory: int
    kinds: tuple[int, ...] = ()
    images: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kinds and len(self.kinds) != self.num_tokens:
            raise ValueError(f"trajectory {self.trajectory}: {len(self.kinds)} kinds for {self.num_tokens} tokens")
        if any(self.kinds) != bool(self.images):
            raise ValueError(f"trajectory {self.trajectory}: image tokens and image tensors must come together")

    @property
    def num_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments)


def pack(items: Sequence[TrainItem], tokens_per_row: int) -> list[list[TrainItem]]:
    """Distribute items over packed rows: groups stay together, and several groups share a row while they fit.

    A group over the budget is split between its responses, and each part repeats the prompt. A single trajectory over
    the budget gets a row of its own. The method is first-fit in the given order, so the packing depends on the items
    alone.

    Args:
        tokens_per_row: budget of a row in tokens, prompts included.
    Returns: rows, each with the items of a group next to each other. Every item is in exactly one row.
    """
    # (number of tokens, items) of every group, or of each part of a group that is split.
    pieces: list[tuple[int, list[TrainItem]]] = []
    for group in _by_group(items):
        prompt = len(group[0].prompt.ids)
        current: list[TrainItem] = []
        size = prompt
        for item in group:
            if current and size + item.num_tokens > tokens_per_row:
                pieces.append((size, current))
                current, size = [], prompt
            current.append(item)
            size += item.num_tokens
        pieces.append((size, current))
    rows: list[list[TrainItem]] = []
    room: list[int] = []  # number of tokens that still fit in each row; negative if a single piece exceeds the budget
    for size, piece in pieces:
        index = next((i for i, left in enumerate(room) if left >= size), None)
        if index is None:
            rows.append([])
            room.append(tokens_per_row)
            index = len(rows) - 1
        rows[index] += piece
        room[index] -= size
    return rows


def _by_group(items: Sequence[TrainItem]) -> list[list[TrainItem]]:
    groups: dict[int, list[TrainItem]] = {}
    for item in items:
        groups.setdefault(item.group, []).append(item)
    return list(groups.values())


def row_load(items: Sequence[TrainItem], names: Sequence[str]) -> Load:
    """Return the load of a packed row of these items: the content that must be in memory at the same time.

    Args:
        names: name of each trajectory, "<row> sample <k>".
    """
    rows: list[str] = []
    tokens = image_tokens = 0
    for group in _by_group(items):
        prompt = group[0].prompt
        tokens += len(prompt.ids) + sum(i.num_tokens for i in group)
        image_tokens += sum(map(bool, prompt.kinds)) + sum(sum(map(bool, i.kinds)) for i in group)
        name = names[group[0].trajectory].partition(" sample ")[0]
        rows.append(load_name(name, len(group), prompt.image_sizes))
    return Load("train.tokens_per_row", tokens, image_tokens, len(items), tuple(rows))


def load_name(row: str, responses: int, image_sizes: Sequence[tuple[int, int]]) -> str:
    """Describe one dataset row of a load. Example: `digits row 17 (8 responses; images 448 x 448, 224 x 448)`."""
    count_text = f"{responses} response{'' if responses == 1 else 's'}"
    sizes = ", ".join(f"{width} x {height}" for width, height in image_sizes)
    return f"{row} ({count_text}; images {sizes})" if sizes else f"{row} ({count_text})"


def layout_of(items: Sequence[TrainItem]) -> tuple[tuple[Span, ...], list[Mapping[str, Tensor]]]:
    """Return the spans of one packed row of these items, and the processor tensors of the images of each span.

    Args:
        items: as in `make_row`.
    """
    layout: list[Span] = []
    images: list[Mapping[str, Tensor]] = []
    end = response = 0
    for position, item in enumerate(items):
        if position == 0 or item.group != items[position - 1].group:
            layout.append(Span(item.group, -1, end, end + len(item.prompt.ids)))
            images.append(item.prompt.images)
            end, response = layout[-1].end, 0
        layout.append(Span(item.group, response, end, end + item.num_tokens))
        images.append(item.images)
        end, response = layout[-1].end, response + 1
    return tuple(layout), images


def make_row(
    items: Sequence[TrainItem],
    device: torch.device | str = "cpu",
    passes: tuple[bool, ...] = (),
    filler: TrainItem | None = None,
) -> PackedRow:
    """Return the tensors of one packed row.

    Args:
        items: its trajectories; those of one group must be next to each other, as `pack` leaves them.
        passes: as in `PackedRow`.
        filler: item that filler passes run, needed if `passes` has more of them than the row needs itself.
    """
    # [N], one per token of the row
    ids: list[int] = []
    kinds: list[int] = []
    # one per span, that is per prompt and per response
    layout, images = layout_of(items)
    trajectories: list[int] = []
    # [K], one per trained token
    predict_at: list[int] = []
    span_index: list[int] = []
    # one per prompt
    prompts: list[PromptTokens] = []
    for position, item in enumerate(items):
        if position == 0 or item.group != items[position - 1].group:
            trajectories.append(-1)
            ids += item.prompt.ids
            kinds += item.prompt.kinds
            prompts.append(item.prompt)
            prompt_last = len(ids) - 1
        start = len(ids)
        for segment in item.segments:
            if segment.trained:
                at = range(len(ids), len(ids) + len(segment.ids))
                # The position before a token predicts it. The last token of the prompt predicts a response's first one.
                predict_at += [prompt_last if i == start else i - 1 for i in at]
                span_index += [len(trajectories)] * len(segment.ids)
            ids += segment.ids
        kinds += item.kinds or [0] * (len(ids) - start)
        trajectories.append(item.trajectory)
    input_ids = torch.tensor(ids, dtype=torch.long, device=device)  # [N]
    # [K] positions of the trained tokens; a response begins where its span does
    target_at = [
        t
        for item, span in zip(items, [s for s in layout if s.response >= 0], strict=True)
        for t in _trained_positions(item, span.start)
    ]
    joined = {k: v.to(device) for k, v in join_images(images).items()}
    return PackedRow(
        input_ids_N=input_ids,
        kinds_N=torch.tensor(kinds, dtype=torch.long, device=device),
        layout=layout,
        num_images=tuple(p.num_images for p in prompts),
        images=joined,
        span_images=_cut_images(joined, images),
        image_axes={name: _image_axis(name, joined) for name in joined},
        predict_at_K=torch.tensor(predict_at, dtype=torch.long, device=device),
        # [N] -> [K]
        target_K=input_ids[torch.tensor(target_at, dtype=torch.long, device=device)],
        span_K=torch.tensor(span_index, dtype=torch.long, device=device),
        trajectories=tuple(trajectories),
        passes=passes,
        filler=make_row([filler], device) if passes and filler is not None else None,
    )


def _trained_positions(item: TrainItem, start: int) -> list[int]:
    """Return the positions of an item's trained tokens in the row, if its segments begin at `start`."""
    positions: list[int] = []
    for segment in item.segments:
        if segment.trained:
            positions += range(start, start + len(segment.ids))
        start += len(segment.ids)
    return positions


def join_images(images: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join the processor tensors of several images (or prompts), in the given order.

    The empty mapping of a prompt without images is skipped.

    Returns: an empty mapping if there is no image at all.
    """
    some = [i for i in images if i]
    if len(some) == 1:
        return dict(some[0])
    # [a, ...], [b, ...] -> [a + b, ...], for most families; see `_image_axis`.
    return {k: torch.cat([i[k] for i in some], _image_axis(k, some[0])) for k in some[0]} if some else {}


def _image_axis(name: str, images: Mapping[str, Tensor]) -> int:
    """Return the axis along which images are joined. In most families it is the first (images, tiles or patches)."""
    if "pixel_attention_mask" in images and name in ("pixel_values", "pixel_attention_mask"):
        return 1  # Idefics 3, SmolVLM: [1, tiles, ...]
    if "target_sizes" in images and name == "pixel_values":
        return 3  # MiniCPM-V: one strip of patches, [1, channels, patch, length]
    return 0


def _cut_images(
    joined: Mapping[str, Tensor], images: Sequence[Mapping[str, Tensor]]
) -> tuple[Mapping[str, Tensor], ...]:
    """Return the parts of `joined` that came from each of `images`, as views of the same memory."""
    cut: list[Mapping[str, Tensor]] = []
    start = dict.fromkeys(joined, 0)
    for own in images:
        views: dict[str, Tensor] = {}
        for name, tensor in own.items():
            axis = _image_axis(name, joined)
            views[name] = joined[name].narrow(axis, start[name], tensor.shape[axis])
            start[name] += tensor.shape[axis]
        cut.append(views)
    return tuple(cut)
