"""Packing: trajectories of a step -> rows of whole groups under a token budget. Integers until the tensors are made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vlmrl.types import PackedRow, Segment, Span


@dataclass(frozen=True)
class PromptTokens:
    """A prompt as the packer needs it: ids, kinds (0 text, 1 image), image tensors and their number."""

    ids: tuple[int, ...]
    kinds: tuple[int, ...]
    images: Mapping[str, Tensor]
    num_images: int


@dataclass(frozen=True)
class TrainItem:
    """One trajectory to train on: whose prompt it follows, its segments, and its index in the step."""

    prompt: PromptTokens
    group: int
    segments: tuple[Segment, ...]
    trajectory: int

    @property
    def num_tokens(self) -> int:
        return sum(len(s.ids) for s in self.segments)


def pack(items: Sequence[TrainItem], tokens_per_row: int) -> list[list[TrainItem]]:
    """Rows of items: groups stay together, several groups share a row while they fit.

    A group over the budget is split between its responses and its prompt is repeated; one trajectory over the budget
    gets a row of its own. First-fit in the order given, so that the packing is a function of the items alone.

    Returns: rows, each with the items of a group next to each other. Every item is in exactly one row.
    """
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
    room: list[int] = []
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


def make_row(items: Sequence[TrainItem], device: torch.device | str = "cpu") -> PackedRow:
    """The tensors of one row. Items of one group must be next to each other (as `pack` leaves them)."""
    ids: list[int] = []
    kinds: list[int] = []
    layout: list[Span] = []
    trajectories: list[int] = []
    predict_at: list[int] = []
    span_index: list[int] = []
    prompts: list[PromptTokens] = []
    response = 0
    for position, item in enumerate(items):
        if position == 0 or item.group != items[position - 1].group:
            layout.append(Span(item.group, -1, len(ids), len(ids) + len(item.prompt.ids)))
            trajectories.append(-1)
            ids += item.prompt.ids
            kinds += item.prompt.kinds
            prompts.append(item.prompt)
            prompt_last, response = len(ids) - 1, 0
        start = len(ids)
        for segment in item.segments:
            if segment.trained:
                at = range(len(ids), len(ids) + len(segment.ids))
                predict_at += [prompt_last if i == start else i - 1 for i in at]
                span_index += [len(layout)] * len(segment.ids)
            ids += segment.ids
        kinds += [0] * (len(ids) - start)
        layout.append(Span(item.group, response, start, len(ids)))
        trajectories.append(item.trajectory)
        response += 1
    input_ids = torch.tensor(ids, dtype=torch.long, device=device)
    target_at = [t for item, span in zip(items, [s for s in layout if s.response >= 0], strict=True)
                 for t in _trained_positions(item, span.start)]  # fmt: skip
    images = [p.images for p in prompts if p.images]
    return PackedRow(
        input_ids_N=input_ids,
        kinds_N=torch.tensor(kinds, dtype=torch.long, device=device),
        layout=tuple(layout),
        num_images=tuple(p.num_images for p in prompts),
        images={k: torch.cat([i[k] for i in images]).to(device) for k in images[0]} if images else {},
        predict_at_K=torch.tensor(predict_at, dtype=torch.long, device=device),
        target_K=input_ids[torch.tensor(target_at, dtype=torch.long, device=device)],
        span_K=torch.tensor(span_index, dtype=torch.long, device=device),
        trajectories=tuple(trajectories),
    )


def _trained_positions(item: TrainItem, start: int) -> list[int]:
    positions: list[int] = []
    for segment in item.segments:
        if segment.trained:
            positions += range(start, start + len(segment.ids))
        start += len(segment.ids)
    return positions
