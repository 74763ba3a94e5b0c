"""Attention masks of a packed row, computed from its spans once per row for every layer and backend.

A prompt token sees its prompt's past; a response token sees its whole prompt and its own response's past, never another
response or another group. A sliding window counts distance within the token's own sequence `[prompt][response]`. In
some model families, the tokens of an image see each other in both directions; the window limits this too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vlmrl.packed import Span

CHUNK_TOKENS = 1024
"""Maximum number of response tokens that attend in one call. Their mask has one row per response token of the call, and
one column per token of the prompt and of the call."""


@dataclass(frozen=True)
class RowTokens:
    """Numbers per token that determine which tokens see each other. Each field is int64, [N].

    Args:
        group: number of the token's group in the row.
        response: -1 for a prompt, else 0, 1, ... within the group.
        index: position in the token's own sequence `[prompt][response]`, from 0.
        block: number of the image that the token belongs to, unique in the row; -1 for text, and for every token if
            image tokens see each other in one direction only.
    """

    group: Tensor
    response: Tensor
    index: Tensor
    block: Tensor

    def sees(self, query: Tensor, key: Tensor, window: int | None, blocks: bool) -> Tensor:
        """Return whether token `query` sees token `key`: bool, elementwise over any shapes that broadcast."""
        distance = self.index[query] - self.index[key]
        near = distance >= 0
        if blocks:
            near = near | ((self.block[query] == self.block[key]) & (self.block[query] >= 0))
        if window is not None:
            near = near & (distance < window)
        shared = (self.response[key] == -1) | (self.response[key] == self.response[query])
        return near & shared & (self.group[query] == self.group[key])


@dataclass(frozen=True)
class AttentionPiece:
    """Queries [start, end) of the row that attend together to `prompt` and, for responses, to themselves.

    If the queries are a prompt, `prompt` is None: the prompt attends to itself.
    """

    start: int
    end: int
    prompt: tuple[int, int] | None


@dataclass(frozen=True)
class RowPlan:
    """Row prepared for attention.

    Args:
        spans: prompts and responses of the row, in order.
        tokens: see `RowTokens`.
        pieces: the parts into which the SDPA backend cuts the row.
        has_images: whether the row has image tokens; only set if `bidirectional` is not "never".
        bidirectional: layers in which image tokens see each other in both directions: "never", "sliding" or "always".
        backend: "sdpa", "split", "flex" or "varlen".
        masks, prepared: caches in which the backends keep masks and indices for the next layers.
    """

    spans: tuple[Span, ...]
    tokens: RowTokens
    pieces: tuple[AttentionPiece, ...]
    has_images: bool = False
    bidirectional: str = "never"
    backend: str = "sdpa"
    masks: dict[tuple[AttentionPiece, int | None, bool], Tensor | None] = field(default_factory=dict)
    prepared: dict[object, object] = field(default_factory=dict)

    def has_blocks(self, window: int | None) -> bool:
        """Return whether, in a layer with this window, image tokens see each other in both directions."""
        two_way = self.bidirectional == "always" or (self.bidirectional == "sliding" and window is not None)
        return two_way and self.has_images

    def mask(self, piece: AttentionPiece, window: int | None) -> Tensor | None:
        """Return the mask of a piece: bool [queries, keys], True = the query sees the key.

        The keys are the piece's prompt and the piece itself. None = a plain causal mask is enough: the piece is a
        prompt that fits in the window and has no bidirectional images.
        """
        blocks = self.has_blocks(window)
        if window is not None and window >= self._longest(piece):
            window = None
        key = (piece, window, blocks)
        if key not in self.masks:
            self.masks[key] = self._make_mask(piece, window, blocks)
        return self.masks[key]

    def _longest(self, piece: AttentionPiece) -> int:
        return piece.end - piece.start + (piece.prompt[1] - piece.prompt[0] if piece.prompt else 0)

    def _make_mask(self, piece: AttentionPiece, window: int | None, blocks: bool) -> Tensor | None:
        if piece.prompt is None and window is None and not blocks:
            return None
        device = self.tokens.index.device
        query = torch.arange(piece.start, piece.end, device=device)
        key = query if piece.prompt is None else torch.cat([torch.arange(*piece.prompt, device=device), query])
        return self.tokens.sees(query[:, None], key[None, :], window, blocks)


def plan_row(
    layout: Sequence[Span],
    device: torch.device,
    *,
    kinds_N: Tensor | None = None,
    bidirectional: str = "never",
    backend: str = "sdpa",
) -> RowPlan:
    """Return the plan of a row.

    Args:
        layout: the row's spans; each group is one prompt span followed by its responses.
        kinds_N: 1 = image token.
    Raises: ValueError when the spans are not contiguous or a group does not begin with its prompt.
    """
    _check_layout(layout)
    # Computed on the CPU and copied once, because every copy to or from a GPU makes the GPU wait.
    group, response, index = _token_numbers(layout).to(device)
    block_kinds = kinds_N if bidirectional != "never" else None
    block = torch.full_like(group, -1) if block_kinds is None else _image_blocks(block_kinds, layout)
    has_images = block_kinds is not None and bool((block_kinds == 1).any())
    tokens = RowTokens(group, response, index, block)
    return RowPlan(tuple(layout), tokens, tuple(_pieces(layout)), has_images, bidirectional, backend)


def _token_numbers(layout: Sequence[Span]) -> Tensor:
    """Return (group, response, index) of every token as in `RowTokens`: int64 [3, N], on the CPU."""
    moved: list[int] = []  # per span: position in the row minus position in the token's own sequence
    prompt_length = 0
    for span in layout:
        prompt_length = span.end - span.start if span.response == -1 else prompt_length
        moved.append(span.start - (0 if span.response == -1 else prompt_length))
    lengths = torch.tensor([s.end - s.start for s in layout])
    spans = torch.tensor([[s.group for s in layout], [s.response for s in layout], moved])
    # [3, spans] -> [3, N]
    numbers = spans.repeat_interleave(lengths, 1)
    numbers[2] = torch.arange(numbers.shape[1]) - numbers[2]
    return numbers


def groups_of(layout: Sequence[Span]) -> list[list[int]]:
    """Return the indices of the spans of each group: its prompt, then its responses."""
    groups: list[list[int]] = []
    for index, span in enumerate(layout):
        if span.response == -1:
            groups.append([])
        groups[-1].append(index)
    return groups


def _check_layout(layout: Sequence[Span]) -> None:
    groups: dict[int, list[Span]] = defaultdict(list)
    at = 0
    for span in layout:
        if span.start != at or span.end < at:
            raise ValueError(f"the layout has a gap or an overlap at token {at}: {span}")
        if not groups[span.group] and span.response != -1:
            raise ValueError(f"group {span.group} does not begin with its prompt")
        if groups[span.group] and span.response == -1:
            raise ValueError(f"group {span.group} has two prompts")
        groups[span.group].append(span)
        at = span.end


def _image_blocks(kinds_N: Tensor, layout: Sequence[Span]) -> Tensor:
    """Return the image number of each token [N], -1 for text. A run of image tokens within a span is one image."""
    is_image = kinds_N == 1
    starts = is_image.clone()
    starts[1:] &= ~is_image[:-1]
    for span in layout:
        if span.start < len(kinds_N):
            starts[span.start] = is_image[span.start]
    return torch.where(is_image, starts.long().cumsum(0) - 1, -1)


def _pieces(layout: Sequence[Span]) -> list[AttentionPiece]:
    """Split the row: each prompt by itself; the responses of a group together up to `CHUNK_TOKENS`."""
    pieces: list[AttentionPiece] = []
    prompt = (0, 0)
    for span in layout:
        if span.response == -1:
            prompt = (span.start, span.end)
            pieces.append(AttentionPiece(span.start, span.end, None))
            continue
        last = pieces[-1]
        if last.prompt == prompt and last.end == span.start and span.end - last.start <= CHUNK_TOKENS:
            pieces[-1] = AttentionPiece(last.start, span.end, prompt)
        elif span.end > span.start:
            pieces.append(AttentionPiece(span.start, span.end, prompt))
    return [p for p in pieces if p.end > p.start]
