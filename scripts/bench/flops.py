"""Floating-point operations of a training pass, by formula: what the model needs, independent of the hardware.

A multiply-add counts as two. Linear layers and convolutions are counted from the model itself, so adapters and frozen
parts are counted as they are; attention, windows of the vision tower and the gated delta rule follow from its
configuration. Covered: Qwen2-VL, Qwen2.5-VL (windowed vision attention), Qwen3-VL (deep-stack mergers), Qwen3.5 / 3.6
(gated delta rule) and models that are built like them. Left out, as usual: norms, softmax, rotary positions, the
optimizer, and everything that is computed a second time (gradient checkpointing, the scores in a flash-attention
backward pass).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from vlmrl.model.caches import MIN_TOKENS, batches_of_similar_length
from vlmrl.model.families import part_of

DELTA_CHUNK = 64
"""Tokens per chunk of transformers' chunked gated delta rule; sequences are padded to a multiple."""
FIRST_READERS = ("q_proj", "k_proj", "v_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
"""Projections that read a layer's input. The second factor of an adapter on them does not read it."""

UPSTREAM = {"vision": {"vision"}, "connector": {"vision", "connector"}}
"""Part -> the parts whose training makes the gradient of its inputs necessary."""


@dataclass(frozen=True)
class PassWork:
    """Work of one forward pass.

    Args:
        spans: (tokens, tokens of the same sequence before them) of each run of tokens; each token sees what is before
            it.
        images: (rows, columns) in patches of each image, listed as often as it goes through the vision tower.
        targets: number of positions whose logits are computed.
    """

    spans: tuple[tuple[int, int], ...]
    images: tuple[tuple[int, int], ...] = ()
    targets: int = 0

    @property
    def tokens(self) -> int:
        return sum(n for n, _ in self.spans)

    @property
    def pairs(self) -> int:
        """Number of pairs (token, token it sees), itself included."""
        return sum(n * before + n * (n + 1) // 2 for n, before in self.spans)

    @property
    def patches(self) -> int:
        return sum(rows * columns for rows, columns in self.images)


def shared_work(prompt: int, responses: Sequence[int], images: Sequence[tuple[int, int]] = ()) -> PassWork:
    """Return the work of a group whose prompt is computed once.

    Example: prompt 10, responses 3 and 2: 15 tokens, 55 + 36 + 23 pairs.
    """
    return PassWork(((prompt, 0), *((n, prompt) for n in responses)), tuple(images), sum(responses))


def alone_work(prompt: int, responses: Sequence[int], images: Sequence[tuple[int, int]] = ()) -> PassWork:
    """Return the work of a group in which each response has its own copy of the prompt and its images; no padding."""
    return PassWork(tuple((prompt + n, 0) for n in responses), tuple(images) * len(responses), sum(responses))


def padded_work(prompt: int, responses: Sequence[int], images: Sequence[tuple[int, int]] = ()) -> PassWork:
    """Return the work of a group as one batch, each response padded to the longest of them."""
    return alone_work(prompt, [max(responses)] * len(responses), images)


def forked_work(prompt: int, responses: Sequence[int], images: Sequence[tuple[int, int]] = ()) -> PassWork:
    """Return the work of a group through a forked cache: the prompt once, responses in batches of similar lengths.

    Within a batch the responses are padded.
    """
    batches = batches_of_similar_length(list(responses))
    padded = [(max(MIN_TOKENS, *(responses[i] for i in batch)), prompt) for batch in batches for _ in batch]
    return PassWork(((prompt, 0), *padded), tuple(images), sum(responses))


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward and one backward pass, by part of the model."""

    forward: dict[str, float]
    backward: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.forward.values()) + sum(self.backward.values())


def training_flops(model: Any, work: PassWork) -> Flops:
    """Return the FLOPs of a model's forward and backward pass over `work`; the model may be on the meta device.

    The backward pass has the forward's FLOPs once for each weight that is trained and once for each input that needs a
    gradient. In the vision tower and the connector every input needs one as soon as anything in them is trained; pixels
    never do.

    Raises: ValueError for layers whose attention is neither full nor the gated delta rule.
    """
    trained = {part_of(n) for n, p in model.named_parameters() if p.requires_grad}
    forward: dict[str, float] = {}
    backward: dict[str, float] = {}

    def add(part: str, flops: float, times: int) -> None:
        forward[part] = forward.get(part, 0.0) + flops
        backward[part] = backward.get(part, 0.0) + times * flops

    before_layers = _anything_trained_before_the_layers(model)
    merged = work.patches // model.config.vision_config.spatial_merge_size**2
    runs_over = {"vision": work.patches, "connector": merged, "language": work.tokens, "embeddings": work.targets}
    for name, module in model.named_modules():
        part = part_of(f"{name}.weight")
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv3d) or part not in runs_over:
            continue
        needs_input = not trained.isdisjoint(UPSTREAM.get(part, trained))
        if part == "language" and _reads_embeddings(name):
            needs_input = before_layers
        if isinstance(module, nn.Conv3d):
            needs_input = False
        times = int(module.weight.requires_grad) + int(needs_input)
        add(part, 2.0 * module.weight.numel() * runs_over[part], times)
    for flops in _text_mixing(model.config.get_text_config(), work):
        add("attention", flops, 2)
    add("vision attention", _vision_attention(model.config.vision_config, work), 2 * ("vision" in trained))
    return Flops(forward, backward)


def prime_rl_flops(model: Any, tokens: int) -> float:
    """Return the FLOPs of a pass over one sequence of text, with an adapter, as prime-rl counts them for its MFU.

    4 for a frozen weight and a token (forward, and the gradient of the input), 6 for one of the adapter. Attention: 12
    for a layer, a channel of the hidden size (in place of heads x head width) and a pair of tokens, as without a mask.

    Source: src/prime_rl/trainer/perf.py of PrimeIntellect-ai/prime-rl.
    """
    text = model.config.get_text_config()
    weights = {True: 0, False: 0}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and part_of(f"{name}.weight") in ("language", "embeddings"):
            weights[module.weight.requires_grad] += module.weight.numel()
    attention = 12 * text.num_hidden_layers * text.hidden_size * tokens
    return float(tokens * (4 * weights[False] + 6 * weights[True] + attention))


def _reads_embeddings(name: str) -> bool:
    """Return whether this linear layer of the text model reads the first layer's input."""
    return ".layers.0." in name and "lora_B" not in name and any(reader in name for reader in FIRST_READERS)


def _anything_trained_before_the_layers(model: Any) -> bool:
    """Return whether the input of the first text layer's projections needs a gradient."""
    return any(
        p.requires_grad and not n.startswith("lm_head")
        for n, p in model.named_parameters()
        if part_of(n) != "language" or ".layers.0.input_layernorm" in n
    )


def _text_mixing(text: Any, work: PassWork) -> Iterator[float]:
    """Yield the FLOPs of each text layer for mixing tokens, without its projections."""
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for kind in getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers:
        if kind == "full_attention":
            yield 4.0 * text.num_attention_heads * width * work.pairs
        elif kind == "linear_attention":
            yield _delta_rule(text, work)
        else:
            raise ValueError(f"FLOPs of `{kind}` layers are not known")


def _delta_rule(text: Any, work: PassWork) -> float:
    """Return the FLOPs of the gated delta rule, chunk by chunk.

    Letters: C tokens of a chunk, K and V widths of a key and a value head. One chunk of one head takes:
    beta K K^T and Q K^T: 4 C C K; two triangular solves, of V and of the decayed keys: C C (V + K); keys and queries
    times the K x V state, and the state's update: 6 C K V; scores times new values: 2 C C V.

    Source: arXiv:2412.06464; the matrix products of `torch_chunk_gated_delta_rule`.
    """
    C, K, V = DELTA_CHUNK, text.linear_key_head_dim, text.linear_value_head_dim
    chunks = sum(-(-n // C) for n, _ in work.spans)
    products = 4 * C * C * K + 6 * C * K * V + 2 * C * C * V
    return float(text.linear_num_value_heads * chunks * (products + C * C * (V + K)))


def _vision_attention(vision: Any, work: PassWork) -> float:
    """Return the FLOPs of attention in all layers of the vision tower.

    Every patch sees its image, or in windowed layers its window.
    """
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL's hidden_size is the text model's
    whole = sum((rows * columns) ** 2 for rows, columns in work.images)
    full = getattr(vision, "fullatt_block_indexes", None)
    if full is None:
        return 4.0 * width * vision.depth * whole
    side = vision.window_size // vision.patch_size
    windowed = sum(_squares(rows, side) * _squares(columns, side) for rows, columns in work.images)
    return 4.0 * width * (len(full) * whole + (vision.depth - len(full)) * windowed)


def _squares(length: int, side: int) -> int:
    """Return the sum of squared lengths of the windows along one axis; the last may be short.

    Example: 10 by 4: 16 + 16 + 4.
    """
    return length // side * side**2 + (length % side) ** 2
