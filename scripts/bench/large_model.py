"""Model of several GB with random bfloat16 weights, Qwen2.5-VL-shaped, made tensor by tensor; for other scripts."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

SIZES = {"width": 2048, "inner": 11008, "vocabulary": 151_936}
SMOKE_SIZES = {"width": 128, "inner": 256, "vocabulary": 1200}


def write_config(folder: Path, gigabytes: float, width: int, inner: int, vocabulary: int) -> None:
    """Configuration and processor of a model of about this size in bfloat16."""
    from transformers import AutoConfig

    from vlmrl.model.tiny import build_tiny

    with tempfile.TemporaryDirectory(prefix="vlmrl-tiny-") as tiny:
        build_tiny(tiny, ["one two three"], vocabulary=300, hidden=128, layers=1)
        shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    layer_bytes = 2 * (2 * width * width + 2 * width * width // 8 + 3 * width * inner)
    layers = max(1, round((gigabytes * 1e9 - 2 * vocabulary * width) / layer_bytes))
    text.update(
        {
            "hidden_size": width,
            "intermediate_size": inner,
            "vocab_size": vocabulary,
            "num_hidden_layers": layers,
            "num_attention_heads": width // 128,
            "num_key_value_heads": min(2, width // 128),
            "layer_types": ["full_attention"] * layers,
        }
    )
    text.rope_parameters["mrope_section"] = [16, 24, 24]
    config.vision_config.out_hidden_size = width
    config.save_pretrained(folder)


def write_weights(hf: Path, folder: Path) -> None:
    """The weights of a configuration; at no time is more than one tensor in memory."""
    import torch

    from vlmrl.checkpoint.merge_weights import make_plan
    from vlmrl.model.safetensors_blocks import TensorSpec, write_shards

    plan = make_plan(hf, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def blocks(name: str) -> Iterator[torch.Tensor]:
        shape = plan.tensors[name].shape
        values = torch.ones(shape) if "norm" in name else 0.02 * torch.randn(shape, generator=generator)
        yield values.bfloat16()

    folder.mkdir(exist_ok=True)
    specs = [TensorSpec(n, torch.bfloat16, tuple(t.shape)) for n, t in plan.tensors.items()]
    write_shards(folder, specs, blocks, 10**9)
