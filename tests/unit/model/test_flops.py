"""FLOPs by formula against torch's own counter, operation by operation, and by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import world
from tinyfamilies import build
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import Qwen2_5_VLConfig
from transformers.vision_utils import get_vision_window_index

from vlmrl.model.load import share_prefix
from vlmrl.model.lora import attach_adapter
from vlmrl.model.packing import make_row, plan_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts" / "bench"))

import flops as formula
from flops import PassWork, alone_work, forked_work, padded_work, shared_work, training_flops

aten = torch.ops.aten
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *a, **kw: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda g, q, k, v, *a, **kw: sdpa_backward_flop_count(
        g, q, k, v
    ),
}
"""The counter knows SDPA's kernels for GPUs only."""


def counted(run: Any) -> dict[str, int]:
    """FLOPs by operation."""
    with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
        run()
    found = counter.get_flop_counts()["Global"]
    return {str(name).removeprefix("aten."): int(n) for name, n in found.items()}


def test_spans_tokens_and_pairs_by_hand():
    """Prompt of 10, responses of 3 and 2. Shared: 55 + (11 + 12 + 13) + (11 + 12); alone: 13 * 14 / 2 + 12 * 13 / 2."""
    shared, alone, padded = (w(10, [3, 2], [(4, 6)]) for w in (shared_work, alone_work, padded_work))
    assert (shared.tokens, shared.pairs, shared.patches, shared.targets) == (15, 114, 24, 5)
    assert (alone.tokens, alone.pairs, alone.patches, alone.targets) == (25, 169, 48, 5)
    assert (padded.tokens, padded.pairs, padded.patches, padded.targets) == (26, 182, 48, 6)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_a_training_pass_counts_what_the_formula_says(name, adapter):
    """Left out of the comparison, each for its reason: the head's one extra row, which asks for the vocabulary's size;
    the delta rule's short convolution, of which torch counts the padding, and its triangular solves, which it does not
    count. SDPA computes pairs that its mask takes away, and scores a second time in the backward pass: its operations
    are compared with the rectangles that it was given."""
    family = build(name)
    model = family.model
    share_prefix(model)
    if adapter:
        attach_adapter(model, Lora(rank=4))
    items = [i for i in world(family) if i.group == 0]
    row = make_row(items)
    policy = Policy(model)
    policy(row)  # positions are kept from here on
    ops = counted(lambda: policy(row).logp.sum().backward())

    grids = [tuple(g[1:].tolist()) for g in row.images["image_grid_thw"]]
    prompt, lengths = len(items[0].prompt.ids), [i.num_tokens for i in items]
    hybrid = name == "qwen3_5"
    work = (forked_work if hybrid else shared_work)(prompt, lengths, grids)
    flops = training_flops(model, work)
    passes = 1 if adapter else 2  # of the patch embedding, whose input needs no gradient
    patch = passes * 2 * model.model.visual.patch_embed.proj.weight.numel() * work.patches
    short = sum(2 * m.weight.numel() * work.tokens for m in model.modules() if isinstance(m, torch.nn.Conv1d))
    dense = sum(flops.forward[p] + flops.backward[p] for p in ("vision", "connector", "language", "embeddings"))
    text = model.config.get_text_config()
    asked = 2 * text.hidden_size * text.vocab_size
    assert ops["mm"] + ops["addmm"] == dense - patch - short * (2 if adapter else 3) + asked
    if not hybrid:
        assert ops["convolution"] + ops.get("convolution_backward", 0) == patch

    heads, full = text.num_attention_heads * text.head_dim, 1 if hybrid else text.num_hidden_layers
    responses = [(n, n) for n in lengths] + [(sum(lengths), prompt)]  # each to itself, all together to the prompt
    seen = [(n, n + before) for n, before in work.spans] if hybrid else [(prompt, prompt), *responses]
    rectangles = 4 * heads * full * sum(a * b for a, b in seen)
    vision = flops.forward["vision attention"]
    assert ops["_scaled_dot_product_flash_attention_for_cpu"] == rectangles + vision
    backward = rectangles + (0 if adapter else vision)
    assert ops["_scaled_dot_product_flash_attention_for_cpu_backward"] == 2.5 * backward

    scores = 4 * heads * full * work.pairs
    if not hybrid:
        assert flops.forward["attention"] == scores and flops.backward["attention"] == 2 * scores
        return
    C, K, V = 64, text.linear_key_head_dim, text.linear_value_head_dim
    each = 2 * text.linear_num_value_heads  # two layers
    solves = each * sum(-(-n // C) for n, _ in work.spans) * C * C * (K + V)
    products = flops.forward["attention"] - scores - solves
    # A solve's backward pass has a product, of whose result the lower half counts. No gradient: the prompt's first
    # state, which is zero, and the last state of each response.
    unneeded = each * len(work.spans) * 4 * C * K * V
    assert ops["bmm"] == 3 * products + 2 * solves - unneeded
    assert flops.backward["attention"] == 2 * flops.forward["attention"]


def test_pairs_of_a_shared_row_are_those_of_its_mask():
    layout = make_row([i for i in world(build("internvl")) if i.group == 0]).layout
    tokens = plan_row(layout, torch.device("cpu")).tokens
    at = torch.arange(layout[-1].end)
    lengths = [s.end - s.start for s in layout]
    assert int(tokens.sees(at[:, None], at[None], None, False).sum()) == shared_work(lengths[0], lengths[1:]).pairs


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (16, 20), (10, 6), (58, 58)])
def test_pairs_of_vision_windows_are_those_of_transformers(rows, columns):
    """Windows of 112 pixels, 8 by 8 patches; those at the edges are smaller."""
    vision = Qwen2_5_VLConfig().vision_config
    grid = torch.tensor([[1, rows, columns]])
    _, starts = get_vision_window_index(
        grid, spatial_merge_size=2, window_size=vision.window_size, patch_size=vision.patch_size
    )
    windowed = int(starts.unique().diff().square().sum())
    work = PassWork((), ((rows, columns),))
    full = len(vision.fullatt_block_indexes)
    expected = 4 * vision.hidden_size * (full * (rows * columns) ** 2 + (vision.depth - full) * windowed)
    assert formula._vision_attention(vision, work) == expected


def test_a_sliding_window_is_refused():
    with pytest.raises(ValueError, match="sliding_attention"):
        list(formula._text_mixing(build("gemma3").model.config.get_text_config(), PassWork(((3, 0),))))
