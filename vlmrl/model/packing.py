"""Packed rows: their classes, the distribution of a step's trajectories over rows within a token budget, their masks.

A prompt token sees its prompt's past; a response token sees its whole prompt and its own response's past, never another
response or another group. A sliding window counts distance within the token's own sequence `[prompt][response]`. In
some model families, the tokens of an image see each other in both directions; the window limits this too. The masks
are computed from a row's spans once, for every layer and backend. Packing uses only integers; `make_row` creates the
tensors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vlmrl.algo.divergence import Divergence
from vlmrl.errors import Load
from vlmrl.model.device_memory import upload
from vlmrl.types import Segment

if TYPE_CHECKING:
    from vlmrl.data.encode import EncodedPrompt


GRIDS = "image_grid_thw"
"""Name of the processor's tensor with each image's size in patches (frames, rows, columns): int64 [images, 3]."""


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
        input_ids_N: token ids, int64, on the CPU: position ids are computed from them there.
        kinds_N: kind of each token from the processor: 0 text, 1 image; int64, on the CPU.
        layout: the spans that make up the row, in order and without gaps.
        num_images: number of images of each group's prompt, in order.
        images: the processor's tensors of the row's images (`pixel_values`, `image_grid_thw`, ...), in token order; see
            `images_on`.
        span_images: the part of `images` that belongs to each span (views of the same memory); empty without images.
        image_axes: for each of `images`, the axis along which images follow each other.
        predict_at_K: index of the token whose hidden state predicts each trained token.
        span_K: for each trained token, index in `layout` of the response that it belongs to.
        trajectories: index of each span's trajectory in the step; -1 for prompts.
        passes: forward passes that all ranks make for their rows at this place: whether each has images (see
            model/caches.py). () = the row's own ones.
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
        teacher: divergence from the teacher, with gradient; None without a teacher.
        energy: squared size of d logp / d logits, without gradient or unit; None unless it was requested.
    """

    logp: Tensor
    entropy: Tensor
    value: Tensor | None = None
    kl: Tensor | None = None
    teacher: Tensor | None = None
    energy: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowReference:
    """Another model's outputs that are needed for the policy's divergence from it, for one row.

    Args:
        hidden_KD: hidden states that predict the row's trained tokens, without gradient; D is the other model's.
        head: hidden states -> logits [.., V].
    """

    hidden_KD: Tensor
    head: Callable[[Tensor], Tensor]
    divergence: Divergence = field(default_factory=Divergence)


@dataclass(frozen=True)
class PromptTokens:
    """Prompt as the packer needs it. Letters: P prompt tokens.

    Args:
        ids: P token ids.
        kinds: P values, 0 text, 1 image.
        images: processor tensors of its images.
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
    # one per trained token: (index of the token that predicts it, its id, its span)
    trained: list[tuple[int, int, int]] = []
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
                # The position before a token predicts it. The last token of the prompt predicts a response's first one.
                for at, token in enumerate(segment.ids, len(ids)):
                    trained.append((prompt_last if at == start else at - 1, token, len(trajectories)))
            ids += segment.ids
        kinds += item.kinds or [0] * (len(ids) - start)
        trajectories.append(item.trajectory)
    joined = images_on(device, join_images(images))
    trained_3K = torch.tensor(trained, dtype=torch.long).reshape(-1, 3).T.contiguous()
    predict_at_K, target_K, span_K = upload(trained_3K, device)
    return PackedRow(
        input_ids_N=torch.tensor(ids, dtype=torch.long),
        kinds_N=torch.tensor(kinds, dtype=torch.long),
        layout=layout,
        num_images=tuple(p.num_images for p in prompts),
        images=joined,
        span_images=_cut_images(joined, images),
        image_axes={name: _image_axis(name, joined) for name in joined},
        predict_at_K=predict_at_K,
        target_K=target_K,
        span_K=span_K,
        trajectories=tuple(trajectories),
        passes=passes,
        filler=make_row([filler], device) if passes and filler is not None else None,
    )


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


def images_on(device: torch.device | str, images: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return processor tensors on a device, except the grids: all that is computed from them is computed on the CPU."""
    return {name: x if name == GRIDS else upload(x, device) for name, x in images.items()}


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
        pieces: the parts into which the SDPA backend cuts the row.
        has_images: whether the row has image tokens; only set if `bidirectional` is not "never".
        bidirectional: layers in which image tokens see each other in both directions: "never", "sliding" or "always".
        backend: "sdpa", "split", "flex" or "varlen".
        masks, prepared: caches in which the backends keep masks and indices for the next layers.
        number: int64 scalar on the CPU by which compiled layers find the plan; None = no layer is compiled.
    """

    spans: tuple[Span, ...]
    tokens: RowTokens
    pieces: tuple[AttentionPiece, ...]
    has_images: bool = False
    bidirectional: str = "never"
    backend: str = "sdpa"
    masks: dict[tuple[AttentionPiece, int | None, bool], Tensor | None] = field(default_factory=dict)
    prepared: dict[object, object] = field(default_factory=dict)
    number: Tensor | None = None

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
        kinds_N: 1 = image token; on the CPU.
    Raises: ValueError when the spans are not contiguous or a group does not begin with its prompt.
    """
    _check_layout(layout)
    # Computed on the CPU and copied once: the CPU never waits for a GPU here.
    numbers_3N = _token_numbers(layout)
    block_kinds = kinds_N if bidirectional != "never" else None
    block = torch.full_like(numbers_3N[0], -1) if block_kinds is None else _image_blocks(block_kinds, layout)
    has_images = block_kinds is not None and bool((block_kinds == 1).any())
    tokens = RowTokens(*upload(torch.cat([numbers_3N, block[None]]), device))
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
