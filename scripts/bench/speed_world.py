"""What the speed benchmarks share: a Qwen2.5-VL-shaped model of 43 M parameters with random weights, prompts with two
images, a reward that varies, and the comparison of the two ways to train on a group.
"""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

GRID = 28  # patches a side: 392 x 392 pixels, 196 image tokens
TEXT_WORDS = 108
PACKED_TOKENS = 4096
"""Tokens of a row."""
REWARD = """
import zlib


def score(x):
    return (zlib.crc32(x.response.encode()) % 1000) / 1000
"""


SMOKE_MODEL = {"hidden": 128, "layers": 1, "vision_hidden": 32, "vision_layers": 1, "texts": 200}
"""Arguments of `make_model` for a model that is made and trained in seconds."""


def make_words(count: int = 7000) -> list[str]:
    """Different words of two to four syllables."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(syllables, k=rng.choice((2, 3, 3, 4))))] = None
    return list(words)


def make_model(
    folder: Path,
    *,
    hidden: int = 512,
    layers: int = 8,
    vision_hidden: int = 256,
    vision_layers: int = 6,
    texts: int = 3000,
) -> Path:
    """Model and processor as an ordinary Hugging Face folder."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from vlmrl.model.tiny import build_tiny

    words = make_words()
    rng = random.Random(1)
    sentences = (" ".join(rng.choices(words, k=30)) for _ in range(texts))
    pixels = (14 * GRID) ** 2
    build_tiny(folder, sentences, vocabulary=8192, min_pixels=pixels, max_pixels=pixels)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= {
        "hidden_size": hidden,
        "intermediate_size": hidden * 4,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * layers,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0},
    }
    vision |= {
        "depth": vision_layers,
        "hidden_size": vision_hidden,
        "intermediate_size": vision_hidden * 4,
        "num_heads": 4,
        "out_hidden_size": hidden,
        "fullatt_block_indexes": [vision_layers - 1],
        "initializer_range": 0.02,
    }
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).float()
    model.save_pretrained(folder)
    return folder


def make_rows(folder: Path, count: int, *, words: int = TEXT_WORDS) -> Path:
    """rows.jsonl (problem, images), the images, and reward.py."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, rng = make_words(), random.Random(2)
    with (folder / "rows.jsonl").open("w") as file:
        for i in range(count):
            names = []
            for j in range(2):
                noise = np.random.default_rng(10 * i + j).integers(0, 255, (14 * GRID, 14 * GRID, 3), dtype=np.uint8)
                names.append(f"image-{i}-{j}.png")
                Image.fromarray(noise).save(folder / names[-1])
            text = " ".join(rng.choices(vocabulary, k=words))
            file.write(json.dumps({"problem": f"<image><image>{text}", "images": names, "answer": "0"}) + "\n")
    (folder / "reward.py").write_text(REWARD)
    return folder / "rows.jsonl"


def compare_paths(model: Any, processor: Any, items: list[Any], repeats: int = 2) -> dict[str, Any]:
    """Forward and backward of one group, two ways through the same code: with the prompt once for all its responses
    ("shared"), and packed without padding behind a prompt of its own each ("packed": what trainers that pack do).

    Their log-probs and gradients are compared as `vlmrl check --deep` does: with the stock model on each row alone.

    Returns: the largest log-prob difference, the relative gradient difference over all parameters, the best time of
        each way, their ratio, the ratio of counted FLOPs, and the share of it that was reached.
    """
    from flops import alone_work, shared_work, training_flops

    from vlmrl.evaluate.deep_check import relative_difference, shared_logps, stock_logps, take_gradients
    from vlmrl.model.load import banned_ids_of
    from vlmrl.model.policy import Policy

    policy, prompt = Policy(model, banned_ids=banned_ids_of(model, processor.tokenizer)), items[0].prompt
    lengths = [item.num_tokens for item in items]
    groups = {"packed": [replace(item, group=item.trajectory) for item in items], "shared": items}
    seconds: dict[str, list[float]] = {name: [] for name in groups}
    for name in ["shared", "packed"] * repeats + ["shared"]:
        start = time.perf_counter()
        shared_logps(policy, groups[name], PACKED_TOKENS)
        seconds[name].append(time.perf_counter() - start)
        take_gradients(policy)
    found = shared_logps(policy, items, PACKED_TOKENS), take_gradients(policy)
    stock = stock_logps(policy, items), take_gradients(policy)
    images = [(GRID, GRID)] * prompt.num_images
    flops = {
        name: training_flops(model, work(len(prompt.ids), lengths, images)).total
        for name, work in (("packed", alone_work), ("shared", shared_work))
    }
    best = {name: min(times) for name, times in seconds.items()}
    promised, ratio = flops["packed"] / flops["shared"], best["packed"] / best["shared"]
    return {
        "logp_max_abs": max(float((found[0][k] - stock[0][k]).abs().max()) for k in stock[0]),
        "grad_rel": relative_difference(found[1], stock[1]),
        "packed_s": best["packed"],
        "shared_s": best["shared"],
        "ratio": ratio,
        "flops_ratio": promised,
        "reached": ratio / promised,
        **{f"{name}_gflops_per_s": flops[name] / best[name] / 1e9 for name in groups},
    }
