"""What the speed benchmarks share: a Qwen2.5-VL-shaped model of 43 M parameters with random weights, prompts with two
images, a reward that varies, and the FLOPs of a training pass by formula.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

GRID = 28  # patches a side: 392 x 392 pixels, 196 image tokens
TEXT_WORDS = 108
REWARD = """
import zlib


def score(x):
    return (zlib.crc32(x.response.encode()) % 1000) / 1000
"""


def make_words(count: int = 7000) -> list[str]:
    """Different words of two to four syllables."""
    rng = random.Random(0)
    syllables = [a + b for a in "bdfgklmnprstvz" for b in "aeiou"]
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(syllables, k=rng.choice((2, 3, 3, 4))))] = None
    return list(words)


def make_model(
    folder: Path, *, hidden: int = 512, layers: int = 8, vision_hidden: int = 256, vision_layers: int = 6
) -> Path:
    """Model and processor as an ordinary Hugging Face folder."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    from vlmrl.model.tiny import build_tiny

    words = make_words()
    rng = random.Random(1)
    texts = (" ".join(rng.choices(words, k=30)) for _ in range(3000))
    pixels = (14 * GRID) ** 2
    build_tiny(folder, texts, vocabulary=8192, min_pixels=pixels, max_pixels=pixels)
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    text |= {
        "hidden_size": hidden, "intermediate_size": hidden * 4, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2, "initializer_range": 0.02, "layer_types": ["full_attention"] * layers,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0},
    }  # fmt: skip
    vision |= {
        "depth": vision_layers, "hidden_size": vision_hidden, "intermediate_size": vision_hidden * 4, "num_heads": 4,
        "out_hidden_size": hidden, "fullatt_block_indexes": [vision_layers - 1], "initializer_range": 0.02,
    }  # fmt: skip
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


def forward_flops(config: Any, spans: list[tuple[int, int]], images: int, targets: int) -> float:
    """Multiply-adds x 2 of one forward pass, by formula.

    Args:
        config: of the model.
        spans: (tokens, tokens seen before them) of each causal piece that is computed.
        images: through the vision tower. targets: positions that go through the head.
    """
    t, v = config.get_text_config(), config.vision_config
    width = t.hidden_size // t.num_attention_heads
    layer = 2 * t.hidden_size * (t.num_attention_heads + t.num_key_value_heads) * width
    layer += 3 * t.hidden_size * t.intermediate_size
    tokens = sum(n for n, _ in spans)
    seen = sum(n * before + n * (n + 1) / 2 for n, before in spans)
    language = t.num_hidden_layers * (2 * layer * tokens + 4 * t.num_attention_heads * width * seen)
    patches = GRID * GRID
    window = (v.window_size // v.patch_size) ** 2
    block = 4 * v.hidden_size**2 + 3 * v.hidden_size * v.intermediate_size
    full = len(v.fullatt_block_indexes)
    attended = full * patches + (v.depth - full) * window
    merged = v.hidden_size * v.spatial_merge_size**2
    vision = images * (
        2 * block * patches * v.depth + 4 * v.hidden_size * patches * attended
        + 2 * patches * v.hidden_size * 3 * v.temporal_patch_size * v.patch_size**2
        + 2 * (patches / v.spatial_merge_size**2) * merged * (merged + v.out_hidden_size)
    )  # fmt: skip
    return language + vision + 2.0 * targets * t.hidden_size * t.vocab_size


def training_flops(config: Any, *, prompt: int, responses: list[int], images: int, shared: bool) -> float:
    """FLOPs of forward and backward (twice the forward) over one group, the prompt computed once or once a response."""
    if shared:
        spans, seen = [(prompt, 0), *((n, prompt) for n in responses)], images
    else:
        spans, seen = [(prompt + n, 0) for n in responses], images * len(responses)
    return 3 * forward_flops(config, spans, seen, sum(responses))


def compare_paths(model: Any, processor: Any, items: list[Any], repeats: int = 2) -> dict[str, Any]:
    """Forward and backward of one group: vlmrl's packed row against the stock model on each row alone (no padding, the
    best that packing without a shared prefix can do), by the same code as `vlmrl check --deep`.

    Returns: the largest log-prob difference, the relative gradient difference over all parameters, the best time of
        each path, their ratio, the ratio of counted FLOPs, and the share of it that was reached.
    """
    from vlmrl.model.load import banned_ids_of
    from vlmrl.model.policy import Policy
    from vlmrl.train.parity import relative_difference, shared_logps, stock_logps, take_gradients

    policy, prompt = Policy(model, banned_ids=banned_ids_of(model, processor.tokenizer)), items[0].prompt
    lengths = [item.num_tokens for item in items]
    whole_row = len(prompt.ids) + sum(lengths)
    paths = {"alone": lambda: stock_logps(policy, items), "shared": lambda: shared_logps(policy, items, whole_row)}
    said, gradients, seconds = {}, {}, {name: [] for name in paths}
    for name in [*paths] * repeats:
        start = time.perf_counter()
        said[name] = paths[name]()
        seconds[name].append(time.perf_counter() - start)
        gradients[name] = take_gradients(policy)
    facts = {"prompt": len(prompt.ids), "responses": lengths, "images": prompt.num_images}
    flops = {name: training_flops(model.config, shared=name == "shared", **facts) for name in paths}
    best = {name: min(times) for name, times in seconds.items()}
    promised, reached = flops["alone"] / flops["shared"], best["alone"] / best["shared"]
    return {
        "logp_max_abs": max(float((said["shared"][k] - said["alone"][k]).abs().max()) for k in said["alone"]),
        "grad_rel": relative_difference(gradients["shared"], gradients["alone"]),
        "rows_alone_s": best["alone"], "shared_s": best["shared"], "ratio": reached, "flops_ratio": promised,
        "reached": reached / promised,
        **{f"{name}_gflops_per_s": flops[name] / best[name] / 1e9 for name in paths},
    }  # fmt: skip
