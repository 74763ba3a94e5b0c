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


def compare_paths(
    model: Any, processor: Any, items: list[Any], advantages: list[float], repeats: int = 2
) -> dict[str, Any]:
    """Forward and backward of one group: vlmrl's packed row against the stock model on each row alone (no padding, the
    best that packing without a shared prefix can do).

    Returns: the largest log-prob difference, the relative gradient difference over all parameters, the best time of
        each path, their ratio, the ratio of counted FLOPs, and the share of it that was reached.
    """
    import torch

    from vlmrl.data.batch import make_row
    from vlmrl.model.load import banned_ids_of
    from vlmrl.model.policy import Policy

    banned = banned_ids_of(model, processor.tokenizer)
    policy, row, weights = Policy(model, banned_ids=banned), make_row(items), torch.tensor(advantages)
    prompt = items[0].prompt

    def shared() -> Any:
        logp = policy(row).logp
        (logp * weights[torch.tensor(row.trajectories)[row.span_K]]).sum().backward()
        return logp.detach()

    def alone() -> Any:
        said = []
        for item, weight in zip(items, weights, strict=True):
            own = [t for s in item.segments for t in s.ids]
            ids, kinds = torch.tensor([[*prompt.ids, *own]]), torch.tensor([[*prompt.kinds, *[0] * len(own)]])
            inputs = {"input_ids": ids, "mm_token_type_ids": kinds, "use_cache": False, **prompt.images}
            scores = model(**inputs, logits_to_keep=len(own) + 1).logits[0, :-1].float()
            scores[:, list(banned)] = float("-inf")
            logp = torch.log_softmax(scores, -1).gather(-1, torch.tensor(own)[:, None])[:, 0]
            (logp * weight).sum().backward()
            said.append(logp.detach())
        return torch.cat(said)

    found: dict[str, tuple[Any, Any, list[float]]] = {}
    for name, path in (("alone", alone), ("shared", shared)) * repeats:
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        logp = path()
        seconds = [time.perf_counter() - start, *(found[name][2] if name in found else [])]
        found[name] = (logp, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]), seconds)
    (a, grad_a, alone_s), (b, grad_b, shared_s) = found["alone"], found["shared"]
    lengths = [sum(len(s.ids) for s in item.segments) for item in items]
    facts = {"prompt": len(prompt.ids), "responses": lengths, "images": prompt.num_images}
    flops = {k: training_flops(model.config, shared=k == "shared", **facts) for k in found}
    promised, reached = flops["alone"] / flops["shared"], min(alone_s) / min(shared_s)
    return {
        "logp_max_abs": float((a - b).abs().max()), "grad_rel": float((grad_a - grad_b).norm() / grad_a.norm()),
        "rows_alone_s": min(alone_s), "shared_s": min(shared_s), "ratio": reached, "flops_ratio": promised,
        "reached": reached / promised, "shared_gflops_per_s": flops["shared"] / min(shared_s) / 1e9,
        "alone_gflops_per_s": flops["alone"] / min(alone_s) / 1e9,
    }  # fmt: skip
