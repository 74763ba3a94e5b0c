"""What the GPU benchmark measures: models of real shapes with random weights, groups of real sizes, and the three paths
of a training update. Needs torch and transformers, and peft for adapters.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from flops import PassWork, forked_work
from torch import Tensor

from vlmrl.model import compiled
from vlmrl.model.attention import VISION_NAME, hold_kernel, use_kernels
from vlmrl.model.families import head_of, part_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.lora import attach_adapter
from vlmrl.model.packing import PackedRow, PromptTokens, TrainItem, make_row, pack
from vlmrl.model.policy import Policy, token_logprobs
from vlmrl.train.learner import Optimizer
from vlmrl.types import Segment

_VISION_2_5 = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
_AXES = {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6}
_AXES_3 = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True, "rope_theta": 5e6}
_AXES_3_5 = {
    "rope_type": "default",
    "mrope_section": [11, 11, 10],
    "mrope_interleaved": True,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
}


def _text(hidden: int, wide: int, layers: int, heads: int, key_heads: int, words: int, rope: Any, **more: Any) -> Any:
    return {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "vocab_size": words,
        "rope_parameters": rope,
        **more,
    }


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any], bool]] = {
    "Qwen2.5-VL-3B": ("Qwen2_5_VL", _text(2048, 11008, 36, 16, 2, 151936, _AXES),
                      _VISION_2_5 | {"out_hidden_size": 2048}, True),
    "Qwen2.5-VL-7B": ("Qwen2_5_VL", _text(3584, 18944, 28, 28, 4, 152064, _AXES),
                      _VISION_2_5 | {"out_hidden_size": 3584}, False),
    "Qwen3-VL-4B": ("Qwen3VL", _text(2560, 9728, 36, 32, 8, 151936, _AXES_3, head_dim=128),
                    {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "patch_size": 16,
                     "out_hidden_size": 2560, "deepstack_visual_indexes": [5, 11, 17]}, True),
    "Qwen3.5-9B": ("Qwen3_5", _text(4096, 12288, 32, 16, 4, 248320, _AXES_3_5, head_dim=256),
                   {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "patch_size": 16,
                    "out_hidden_size": 4096}, False),
}  # fmt: skip
_NINE_B = MODELS["Qwen3.5-9B"]
MODELS["Qwen3.5-9B-quarter"] = (_NINE_B[0], _NINE_B[1] | {"num_hidden_layers": 8}, *_NINE_B[2:])
MODELS["43M"] = ("Qwen2_5_VL", _text(512, 2048, 8, 8, 2, 8192, _AXES | {"mrope_section": [8, 12, 12]}),
                 _VISION_2_5 | {"depth": 6, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4,
                                "out_hidden_size": 512, "fullatt_block_indexes": [5]}, False)  # fmt: skip
"""Name -> transformers' class, text and vision configuration as published, and whether the embeddings are tied."""
IMAGE, VIDEO, START, END, PAD = range(2, 7)
"""Ids of special tokens, which random text leaves out. Where they are in the vocabulary makes no difference here."""
FIRST_WORD = 8
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One measurement.

    Args:
        kind: "update", "parity" or "cap".      path: "padded", "packed" or "shared".
        work: "taxon", "vfig", "text" (one sequence without an image), "row": taxon's prompt with responses that
            fill a row of 16,384 tokens, or "small": two images of 392 pixels, 16 responses of 96 tokens.
        backend: of packed rows; of padded ones "sdpa" or "stock".      optimizer: as `optim.name`.
        rank: of the adapter; 0 = all weights are trained.      tokens_per_row: budget of a row, or of a padded batch.
        cap_gib, ranks: of "cap": memory of one GPU, and over how many of them states are sharded.
        recompute: as `model.gradient_checkpointing`.      compiled: as `model.compile`.
        attention: as `model.attention`, on a GPU.
        limit_seconds: of the whole case, its start included.
    """

    kind: str
    work: str
    model: str
    path: str
    backend: str
    optimizer: str = "adamw"
    rank: int = 0
    tokens_per_row: int = 16_384
    cap_gib: float = 0.0
    ranks: int = 1
    recompute: bool | str | float = True
    compiled: bool = False
    attention: str = "auto"
    limit_seconds: int = 240

    @property
    def name(self) -> str:
        more = f"/{self.ranks}x{self.cap_gib:g}GiB" if self.kind == "cap" else ""
        more += f"/recompute-{self.recompute}" if self.recompute is not True else ""
        more += "/compiled" if self.compiled else ""
        more += f"/{self.attention}" if self.attention != "auto" else ""
        trained = f"LoRA{self.rank}" if self.rank else self.optimizer
        head = self.work if self.kind == "update" else f"{self.kind}-{self.work}"
        return f"{head}/{self.model}/{trained}/{self.path}-{self.backend}{more}"


def make_config(name: str, smoke: bool) -> Any:
    """The configuration of a model; at the toy size the same class, narrow and shallow."""
    family, text, vision, tied = MODELS[name]
    if smoke:
        rope = text["rope_parameters"] | {"mrope_section": [2, 3, 3]}
        if family == "Qwen3_5":
            rope |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
            text = text | {
                "linear_key_head_dim": 64,
                "linear_value_head_dim": 16,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
            }
        text = text | _text(64, 96, 4, 4, 2, 320, rope, head_dim=16)
        vision = vision | {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": 64,
        }
        vision |= {"fullatt_block_indexes": [1]} if family == "Qwen2_5_VL" else {}
        vision |= {"deepstack_visual_indexes": [0, 1]} if family == "Qwen3VL" else {}
    return getattr(transformers, f"{family}Config")(
        text_config=text | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": PAD},
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=tied,
    )


def make_model(case: Case, device: torch.device, dtype: torch.dtype, smoke: bool) -> Any:
    """The model with random weights, made where and as it will be: nothing is initialised on a CPU first."""
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(make_config(case.model, smoke), dtype=dtype)
    share_prefix(model)
    if case.rank:
        lora: Any = SimpleNamespace(
            rank=min(case.rank, 4) if smoke else case.rank,
            alpha=16,
            dropout=0.0,
            rslora=False,
            dora=False,
            vision=False,
            targets="all-linear",
            exclude=[],
        )
        attach_adapter(model, lora)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # 0 at first, and then the other factor has no gradient
                torch.nn.init.normal_(parameter, std=0.02)
    checkpoint_gradients(model, case.recompute)
    return model.eval()


@dataclass(frozen=True)
class Shape:
    """One group: images in patches, prompt tokens with image tokens, tokens of each response."""

    grids: tuple[tuple[int, int], ...]
    prompt: int
    responses: tuple[int, ...]


def shape_of(case: Case, smoke: bool) -> Shape:
    patch = MODELS[case.model][2]["patch_size"]
    if case.work == "text":
        return Shape((), 8, (24,)) if smoke else Shape((), 64, (16_320,))
    if case.work == "small" and not smoke:
        return Shape(((28, 28),) * 2, 516, (96,) * 16)
    if case.work in ("taxon", "row", "small"):
        side = round(800 / (2 * patch)) * 2 if not smoke else 10  # the processor's rounding: 58 x 14, 50 x 16 pixels
        grids, text, responses = ((side, side),) * 2, 12 if smoke else 300, (6,) * 4 if smoke else (300,) * 16
        if case.work == "row" and not smoke:
            left = 16_384 - text - sum(h * w // 4 + 2 for h, w in grids)
            responses = (left // 16,) * 16
        if case.kind == "parity":
            responses = responses[:4]
        return Shape(grids, text + sum(h * w // 4 + 2 for h, w in grids), responses)
    side, prompt, longest, count = (10, 40, 32, 4) if smoke else (1024 // (2 * patch) * 2, 9000, 8500, 8)
    return Shape(((side, side),), prompt, tuple(longest * (k + 1) // count for k in range(count)))


def make_items(shape: Shape, config: Any, dtype: torch.dtype) -> list[TrainItem]:
    """The group as the packer takes it: random words, random pixels."""
    rng, vision = random.Random(0), config.vision_config
    words = lambda n: [rng.randrange(FIRST_WORD, config.get_text_config().vocab_size) for _ in range(n)]  # noqa: E731
    ids: list[int] = []
    for rows, columns in shape.grids:
        ids += [START, *[IMAGE] * (rows * columns // vision.spatial_merge_size**2), END]
    ids += words(shape.prompt - len(ids))
    images = {}
    if shape.grids:
        patches = sum(rows * columns for rows, columns in shape.grids)
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.randn(patches, width, generator=torch.Generator().manual_seed(0)).to(dtype)
        images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, *grid] for grid in shape.grids])}
    prompt = PromptTokens(tuple(ids), tuple(int(i == IMAGE) for i in ids), images, len(shape.grids))
    return [
        TrainItem(prompt, 0, (Segment("assistant", tuple(words(n)), True),), k) for k, n in enumerate(shape.responses)
    ]


@dataclass(frozen=True)
class Batch:
    """One forward pass: how it gives the log-probs of whose responses, one after another, and what it computes."""

    run: Callable[[], Tensor]
    items: list[TrainItem]
    work: PassWork


def batches(path: str, policy: Policy, items: list[TrainItem], budget: int) -> Iterator[Batch]:
    """The group's forward passes on a path, none over `budget` tokens unless a single sequence is."""
    if path == "padded":
        longest = len(items[0].prompt.ids) + max(i.num_tokens for i in items)
        count = max(1, budget // longest)
        for start in range(0, len(items), count):
            yield _padded(policy, items[start : start + count], longest)
        return
    if path == "packed":
        items = [dataclasses.replace(item, group=k) for k, item in enumerate(items)]
    for chosen in pack(items, budget):
        row = make_row(chosen, policy.device)
        row = _one_sequence_a_group(row) if path == "packed" else row
        yield Batch(lambda row=row: policy(row).logp, chosen, _work_of(row, chosen, policy.sharing))


def _one_sequence_a_group(row: PackedRow) -> PackedRow:
    """A row whose groups have one response each, prompt and response taken as one causal sequence."""
    pairs = zip(row.layout[::2], row.layout[1::2], strict=True)
    layout = tuple(dataclasses.replace(prompt, end=response.end) for prompt, response in pairs)
    return dataclasses.replace(row, layout=layout, span_images=row.span_images[::2])


def _grids(items: list[TrainItem]) -> list[tuple[int, int]]:
    images = items[0].prompt.images
    return [(rows, columns) for _, rows, columns in images["image_grid_thw"].tolist()] if images else []


def _work_of(row: PackedRow, items: list[TrainItem], sharing: str) -> PassWork:
    grids = _grids(items) * sum(span.response == -1 for span in row.layout)
    lengths = [span.end - span.start for span in row.layout]
    if sharing == "forked":
        return forked_work(lengths[0], lengths[1:], grids)
    prompt, spans = 0, []
    for span, length in zip(row.layout, lengths, strict=True):
        spans.append((length, 0 if span.response == -1 else prompt))
        prompt = length if span.response == -1 else prompt
    return PassWork(tuple(spans), tuple(grids), len(row.target_K))


def _padded(policy: Policy, items: list[TrainItem], longest: int) -> Batch:
    """A batch padded on the right, through the stock forward; the head runs over the responses only."""
    prompt = items[0].prompt
    ids = torch.full((len(items), longest), PAD)
    kinds, seen = torch.zeros_like(ids), torch.zeros_like(ids)
    at: list[int] = []
    for k, item in enumerate(items):
        story = [*prompt.ids, *item.segments[0].ids]
        ids[k, : len(story)], seen[k, : len(story)] = torch.tensor(story), 1
        kinds[k, : len(prompt.kinds)] = torch.tensor(prompt.kinds)
        at += range(k * longest + len(prompt.ids), k * longest + len(story))
    ids, kinds, seen, places = (x.to(policy.device) for x in (ids, kinds, seen, torch.tensor(at)))
    images = {name: torch.cat([x] * len(items)).to(policy.device) for name, x in prompt.images.items()}

    def run() -> Tensor:
        policy.model.train(policy.recompute and torch.is_grad_enabled())  # as Policy.forward does
        hidden = policy.model.model(
            input_ids=ids, attention_mask=seen, use_cache=False, **images, mm_token_type_ids=kinds.int()
        ).last_hidden_state.flatten(0, 1)
        policy.model.eval()
        return token_logprobs(hidden[places - 1], ids.flatten()[places], head_of(policy.model), temperature=1.0)[0]

    work = PassWork(((longest, 0),) * len(items), tuple(_grids(items) * len(items)), len(at))
    return Batch(run, items, work)


def use_attention(model: Any, case: Case) -> None:
    """The attention of the padded path is transformers' own, in the vision tower too when it is `stock`."""
    if case.path == "padded":
        vision = "sdpa" if case.backend == "stock" else VISION_NAME
        model.set_attn_implementation({"text_config": "sdpa", "vision_config": vision})


def one_pass(
    path: str, policy: Policy, items: list[TrainItem], budget: int, backward: bool = True
) -> tuple[Tensor, list[PassWork]]:
    """Forward and backward of the group. Returns log-probs in the order of trajectories, and the work of each batch."""
    total = sum(item.num_tokens for item in items)
    found: dict[int, Tensor] = {}
    works = []
    for batch in batches(path, policy, items, budget):
        with torch.set_grad_enabled(backward):
            logp = batch.run()
        lengths = [item.num_tokens for item in batch.items]
        if backward:  # the ratio of an update on its own samples: 1, with a gradient
            advantage = torch.tensor([1.0 if item.trajectory % 2 == 0 else -0.5 for item in batch.items])
            weight = advantage.repeat_interleave(torch.tensor(lengths)).to(logp.device)
            (-(logp - logp.detach()).exp() * weight).sum().div(total).backward()
        works.append(batch.work)
        pieces = logp.detach().split(lengths)
        found |= {item.trajectory: piece for item, piece in zip(batch.items, pieces, strict=True)}
    return torch.cat([found[k] for k in sorted(found)]), works


class World:
    """A case made ready: model, policy, group and optimizer on the device."""

    def __init__(self, case: Case, smoke: bool) -> None:
        self.case = case
        self.device = torch.device("cuda" if torch.cuda.is_available() and not smoke else "cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" or case.kind == "parity" else torch.float32
        self.model = make_model(case, self.device, dtype, smoke)
        self.policy = Policy(self.model, backend="auto" if case.path == "padded" else case.backend)
        self.items = make_items(shape_of(case, smoke), self.model.config, dtype)
        use_attention(self.model, case)
        if self.device.type == "cuda":
            use_kernels(case.attention)
        if case.compiled:
            if smoke:
                compiled.BACKEND = "aot_eager"  # the same graphs, without a C compiler
            hold_kernel(self.device)
            compiled.compile_layers(self.policy)
        # FlexAttention has no backward pass on a CPU.
        self.backward = self.device.type == "cuda" or case.backend != "flex"
        self.optimizer = None if case.kind == "parity" else make_optimizer(self.policy, case.optimizer)

    def uncompile(self) -> None:
        """Run the layers as they are from now on: what a compiled pass is compared with is not compiled."""
        for module in self.model.modules():
            module.__dict__.pop("forward", None)
        self.policy.compiled = False

    def gradients(self) -> list[PassWork]:
        """Forward, backward and clipping."""
        works = one_pass(self.case.path, self.policy, self.items, self.case.tokens_per_row, self.backward)[1]
        if self.backward and self.optimizer is not None:
            self.optimizer.clip()
        return works

    def update(self) -> list[PassWork]:
        works = self.gradients()
        if self.backward and self.optimizer is not None:
            self.optimizer.step(1e-6)
        return works


def make_optimizer(policy: Policy, name: str) -> Optimizer:
    settings: Any = SimpleNamespace(
        name=name, lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.0, max_grad_norm=1.0, epsilon=1e-8
    )
    return Optimizer(policy, settings)


@dataclass(frozen=True)
class Rank:
    """Return the bytes that one of N ranks holds under FSDP2; computed, not measured.

    needs = states / N + gathered. states: weights, masters, gradients and moments. gathered: embeddings and head for
    the whole pass, two decoder layers (one running, one arriving) and the gradient of one, all in the weights' type.
    """

    states: float
    gathered: float
    ranks: int

    @property
    def needs(self) -> float:
        return self.states / self.ranks + (self.gathered if self.ranks > 1 else 0.0)


BYTES = {"adamw": 16, "adamw_bf16_kahan": 12}
"""Beside a trained bfloat16 weight: master, gradient and two moments in float32; or compensation and first moment in
bfloat16, gradient and second moment in float32."""


def rank_of(model: Any, optimizer: str, ranks: int) -> Rank:
    """The share of a rank of a bfloat16 model."""
    sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        if ".layers." in name:
            layer = name.split(".layers.")[1].split(".")[0]
            layers[layer] = layers.get(layer, 0) + size
    root = sum(size for name, size in sizes.items() if part_of(name) == "embeddings")
    return Rank(sum(sizes.values()) + trained * BYTES[optimizer], root + 3 * max(layers.values()), ranks)
