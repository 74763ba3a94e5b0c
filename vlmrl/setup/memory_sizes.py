"""Sizes of the parts of a memory plan, in bytes, for one process of a run; table of GPUs with their memory.

They are derived from the code: dist/fsdp.py and torch's FSDP2 (gathered units, dtype in which gradients are reduced),
train/learner.py (masters, moments), model/memory.py (a packed row), rollout/ (caches, engines).
tests/unit/preflight/test_memory_plan.py compares them with the tensors of real updates. The table has the size and the
bandwidth of GPUs, for plans of runs on another machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from vlmrl.algo.algorithms import algorithm_of
from vlmrl.errors import RecipeError, VlmrlError
from vlmrl.model.memory import (
    LayerSize,
    Recomputed,
    Widths,
    recomputed_layers,
    text_layers,
    vision_depth,
    vision_layer,
    vision_width,
)
from vlmrl.recipe.load import LoadedRecipe
from vlmrl.recipe.schema import Model
from vlmrl.setup.machine import MOMENT_BYTES, trained_parameters, weight_bytes

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts


MASTER_BYTES = GRADIENT_BYTES = 4
"""Bytes per trained number, which is float32. In a sharded policy, the parameters themselves are the masters."""
PIXEL_BYTES = 4


@dataclass(frozen=True)
class PromptLengths:
    """Lengths of the longest prompt and response.

    Args:
        tokens: tokens of the longest known prompt, image tokens included.
        image_tokens: maximum number of image tokens of a prompt.
        response: tokens of the longest response.
    """

    tokens: int
    image_tokens: int
    response: int

    @property
    def longest(self) -> int:
        return self.tokens + self.response


@dataclass(frozen=True)
class LargestRow:
    """Largest packed row, built as the rehearsal builds it: every response as long as allowed.

    Args:
        trained: number of its response tokens.
        run: largest number of tokens in one forward pass.
    """

    tokens: int
    prompts: int
    trained: int
    run: int


def largest_row(loaded: LoadedRecipe, prompts: PromptLengths, sharing: str) -> LargestRow:
    """Return the largest packed row that `train.tokens_per_row` allows."""
    recipe = loaded.recipe
    is_rl = recipe.kind == "rl"
    shown = is_rl and algorithm_of(recipe.algo).demonstrations in ("mixed", "beside")
    samples = recipe.rollout.samples_per_prompt + shown if is_rl else 1
    most = recipe.rollout.prompts_per_step if is_rl else recipe.train.rows_per_step
    group = prompts.tokens + samples * prompts.response
    budget = max(recipe.train.tokens_per_row, prompts.longest)
    tokens = min(budget, most * group)
    count = max(1, min(most, -(-tokens // group)))
    trained = max(prompts.response, tokens - count * prompts.tokens)
    responses = -(-trained // max(1, prompts.response))
    if sharing == "padded":  # each response runs after a copy of its prompt, one response at a time
        return LargestRow(trained + responses * prompts.tokens, responses, trained, prompts.longest)
    if sharing == "forked":  # a prompt runs, then its responses
        own = min(samples, responses) * prompts.response
        return LargestRow(tokens, count, trained, max(prompts.tokens, min(own, trained)))
    return LargestRow(tokens, count, trained, tokens)


@lru_cache(maxsize=8)
def _parameters_of(settings: str) -> int:
    """Return the number of parameters of a model. `settings`: its `[model]` table as JSON.

    It is read once: the search for a plan that fits makes many plans.
    """
    from vlmrl.model.model_facts import model_facts
    from vlmrl.setup.model_origin import find_model

    table = Model.model_validate_json(settings)
    return model_facts(table, path=find_model(table.path, Path()).files).total


class Sizes:
    """Memory of one process of a run, in bytes, by purpose.

    Args:
        shards: number of processes that hold one copy of the model together.
        sharded: whether FSDP2 holds the model: several processes train, or one with `parallel.offload`.
        offload: whether the states are in main memory and the computation is on a GPU.
        kernels: kernels of linear attention, "torch" or "fla".
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        facts: ModelFacts,
        prompts: PromptLengths,
        shards: int,
        sharded: bool,
        offload: bool,
        kernels: str = "torch",
    ) -> None:
        self.loaded, self.facts, self.prompts = loaded, facts, prompts
        self.recipe, self.shards, self.sharded, self.offload = loaded.recipe, shards, sharded, offload
        self.size = 4 if loaded.recipe.model.dtype == "float32" else 2
        self.kernels = kernels
        self.trained = trained_parameters(loaded, facts)
        self.row = largest_row(loaded, prompts, facts.sharing)

    # -- permanent: weights, masters, moments, gradients, the reference

    @property
    def weights(self) -> int:
        """Size of the weights in this process. If they are sharded: its shard, with trained numbers in float32."""
        if not self.sharded:
            return weight_bytes(self.loaded, self.facts)
        frozen = self.facts.total - (0 if self.recipe.lora else self.trained)
        return (self.trained * MASTER_BYTES + frozen * self.size) // self.shards

    @property
    def masters(self) -> int:
        """Size of the float32 copies of trained weights; 0 if the weights themselves are the masters."""
        own = self.sharded or self.size == 4 or self.recipe.optim.name == "adamw_bf16_kahan"
        return 0 if own else self.trained * MASTER_BYTES

    @property
    def moments(self) -> int:
        return self.trained * MOMENT_BYTES[self.recipe.optim.name] // self.shards

    @property
    def gradients(self) -> int:
        return self.trained * GRADIENT_BYTES // self.shards

    @property
    def reference(self) -> int:
        """Size of the reference model for the KL divergence; 0 with an adapter, as the base model is the reference."""
        needed = self.recipe.kind == "rl" and self.recipe.lora is None and algorithm_of(self.recipe.algo).kl_coef > 0
        return self.facts.total * self.size // self.shards if needed else 0

    @cached_property
    def teacher(self) -> int:
        """Size of the weights of a teacher that is a model of its own; 0 if there is none, or if it cannot be read."""
        settings = self.recipe.teacher_model
        if self.recipe.teacher is not None and settings is None:  # the start of the run, as for a KL
            is_shared = self.recipe.lora is not None or self.reference > 0
            return 0 if is_shared else self.facts.total * self.size // self.shards
        if settings is None or algorithm_of(self.recipe.algo).teacher == "none":
            return 0
        try:
            total = _parameters_of(settings.model_dump_json())
        except VlmrlError:  # the check of the teacher reports it
            return 0
        return total * (4 if settings.dtype == "float32" else 2) // self.shards

    # -- gathered units of a sharded model, and gradients that are being reduced to their shards

    @cached_property
    def layer(self) -> int:
        """Number of parameters in the largest FSDP unit that is gathered alone; 0 if there is none."""
        return max((max(sizes) for sizes in self.facts.units.values() if sizes), default=0)

    @cached_property
    def root(self) -> int:
        """Number of parameters in the root unit, which stays gathered during the whole packed row."""
        return self.facts.total - sum(map(sum, self.facts.units.values()))

    @property
    def trained_share(self) -> float:
        """Share of the base weights that have gradients: 1 without frozen parts, 0 with an adapter."""
        return 0.0 if self.recipe.lora else self.trained / self.facts.total

    @property
    def head_gradient(self) -> int:
        """Size of the output embedding's gradient, in the compute dtype. It exists during a whole backward pass."""
        frozen = self.recipe.lora is not None or "embeddings" in self.recipe.model.freeze
        return 0 if frozen else self.facts.head * self.size

    @property
    def pass_gradients(self) -> int:
        """Size of the embeddings' gradients, in the compute dtype, while a layer's backward pass runs.

        If a row takes several forward passes, the input embedding has one too, from the passes whose backward pass is
        over.
        """
        if self.facts.sharing == "packed":
            return self.head_gradient
        return self.facts.parameters.get("embeddings", 0) * self.size if self.head_gradient else 0

    def gathered(self) -> int:
        """Return the size of the gathered parameters in the middle of a pass: root, running layer, next layer.

        A single process gathers no layer in advance. With offloading, it casts one weight after another on the GPU:
        their copies take about as much as a layer.
        """
        if not self.sharded:
            return 0
        layers = 2 if self.shards > 1 or self.offload else 1
        return (self.root + layers * self.layer) * self.size

    def layer_gradients(self) -> int:
        """Return the size of a layer's new gradients and the previous layer's float32 ones, which are being reduced.

        With offloading, the GPU also has the previous layer's reduced shard, until that is in main memory.
        """
        if not self.sharded and self.facts.sharing == "packed":  # one parameter at a time, with a float32 copy
            return 0 if self.recipe.lora else self.facts.largest * (self.size + (4 if self.size == 2 else 0))
        if not self.sharded:  # autograd adds up the gradients of all forward passes of a row
            return self.trained * self.size
        leaving = GRADIENT_BYTES / self.shards if self.offload else 0
        return int(self.layer * self.trained_share * (self.size + GRADIENT_BYTES + leaving))

    def root_gradients(self) -> int:
        """Return the size of the root's gradients, and of their float32 copy, at the end of a backward pass."""
        if not self.sharded:
            return 0
        each = self.size + GRADIENT_BYTES + GRADIENT_BYTES / self.shards
        if self.shards == 1:  # nothing is reduced: the float32 gradients are copied, after the others were freed
            each = 2 * GRADIENT_BYTES
        return int(self.root * self.trained_share * each)

    # -- activations of the largest row

    @cached_property
    def text(self) -> list[LayerSize]:
        return text_layers(self.facts.text, self.size, self.kernels)

    @cached_property
    def vision(self) -> LayerSize:
        from vlmrl.model.families import part_of

        gated = any("gate_proj" in name and part_of(name) == "vision" for name in self.facts.linear)
        return vision_layer(self.facts.vision, gated, self.size)

    @property
    def patches(self) -> int:
        """Number of patches of the largest row's images."""
        merge = int(self.facts.vision.get("spatial_merge_size") or 2)
        return self.row.prompts * self.prompts.image_tokens * merge**2

    @property
    def vision_learns(self) -> bool:
        """Return whether the vision tower has a backward pass."""
        lora, freeze = self.recipe.lora, self.recipe.model.freeze
        return lora.vision if lora else not {"vision", "connector"} <= set(freeze)

    @cached_property
    def recomputed(self) -> Recomputed:
        return recomputed_layers(self.recipe.model.gradient_checkpointing, len(self.text))

    def kept(self) -> int:
        """Return the size of the activations that are kept from a row's forward pass to its backward pass."""
        hidden, first = Widths.of(self.facts.text).hidden, self.recomputed.text
        per_token = hidden * first + sum(layer.kept for layer in self.text[first:])
        copied = self._copied_keys() * self._full_layers(first)
        return int((self.row.tokens * (per_token + 3 * hidden) + copied) * self.size) + self.vision_kept()

    def vision_kept(self) -> int:
        """Return the vision tower's share of `kept`."""
        if not self.vision_learns or not self.patches:
            return self.patches * 1200 * PIXEL_BYTES
        width, depth = vision_width(self.facts.vision), vision_depth(self.facts.vision)
        each = width if self.recomputed.vision else self.vision.kept
        return int(self.patches * ((depth * each + 8 * width) * self.size + 1200 * PIXEL_BYTES))

    def layer_work(self) -> int:
        """Return the most memory that the backward pass of the text layers needs in addition to `kept`.

        The peak is in the last layer; or, if that keeps its activations, perhaps in the last recomputed one: then the
        activations of the layers behind it are freed already.
        """
        first = self.recomputed.text
        others = self.text[first:]
        last = max((layer.whole - layer.kept + layer.working for layer in others), default=0.0)
        freed = self.row.tokens * sum(layer.kept for layer in others) + self._copied_keys() * self._full_layers(first)
        again = self.one_layer() - int(freed * self.size) if first else 0
        return max(int(self.row.run * last * self.size), again)

    def one_layer(self) -> int:
        """Return the size of all tensors in the backward pass of one text layer, without those of other layers."""
        per_token = max(layer.whole + layer.working for layer in self.text)
        copied = self._copied_keys() if self._full_layers() else 0.0
        return int((self.row.run * per_token + copied) * self.size)

    def vision_work(self) -> int:
        """Return the size of the temporary tensors in the vision tower's backward pass.

        The activations of the text model are already freed then.
        """
        if not self.vision_learns:
            return 0
        return int(self.patches * (self.vision.whole + self.vision.working) * self.size)

    def logits(self, device: str, memory_bytes: int) -> int:
        """Return the size of the logits that exist at once, and of the tensors that are computed from them."""
        from vlmrl.model.memory import head_chunks

        # Estimate: half of the memory is free when a run chooses the size of its chunks.
        chunks = head_chunks(device, memory_bytes // 2)
        return chunks.peak_bytes(self.row.trained, int(self.facts.text.get("vocab_size") or 0))

    def _full_layers(self, first: int = 0) -> int:
        """Return the number of layers with full attention, from layer `first` on."""
        kinds = self.facts.text.get("layer_types") or ["full_attention"] * self.facts.layers
        return list(kinds)[first:].count("full_attention")

    def _copied_keys(self) -> float:
        """Return the number of key and value elements of prompts that a forked row copies for its responses.

        One layer with full attention is counted; 0 if the row is not forked.
        """
        if self.facts.sharing != "forked":
            return 0.0
        responses = self.row.trained / max(1, self.prompts.response)
        return 2.0 * Widths.of(self.facts.text).query * self.prompts.tokens * responses

    # -- generating

    def prefill(self) -> int:
        """Return the size of the built-in engine's temporary tensors while it reads prompts, without gradients.

        Only one layer's tensors exist at a time.
        """
        r, w = self.recipe.rollout, Widths.of(self.facts.text)
        group = self.prompts.tokens + r.samples_per_prompt * self.prompts.response
        prompts = max(1, min(r.prompts_per_step, r.batch_tokens // max(1, group)))
        inner = max(w.inner, w.experts_per_token * (w.expert_inner + w.hidden))
        rows = max(1, min(r.prompts_per_step * r.samples_per_prompt, r.batch_tokens // max(1, self.prompts.response)))
        logits = rows * int(self.facts.text.get("vocab_size") or 0) * 4 * 3
        return prompts * self.prompts.tokens * (3 * inner + 6 * w.hidden) * self.size + logits


GIB = 1 << 30
MAX_GIB = 1024
TYPICAL_BANDWIDTH = 2.0e12
"""Bandwidth that is assumed for a GPU that is not in the table, in bytes per second."""

_ONE_NAME = re.compile(r"(?!.*\dg\.)[A-Za-z0-9 ()_.-]+", re.IGNORECASE)
"""Pattern of the name of a single GPU. It does not match a list of names or a MIG slice."""


@dataclass(frozen=True)
class Gpu:
    """GPU that a plan is made for.

    Args:
        name: name for messages.
        memory_bytes: memory that CUDA makes available.
        bandwidth: bandwidth of the memory, in bytes per second.
    """

    name: str
    memory_bytes: int
    bandwidth: float = TYPICAL_BANDWIDTH


KNOWN: tuple[tuple[str, float, float], ...] = (
    ("B300", 268.0, 8.0e12), ("GB300", 268.0, 8.0e12), ("B200", 178.0, 8.0e12), ("GB200", 184.0, 8.0e12),
    ("H200", 139.8, 4.8e12), ("H20", 95.0, 4.0e12), ("GH200", 94.5, 4.0e12), ("H100-NVL", 93.1, 3.9e12),
    ("H100-PCIE", 79.1, 2.0e12), ("H100", 79.1, 3.35e12), ("H800", 79.1, 3.35e12), ("A100-40", 39.4, 1.55e12),
    ("A100", 79.1, 2.0e12), ("A800", 79.1, 2.0e12), ("RTX-PRO-6000", 94.9, 1.8e12), ("RTX-6000-ADA", 47.4, 0.96e12),
    ("L40S", 44.4, 0.86e12), ("L40", 44.4, 0.86e12), ("A6000", 47.4, 0.77e12), ("A40", 44.4, 0.7e12),
    ("L4", 22.0, 0.3e12), ("A10", 22.0, 0.6e12), ("A30", 23.5, 0.93e12), ("V100-32", 31.7, 0.9e12),
    ("V100", 15.8, 0.9e12), ("T4", 14.6, 0.32e12), ("5090", 31.4, 1.8e12), ("4090", 23.5, 1.0e12),
    ("3090", 23.6, 0.94e12), ("4080", 15.6, 0.72e12), ("3080", 9.6, 0.76e12),
)  # fmt: skip
"""(Name, GiB that CUDA makes available, bytes per second), from data sheets and `nvidia-smi`. The GiB are less than the
advertised size.
"""
MIG = re.compile(r"([1-7])G\.(\d+)GB(?:\+[A-Z0-9.]+)?", re.IGNORECASE | re.ASCII)
"""Pattern of NVIDIA's name of a MIG slice: 3g.40gb is three of the seven parts of a GPU, with 40 GB of memory."""


def parse_gpu(text: str) -> Gpu:
    """Return the GPU that `--gpu-memory` names: GiB (`80`, `24GB`), a name (`H100`), or a MIG slice (`3g.40gb`).

    Raises: RecipeError when the text is none of these.
    """
    word = text.strip()
    if any(word.upper() == name for name, _, _ in KNOWN):  # names first: some of them are numbers
        gpu = known_gpu(word)
        assert gpu is not None
        return gpu
    if number := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", word, re.IGNORECASE | re.ASCII):
        size = float(number[1])
        if 0 < size <= MAX_GIB:
            return Gpu(f"{size:g} GiB GPU", int(size * GIB))
    if slice_ := MIG.fullmatch(word.rpartition("-")[2].removeprefix("MIG ")):
        size = int(slice_[2])
        if 0 < size <= MAX_GIB:
            return Gpu(f"MIG slice {word}", int(size * GIB * 0.98))
    if gpu := _ONE_NAME.fullmatch(word) and known_gpu(word):
        return gpu
    names = ", ".join(name for name, _, _ in KNOWN)
    raise RecipeError(f"--gpu-memory cannot be `{text}`", hint=f"GiB (80), a MIG slice (3g.40gb), or one of {names}")


def known_gpu(name: str) -> Gpu | None:
    """Return the GPU of the table whose name occurs in `name`, such as `NVIDIA H100 80GB HBM3`; None if none does."""
    plain = re.sub(r"[^A-Z0-9]+", "-", name.upper())
    fitting = [(len(known), known, gib, speed) for known, gib, speed in KNOWN if re.search(_pattern(known), plain)]
    if not fitting:
        return None
    _, known, gib, speed = max(fitting)
    return Gpu(known, int(gib * GIB), speed)


def _pattern(known: str) -> str:
    """Return a pattern for a name in the table: all its words, in this order, possibly with other words in between.

    Example: `A100-40` matches A100-SXM4-40GB, A10 does not.
    """
    words = r"(?:-[A-Z0-9]+)*?-?".join(map(re.escape, known.split("-")))
    return rf"(?:^|[^A-Z0-9]){words}(?:GB)?(?:$|[^A-Z0-9])"
