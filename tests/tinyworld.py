"""Small worlds for tests of the core: prompts with and without images, items to train on, gradients, one comparison."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vlmrl.data.encode import EncodedPrompt, Encoder
from vlmrl.data.turns import encode_tail
from vlmrl.model.packing import PackedRow, PromptTokens, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.rollout.engine import SamplingRequest
from vlmrl.types import Media, Message, Row, Sample, Segment

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


def near(found: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    """Numbers in float64, a list for each sample, that were worked out by hand."""
    assert [len(x) for x in found] == [len(x) for x in expected]
    for a, b in zip(found, expected, strict=True):
        assert list(a) == pytest.approx(list(b), rel=1e-9, abs=1e-12)


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


def mixed_prompts(encoder: Encoder) -> list[EncodedPrompt]:
    """Prompts of five lengths: text alone; two images; two of other sizes; one image; a long text."""
    return [
        encoded(encoder, "same?", name="text"),
        encoded(encoder, "same or different?", [(56, 56), (56, 56)], name="two"),
        encoded(encoder, "yes no", [(112, 56), (84, 112)], name="sizes"),
        encoded(encoder, "3; 8", [(56, 84)], name="one"),
        encoded(encoder, "0 1 2 3 4 5 6 7 8 9 yes no same different " * 2, name="long"),
    ]


def four_prompts(encoder: Encoder) -> list[EncodedPrompt]:
    """Two images, one, none, and another one: what processes share out."""
    return [
        encoded(encoder, "what is it?", [(56, 56), (112, 84)], "a"),
        encoded(encoder, "and this one?", [(84, 84)], "b"),
        encoded(encoder, "no image here, only text", (), "c"),
        encoded(encoder, "which?", [(56, 112)], "d"),
    ]


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


def two_groups(encoder: Encoder) -> list[TrainItem]:
    """Two groups of two responses: of text alone, and of two images of different sizes."""
    prompts = [encoded(encoder, "same?", name="a"), encoded(encoder, "yes no", [(56, 84), (56, 56)], name="b")]
    return items_of([(prompts[0], [3, 4]), (prompts[1], [5, 2])])


def sampler_gap(
    policy: torch.nn.Module,
    requests: Sequence[SamplingRequest],
    answers: Sequence[Sequence[Sample]],
    *,
    relative: bool = False,
    encoder: Encoder | None = None,
) -> float:
    """Largest |trainer - engine| log-prob of samples: in nats, or as a share of the prompt's largest log-prob.

    Args: encoder: of episodes, whose tools show images.
    """
    gaps = []
    for items, said in _with_the_engines_logps(requests, answers, encoder):
        with torch.no_grad():
            logp = policy(make_row(items)).logp
        gaps.append(float((logp - said).abs().max() / (logp.abs().max() if relative else 1)))
    return max(gaps)


def rounding_errors(
    policy: Policy, requests: Sequence[SamplingRequest], answers: Sequence[Sequence[Sample]]
) -> tuple[float, float]:
    """Largest errors of (engine, trainer): |log-prob - that of the policy in float64|, in nats.

    The trainer's is what float32 costs on this machine: it differs by a factor of 3 between models and processors.
    """
    exact, errors = in_float64(policy), []
    for items, said in _with_the_engines_logps(requests, answers):
        with torch.no_grad():
            true = exact(make_row(items)).logp
            errors.append([float((logp - true).abs().max()) for logp in (said, policy(make_row(items)).logp)])
    engine, trainer = (max(column) for column in zip(*errors, strict=True))
    return engine, trainer


def in_float64(policy: Policy) -> Policy:
    """A copy whose log-probs are exact, for all that float32 can tell."""
    return Policy(doubled(policy.model), temperature=policy.temperature, banned_ids=policy.banned_ids)


def doubled(model: Any) -> Any:
    """A copy in float64."""
    model = copy.deepcopy(model).double()
    model.set_experts_implementation("eager")  # the product of all experts at once takes no float64
    return model


def _with_the_engines_logps(
    requests: Sequence[SamplingRequest], answers: Sequence[Sequence[Sample]], encoder: Encoder | None = None
) -> Iterator[tuple[list[TrainItem], torch.Tensor]]:
    """(a prompt's samples, the engine's log-prob of each of their tokens) for each prompt."""

    def tail(sample: Sample) -> tuple[Any, ...]:
        return encode_tail(encoder, sample.segments, sample.files, "an episode") if encoder else ()

    for request, samples in zip(requests, answers, strict=True):
        tokens = prompt_tokens(request.prompt)
        items = [TrainItem(tokens, 0, s.parts, k, *tail(s)) for k, s in enumerate(samples)]
        yield items, torch.tensor([x for s in samples for part in s.parts for x in part.sampler_logp or ()])


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
