"""Updates of small models beside their memory plan: the bytes of all tensors that live at once, and what is planned."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensor_bytes import TensorBytes
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen3_5Config, Qwen3VLConfig

from vlmrl.dist.fsdp import shard
from vlmrl.dist.world import World
from vlmrl.model.families import sharded_units
from vlmrl.model.load import DTYPES, checkpoint_gradients, share_prefix
from vlmrl.model.memory import Setting
from vlmrl.model.model_facts import model_facts
from vlmrl.model.packing import PromptTokens, TrainItem, make_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.memory_fit import Target
from vlmrl.setup.memory_plan import Cluster, make_plan
from vlmrl.setup.memory_sizes import PromptLengths
from vlmrl.train.learner import Optimizer
from vlmrl.types import Segment

PROMPT, RESPONSE, SAMPLES = 64, 64, 6
IDS: dict[str, Any] = {"image_token_id": 2, "video_token_id": 3, "vision_start_token_id": 4, "vision_end_token_id": 5}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
TEXT: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 64, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 6, "max_position_embeddings": 4096,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 3,
}  # fmt: skip
"""Many layers and large ones: a gradient of the whole model, which no rank may have, would be seen."""
VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 128,
}
CONFIGS = {
    "qwen2_5_vl": lambda text, vision: Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE} | text,
        vision_config=VISION | {"fullatt_block_indexes": [1]} | vision,
        tie_word_embeddings=False,
        **IDS,
    ),
    "qwen3_vl": lambda text, vision: Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": ROPE | {"mrope_interleaved": True}} | text,
        vision_config=VISION | {"deepstack_visual_indexes": [0]} | vision,
        tie_word_embeddings=False,
        **IDS,
    ),
    "qwen3_5": lambda text, vision: Qwen3_5Config(
        text_config=TEXT | HYBRID | {"rope_parameters": ROPE | {"mrope_interleaved": True}} | text,
        vision_config=VISION | {"num_position_embeddings": 64, "patch_size": 16, "out_hidden_size": 256} | vision,
        tie_word_embeddings=False,
        **IDS,
    ),
}


@dataclass(frozen=True)
class Shape:
    """Widths of a model and lengths of a row, beside those above.

    Args:
        image: image tokens of the prompt, a square number; 4 patches each.
    """

    text: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    response: int = RESPONSE
    samples: int = SAMPLES
    image: int = 0

    def config(self, family: str) -> Any:
        """The configuration of that family with these widths."""
        return CONFIGS[family](self.text, self.vision)


PLAIN = Shape()


def items(config: Any, shape: Shape) -> list[TrainItem]:
    ids, kinds, images = list(range(8, 8 + PROMPT)), [0] * PROMPT, {}
    if shape.image:
        vision, side = config.vision_config, 2 * math.isqrt(shape.image)
        numbers = 3 * vision.temporal_patch_size * vision.patch_size**2
        images = {"pixel_values": torch.randn(side * side, numbers), "image_grid_thw": torch.tensor([[1, side, side]])}
        ids[4:4] = [IDS["vision_start_token_id"], *[IDS["image_token_id"]] * shape.image]
        kinds = [int(i == IDS["image_token_id"]) for i in ids]
    prompt = PromptTokens(tuple(ids), tuple(kinds), images, bool(shape.image))
    response = tuple(20 + k % 400 for k in range(shape.response))
    return [TrainItem(prompt, 0, (Segment("assistant", response, True),), k) for k in range(shape.samples)]


def counted(
    monkeypatch: Any,
    family: str,
    dtype: str,
    setting: Setting,
    world: int,
    offload: bool = False,
    shape: Shape = PLAIN,
) -> int:
    """The most bytes of a second update, whose optimizer has its moments."""
    config = shape.config(family)
    with TensorBytes(monkeypatch) as tensors:
        model = AutoModelForImageTextToText.from_config(config, dtype=DTYPES[dtype])
        share_prefix(model)
        checkpoint_gradients(model, setting)
        policy = Policy(model.eval())
        if world > 1 or offload:
            units = sharded_units(policy.model, policy.sharing)
            compute = None if dtype == "float32" else DTYPES[dtype]
            ranks = World(0, world, 0, world)
            repeated = policy.sharing != "packed"
            cpu = torch.device("cpu")
            shard(policy, units, ranks, cpu, repeated=repeated, compute_dtype=compute, offload=offload)
        policy.device, policy.dtype = torch.device("cpu"), DTYPES[dtype]
        settings = SimpleNamespace(
            name="adamw", lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.0, max_grad_norm=1.0, epsilon=1e-8
        )
        optimizer = Optimizer(policy, settings)  # pyright: ignore[reportArgumentType]
        for _ in range(2):
            tensors.begin()
            for _ in range(2):  # two rows: the gradients of the first are there in the second
                policy(make_row(items(config, shape))).logp.sum().backward()
            peak = tensors.peak
            optimizer.step(1e-4)
    return peak


def planned(
    folder: Path,
    family: str,
    dtype: str,
    setting: Setting,
    world: int,
    offload: bool = False,
    shape: Shape = PLAIN,
) -> int:
    shape.config(family).save_pretrained(folder / "model")
    (folder / "r.toml").write_text(
        f'[model]\npath = "{folder / "model"}"\ndtype = "{dtype}"\ndevice = "cpu"\n'
        f"gradient_checkpointing = {json.dumps(setting)}\n[[data]]\npath = 'd'\n[rollout]\nengine = 'torch'\n"
        f"prompts_per_step = 1\nsamples_per_prompt = {shape.samples}\nmax_new_tokens = {shape.response}\n"
        f"[parallel]\noffload = {str(offload).lower()}\n"
    )
    loaded = load_recipe(folder / "r.toml")
    cluster = Cluster(Target(world).processes, None, 64 << 30)
    facts = model_facts(loaded.recipe.model, path=str(folder / "model"))
    plan = make_plan(loaded, facts, cluster, PromptLengths(PROMPT + shape.image, shape.image, shape.response))
    [update] = [phase for phase in plan.phases if phase.name == "update"]
    return update.total
