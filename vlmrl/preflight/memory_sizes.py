"""The sizes that a plan of memory is made of: what one process holds, gathers, keeps and works with, in bytes.

Each follows from what the code does: dist/fsdp.py and torch's FSDP2 (which units are gathered, in which type gradients
are reduced), train/optim.py (masters, moments), model/activation_memory.py (a packed row), rollout/ (caches, engines).
tests/unit/preflight/test_memory_plan.py counts the tensors of real updates and compares.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from vlmrl.algo.family import algorithm_of
from vlmrl.model.activation_memory import LayerSize, Widths, text_layers, vision_depth, vision_layer, vision_width
from vlmrl.preflight.machine import MOMENT_BYTES, trained_parameters, weight_bytes
from vlmrl.recipe.load import LoadedRecipe

if TYPE_CHECKING:
    from vlmrl.model.model_facts import ModelFacts

MASTER_BYTES = GRADIENT_BYTES = 4
"""Of a trained number: float32 (with several processes they are the parameters themselves)."""
PIXEL_BYTES = 4


@dataclass(frozen=True)
class PromptLengths:
    """How long prompts and responses are.

    Args:
        tokens, image_tokens: of the longest prompt known; images count in both.
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
    """The largest packed row, made as the rehearsal makes it: every response as long as it may be.

    Args: tokens: of it.      prompts: in it.      trained: response tokens.      run: the most tokens that run at once.
    """

    tokens: int
    prompts: int
    trained: int
    run: int


def largest_row(loaded: LoadedRecipe, prompts: PromptLengths, sharing: str) -> LargestRow:
    """Return the largest row under `train.tokens_per_row`."""
    recipe = loaded.recipe
    is_rl = recipe.kind == "rl"
    samples = recipe.rollout.samples_per_prompt if is_rl else 1
    most = recipe.rollout.prompts_per_step if is_rl else recipe.train.rows_per_step
    group = prompts.tokens + samples * prompts.response
    budget = max(recipe.train.tokens_per_row, prompts.longest)
    tokens = min(budget, most * group)
    count = max(1, min(most, -(-tokens // group)))
    trained = max(prompts.response, tokens - count * prompts.tokens)
    responses = -(-trained // max(1, prompts.response))
    if sharing == "padded":  # every response runs behind a copy of its prompt, one after the other
        return LargestRow(trained + responses * prompts.tokens, responses, trained, prompts.longest)
    if sharing == "forked":  # a prompt runs, then its responses
        own = min(samples, responses) * prompts.response
        return LargestRow(tokens, count, trained, max(prompts.tokens, min(own, trained)))
    return LargestRow(tokens, count, trained, tokens)


class Sizes:
    """What one process of a run takes, by what it takes it for.

    Args:
        shards: processes that hold one copy of the model between them; 1 = nothing is sharded.
        kernels: of linear attention, "torch" or "fla".
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        facts: ModelFacts,
        prompts: PromptLengths,
        shards: int,
        world: int,
        kernels: str = "torch",
    ) -> None:
        self.loaded, self.facts, self.prompts = loaded, facts, prompts
        self.recipe, self.shards, self.world = loaded.recipe, shards, world
        self.size = 4 if loaded.recipe.model.dtype == "float32" else 2
        self.kernels = kernels
        self.trained = trained_parameters(loaded, facts)
        self.row = largest_row(loaded, prompts, facts.sharing)

    # -- what stays: weights, masters, moments, gradients, the reference

    @property
    def weights(self) -> int:
        """The model as this process holds it: with several, trained numbers in float32, shard by shard."""
        if self.world == 1:
            return weight_bytes(self.loaded, self.facts)
        frozen = self.facts.total - (0 if self.recipe.lora else self.trained)
        return (self.trained * MASTER_BYTES + frozen * self.size) // self.shards

    @property
    def masters(self) -> int:
        """float32 copies of trained weights; with several processes the weights are their own."""
        own = self.world > 1 or self.size == 4 or self.recipe.optim.name == "adamw_bf16_kahan"
        return 0 if own else self.trained * MASTER_BYTES

    @property
    def moments(self) -> int:
        return self.trained * MOMENT_BYTES[self.recipe.optim.name] // self.shards

    @property
    def gradients(self) -> int:
        return self.trained * GRADIENT_BYTES // self.shards

    @property
    def reference(self) -> int:
        """A second model for the KL; with an adapter it is the same one."""
        needed = self.recipe.kind == "rl" and self.recipe.lora is None and algorithm_of(self.recipe.algo).kl_coef > 0
        return self.facts.total * self.size // self.shards if needed else 0

    # -- what is gathered of a sharded model, and the gradients on their way to their shards

    @cached_property
    def layer(self) -> int:
        """Numbers in the largest unit that is gathered by itself; 0 = none is."""
        return max((max(sizes) for sizes in self.facts.units.values() if sizes), default=0)

    @cached_property
    def root(self) -> int:
        """Numbers in what is gathered for the whole of a row."""
        return self.facts.total - sum(map(sum, self.facts.units.values()))

    @property
    def trained_share(self) -> float:
        """Share of the weights that have a gradient of their own: 1 without frozen parts and adapters."""
        return 0.0 if self.recipe.lora else self.trained / self.facts.total

    @property
    def head_gradient(self) -> int:
        """The output embedding's gradient, in the compute type, there from the first moment of a backward pass."""
        frozen = self.recipe.lora is not None or "embeddings" in self.recipe.model.freeze
        return 0 if frozen else self.facts.head * self.size

    def gathered(self) -> int:
        """Parameters that are whole in the middle of a pass: the root, a layer that runs, and one that arrives."""
        return 0 if self.world == 1 else (self.root + 2 * self.layer) * self.size

    def layer_gradients(self) -> int:
        """A layer's gradients as they are made, and the layer's before, in float32, on their way to their shards."""
        if self.world == 1:  # one parameter at a time, and its float32 copy
            return 0 if self.recipe.lora else self.facts.largest * (self.size + (4 if self.size == 2 else 0))
        return int(self.layer * self.trained_share * (self.size + GRADIENT_BYTES))

    def root_gradients(self) -> int:
        """At the end of a backward pass: all gradients of the root, and their float32 copy that is scattered."""
        if self.world == 1:
            return 0
        each = self.size + GRADIENT_BYTES + GRADIENT_BYTES / self.shards
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
        """Patches of the largest row's images."""
        merge = int(self.facts.vision.get("spatial_merge_size") or 2)
        return self.row.prompts * self.prompts.image_tokens * merge**2

    @property
    def vision_learns(self) -> bool:
        """Whether the vision tower has a backward pass."""
        lora, freeze = self.recipe.lora, self.recipe.model.freeze
        return lora.vision if lora else not {"vision", "connector"} <= set(freeze)

    def kept(self) -> int:
        """Activations of a row from its forward to its backward pass."""
        hidden = Widths.of(self.facts.text).hidden
        recomputed = self.recipe.model.gradient_checkpointing
        per_token = hidden * len(self.text) if recomputed is True else sum(layer.kept for layer in self.text)
        text = self.row.tokens * (per_token + 3 * hidden) + self._copied_keys(recomputed is not True)
        return int(text * self.size) + self.vision_kept()

    def vision_kept(self) -> int:
        """The vision tower's share of `kept`."""
        if not self.vision_learns or not self.patches:
            return self.patches * 1200 * PIXEL_BYTES
        width, depth = vision_width(self.facts.vision), vision_depth(self.facts.vision)
        each = width if self.recipe.model.gradient_checkpointing else self.vision.kept
        return int(self.patches * ((depth * each + 8 * width) * self.size + 1200 * PIXEL_BYTES))

    def layer_work(self) -> int:
        """What the backward pass of one text layer works with besides."""
        recomputed = self.recipe.model.gradient_checkpointing is True
        made = max((layer.whole if recomputed else layer.whole - layer.kept) + layer.working for layer in self.text)
        one = self._copied_keys(recomputed) / max(1, self._full_layers()) if recomputed else 0.0
        return int((self.row.run * made + one) * self.size)

    def vision_work(self) -> int:
        """What the backward pass of the vision tower works with; the text model's activations are gone by then."""
        if not self.vision_learns:
            return 0
        return int(self.patches * (self.vision.whole + self.vision.working) * self.size)

    def logits(self, device: str, memory_bytes: int) -> int:
        """Logits at once, with all that is made of them."""
        from vlmrl.model.head_chunks import head_chunks

        # Half of a device's memory stands for what is free when the sizes are settled.
        chunks = head_chunks(device, memory_bytes // 2)
        return chunks.peak_bytes(self.row.trained, int(self.facts.text.get("vocab_size") or 0))

    def _full_layers(self) -> int:
        kinds = self.facts.text.get("layer_types") or ["full_attention"] * self.facts.layers
        return list(kinds).count("full_attention")

    def _copied_keys(self, kept: bool) -> float:
        """Numbers of the prompt's keys and values that a forked row copies for each response, in all full layers."""
        if self.facts.sharing != "forked" or not kept:
            return 0.0
        responses = self.row.trained / max(1, self.prompts.response)
        return 2.0 * Widths.of(self.facts.text).query * self.prompts.tokens * responses * self._full_layers()

    # -- generating

    def prefill(self) -> int:
        """What the built-in engine works with when it reads prompts: one layer at a time, without gradient."""
        r, w = self.recipe.rollout, Widths.of(self.facts.text)
        group = self.prompts.tokens + r.samples_per_prompt * self.prompts.response
        prompts = max(1, min(r.prompts_per_step, r.batch_tokens // max(1, group)))
        inner = max(w.inner, w.experts_per_token * (w.expert_inner + w.hidden))
        rows = max(1, min(r.prompts_per_step * r.samples_per_prompt, r.batch_tokens // max(1, self.prompts.response)))
        logits = rows * int(self.facts.text.get("vocab_size") or 0) * 4 * 3
        return prompts * self.prompts.tokens * (3 * inner + 6 * w.hidden) * self.size + logits
