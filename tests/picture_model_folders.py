"""Folders with tiny models that look at pictures, in the format of the released ones."""

from __future__ import annotations

from pathlib import Path

import torch


def tiny_models(folder: Path) -> dict[str, str]:
    """Return measure -> folder of a tiny model, in the format of the published one."""
    from transformers import (
        BitImageProcessor,
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        Dinov2Config,
        Dinov2Model,
        SiglipConfig,
        SiglipImageProcessor,
        SiglipModel,
    )

    side = {"height": 32, "width": 32}
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen = {**small, "image_size": 32, "patch_size": 8}
    torch.manual_seed(5)
    kinds = {
        "clip": (CLIPModel(CLIPConfig(text_config={**small, "vocab_size": 9}, vision_config=seen, projection_dim=8)),
                 CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=side)),
        "dino": (Dinov2Model(Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32,
                                          patch_size=8)),
                 BitImageProcessor(size={"shortest_edge": 32}, crop_size=side)),
        "siglip": (SiglipModel(SiglipConfig(text_config={**small, "vocab_size": 9}, vision_config=seen)),
                   SiglipImageProcessor(size=side)),
    }  # fmt: skip
    for name, (model, processor) in kinds.items():
        model.save_pretrained(folder / name)
        processor.save_pretrained(folder / name)
    return {name: str(folder / name) for name in kinds}
