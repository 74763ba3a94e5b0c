"""Small worlds for tests of the core: prompts with and without images, items to train on, gradients, one comparison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image

from vlmrl.data.batch import PromptTokens, TrainItem
from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.types import Media, Message, PackedRow, Row, Segment

RELATIVE_TOLERANCE = 1e-5


def assert_close(actual: torch.Tensor, expected: torch.Tensor, what: str = "tensors") -> None:
    """The one tolerance of the suite: largest difference at most 1e-5 of the largest expected number."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if expected.numel() == 0:
        return
    a, b = actual.detach().double(), expected.detach().double()
    assert torch.isfinite(a).all() and torch.isfinite(b).all(), f"{what}: not finite"
    scale = float(b.abs().max())
    gap = float((a - b).abs().max())
    assert gap <= RELATIVE_TOLERANCE * scale, f"{what}: differ by {gap:.3g} where the largest number is {scale:.3g}"


def assert_same_gradients(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Gradients of all parameters, as one long vector: a parameter with a tiny gradient is measured by the whole."""
    assert actual.keys() == expected.keys()
    assert any(bool(g.any()) for g in expected.values()), "the expected gradient is zero: the test shows nothing"
    assert_close(*(torch.cat([g[k].flatten() for k in sorted(expected)]) for g in (actual, expected)), "gradient")


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of every gradient; zeros where there is none."""
    return {n: (torch.zeros_like(p) if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()}


def image(seed: int, width: int = 56, height: int = 56) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(encoder: Encoder, text: str, sizes: Sequence[tuple[int, int]] = (), name: str = "row") -> EncodedPrompt:
    """A prompt whose images have these (width, height) sizes and content that depends on name and place."""
    seed = sum(map(ord, name))
    images = [image(seed * 100 + i, *size) for i, size in enumerate(sizes)]
    media = tuple(Media(f"{name}-{i}", *size) for i, size in enumerate(sizes))
    row = Row(name, "source", "task", {}, media)
    return encoder.encode(row, [Message("user", "<image>" * len(images) + text)], images)


def prompt_tokens(prompt: EncodedPrompt) -> PromptTokens:
    return PromptTokens(prompt.prompt_ids, prompt.kinds, prompt.images, prompt.num_images, prompt.image_sizes)


def response(seed: int, length: int, vocabulary: int = 290) -> Segment:
    """A trained segment of `length` ordinary tokens (the first 8 ids are special)."""
    ids = np.random.default_rng(seed).integers(8, vocabulary, length)
    return Segment("assistant", tuple(int(i) for i in ids), True)


def items_of(groups: Sequence[tuple[EncodedPrompt, Sequence[int]]], seed: int = 0) -> list[TrainItem]:
    """Items of several groups: for each prompt, one response of each given length."""
    items: list[TrainItem] = []
    for index, (prompt, lengths) in enumerate(groups):
        tokens = prompt_tokens(prompt)
        for length in lengths:
            items.append(TrainItem(tokens, index, (response(seed * 1000 + len(items), length),), len(items)))
    return items


def saved_bytes(policy: torch.nn.Module, row: PackedRow) -> int:
    """Bytes that a forward keeps for its backward, with nothing made again that gradient checkpointing does not."""
    kept, cheap = 0, getattr(policy, "cheap", None)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    if cheap:
        policy.cheap = []  # type: ignore[assignment]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        policy(row)
    if cheap:
        policy.cheap = cheap
    return kept
