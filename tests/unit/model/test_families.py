"""Families: which path, which head, which part; from the model's configuration alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tinyfamilies import build
from tinyworld import saved_bytes

from vlmrl.errors import CheckpointError
from vlmrl.model.caches import batches_of_similar_length
from vlmrl.model.families import family_of, head_of
from vlmrl.model.load import checkpoint_gradients, share_prefix
from vlmrl.model.packing import make_row
from vlmrl.model.policy import Policy


def fake(model_type: str, projection=None, **text) -> SimpleNamespace:
    config = SimpleNamespace(model_type=model_type, get_text_config=lambda: SimpleNamespace(**text))
    return SimpleNamespace(config=config, get_output_embeddings=lambda: projection)


@pytest.mark.parametrize(
    ("model_type", "layers", "sharing"),
    [
        ("qwen3_5", ["linear_attention", "full_attention"], "forked"),
        ("minicpmv4_6", ["full_attention"], "packed"),  # a text model without linear attention
        ("internvl", ["linear_attention", "full_attention"], "padded"),  # a hybrid text model in a packed family
        ("internvl", ["chunked_attention"], "padded"),
        ("gemma3", ["sliding_attention", "full_attention"], "packed"),
        ("something_new", ["full_attention"], "padded"),
    ],
)
def test_the_path_follows_the_layers(model_type, layers, sharing):
    assert family_of(fake(model_type, layer_types=layers)).sharing == sharing


def test_gemma4_has_two_way_images_in_some_sizes_only():
    layers = ["sliding_attention", "full_attention"]
    assert (
        family_of(fake("gemma4", layer_types=layers, use_bidirectional_attention="vision")).bidirectional == "sliding"
    )
    assert family_of(fake("gemma4", layer_types=layers, use_bidirectional_attention=None)).bidirectional == "never"


def test_heads_by_hand():
    linear = torch.nn.Linear(1, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[2.0], [-4.0]]))
        linear.bias.copy_(torch.tensor([1.0, 0.0]))
    hidden = torch.tensor([[3.0]])  # logits with the bias: 7, -12
    assert head_of(fake("qwen2_vl", linear))(hidden).tolist() == [[7.0, -12.0]]
    capped = head_of(fake("gemma4", linear, final_logit_softcapping=10.0))(hidden)
    assert capped[0].tolist() == pytest.approx([6.043678, -8.336546])  # 10 tanh(0.7), 10 tanh(-1.2)
    assert head_of(fake("gemma4", linear, final_logit_softcapping=None))(hidden).tolist() == [[7.0, -12.0]]
    # Gemma 3 has the number in its configuration, and its image-text-to-text model does not use it.
    assert head_of(fake("gemma3", linear, final_logit_softcapping=10.0))(hidden).tolist() == [[7.0, -12.0]]
    assert head_of(fake("cohere_compass", linear, logit_scale=0.5))(hidden).tolist() == [[3.5, -6.0]]
    assert head_of(fake("granite4_vision", linear, logits_scaling=2.0))(hidden).tolist() == [[3.5, -6.0]]
    with pytest.raises(CheckpointError, match="no output embedding"):
        head_of(fake("qwen2_vl"))


def test_padding_of_forked_responses_at_most_doubles_them():
    lengths = [5, 100, 49, 51, 1, 2, 0, 3]
    batches = batches_of_similar_length(lengths)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert [[lengths[i] for i in batch] for batch in batches] == [[100, 51], [49], [5, 3], [2, 1], [0]]


@pytest.mark.parametrize("name", ["qwen3_5", "gemma4", "qwen3_vl"])
def test_gradient_checkpointing_keeps_less(name):
    from parity import world

    kept = []
    for recompute in (False, True, "vision"):
        family = build(name)
        share_prefix(family.model)
        checkpoint_gradients(family.model, recompute)
        kept.append(saved_bytes(Policy(family.model), make_row(world(family))))
    assert kept[1] < 0.5 * kept[0], kept
    assert kept[1] < kept[2] < kept[0], kept
