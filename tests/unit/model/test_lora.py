"""Adapters: where they go; that they change nothing at first; switched off, saved, loaded and folded."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from tinyfamilies import build
from tinyworld import two_groups

from vlmrl.errors import CheckpointError
from vlmrl.model.families import part_of
from vlmrl.model.load import checkpoint_gradients, load_model, read_model
from vlmrl.model.lora import (
    adapter_off,
    adapter_tensors,
    attach_adapter,
    fold_adapter,
    has_adapter,
    linear_names,
    load_adapter_tensors,
    load_peft_folder,
    read_adapter,
    target_names,
    trained_parts,
    write_adapter,
)
from vlmrl.model.packing import make_row
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Lora, Model
from vlmrl.train.learner import ReferencePolicy

KINDS = {"plain": {}, "rslora": {"rslora": True}, "dora": {"dora": True}, "vision": {"vision": True}}


@pytest.fixture(scope="module")
def row(tiny_encoder):
    return make_row(two_groups(tiny_encoder))


def filled(model, seed: int = 1):
    """Every adapter tensor moved away from where it starts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_" in name:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def logp(model, row, **options) -> torch.Tensor:
    with torch.no_grad():
        return Policy(model, **options)(row).logp


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_adapter_leaves_every_log_prob_as_it_was(tiny_model, row, kind):
    before = logp(tiny_model, row)
    attach_adapter(tiny_model, Lora(rank=4, **KINDS[kind]))
    assert torch.equal(logp(tiny_model, row), before)


@pytest.mark.parametrize("kind", KINDS)
def test_switched_off_the_model_is_its_base_to_the_bit_and_on_again_it_is_not(tiny_model, row, kind):
    before = logp(tiny_model, row)
    policy = Policy(filled(attach_adapter(tiny_model, Lora(rank=4, **KINDS[kind]))))
    with adapter_off(tiny_model):
        assert torch.equal(logp(tiny_model, row), before)
    assert torch.equal(ReferencePolicy(policy)(row).logp, before)
    after = logp(tiny_model, row)
    assert float((after - before).abs().max()) > 0.01
    assert all(p.requires_grad == (".lora_" in n) for n, p in tiny_model.named_parameters())


def test_the_reference_of_a_run_that_began_with_an_adapter_is_that_adapter(tiny_model, row):
    policy = Policy(filled(attach_adapter(tiny_model, Lora(rank=4))))
    first = {name: t.clone() for name, t in adapter_tensors(tiny_model).items()}
    expected = logp(tiny_model, row)
    reference = ReferencePolicy(policy, first)
    filled(tiny_model, seed=2)
    moved = logp(tiny_model, row)
    assert not torch.equal(moved, expected)
    assert torch.equal(reference(row).logp, expected)
    assert torch.equal(logp(tiny_model, row), moved)


def test_the_adapter_is_all_that_is_trained_and_sits_in_the_language_model_unless_asked(tiny_model):
    attach_adapter(copy.deepcopy(tiny_model), Lora(rank=4))
    language = attach_adapter(copy.deepcopy(tiny_model), Lora(rank=4))
    everywhere = attach_adapter(tiny_model, Lora(rank=4, vision=True))
    for model, parts in ((language, {"language"}), (everywhere, {"language", "vision", "connector"})):
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        assert trained and all(".lora_" in n for n in trained)
        assert {part_of(n) for n in trained} == parts


def test_the_start_up_line_names_every_part(tiny_model):
    assert str(trained_parts(tiny_model)).startswith("training vision ")
    found = trained_parts(attach_adapter(tiny_model, Lora(rank=4)))
    assert list(found.trained) == ["language adapter"]
    assert set(found.frozen) == {"vision", "connector", "embeddings", "language"}
    assert str(found).startswith("training language adapter 0.00819 M; frozen: vision ")


def test_targets_by_name_and_patterns_left_out(frozen_tiny_model):
    names = linear_names(frozen_tiny_model)
    found = target_names(names, Lora(rank=1, targets=["q_proj", "v_proj"], exclude=["*.layers.0.*"]))
    assert found == [f"model.language_model.layers.1.self_attn.{x}_proj" for x in "qv"]
    assert "lm_head" in names and not [n for n in target_names(names, Lora(rank=1, vision=True)) if "lm_head" in n]
    vision = target_names(names, Lora(rank=1, vision=True), ["language", "connector"])
    assert vision and {part_of(f"{n}.weight") for n in vision} == {"vision"}
    # a name ends at a dot: `proj` is a layer of the vision tower, not the end of every q_proj
    assert all("visual" in n for n in target_names(names, Lora(rank=1, vision=True, targets=["proj"])))


@pytest.mark.parametrize(
    ("table", "freeze", "told"),
    [
        ({"targets": ["q_prj"]}, [], "names `q_prj`"),
        ({"targets": ["qkv"]}, [], "names `qkv`"),  # in the vision tower alone
        ({"targets": ["lm_head"], "vision": True}, [], "names `lm_head`"),
        ({"exclude": ["*.layers.7.*"]}, [], r"`\*.layers.7.\*`, which matches no layer"),
        ({"exclude": ["*.layers.*"]}, [], "leaves no layer"),
        ({}, ["language"], "leaves no layer"),
    ],
)
def test_names_that_match_nothing_are_errors_that_name_what_is_there(frozen_tiny_model, table, freeze, told):
    with pytest.raises(CheckpointError, match=told) as caught:
        target_names(linear_names(frozen_tiny_model), Lora(rank=4, **table), freeze)
    assert caught.value.hint and ("linear layers here" in caught.value.hint or "full names" in caught.value.hint)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_loaded_by_peft_itself(tiny_folder, tiny_model, row, tmp_path, kind):
    from transformers import AutoModelForImageTextToText

    filled(attach_adapter(tiny_model, Lora(rank=4, **KINDS[kind])))
    write_adapter(tmp_path / "adapter", tiny_model, "models/tiny")
    assert sorted(p.name for p in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"], config["peft_type"]) == ("models/tiny", 4, "LORA")
    base = AutoModelForImageTextToText.from_pretrained(tiny_folder, dtype=torch.float32).eval()
    theirs = load_peft_folder(base, tmp_path / "adapter")
    gap = (logp(theirs, row, shared_prefix=False) - logp(tiny_model, row, shared_prefix=False)).abs().max()
    assert float(gap) < 1e-4


def test_the_files_do_not_depend_on_the_order_of_sets(tiny_model, tmp_path):
    attach_adapter(tiny_model, Lora(rank=4, vision=True))
    write_adapter(tmp_path, tiny_model, "x")
    listed = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert listed == sorted(listed)


def test_tensors_go_back_into_a_fresh_adapter_to_the_bit(tiny_model, tmp_path):
    other = attach_adapter(copy.deepcopy(tiny_model), Lora(rank=4, dora=True))
    filled(attach_adapter(tiny_model, Lora(rank=4, dora=True)))
    write_adapter(tmp_path, tiny_model, "x")
    load_adapter_tensors(other, read_adapter(tmp_path))
    own = tiny_model.state_dict()
    assert all(torch.equal(t, own[n]) for n, t in other.state_dict().items())


@pytest.mark.parametrize("lora", [Lora(rank=8), Lora(rank=4, targets=["q_proj"]), Lora(rank=4, dora=True)])
def test_tensors_of_another_adapter_are_refused(tiny_model, tmp_path, lora):
    other = attach_adapter(copy.deepcopy(tiny_model), lora)
    write_adapter(tmp_path, attach_adapter(tiny_model, Lora(rank=4)), "x")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_adapter_tensors(other, read_adapter(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_folded_in_the_model_is_plain_and_computes_the_same(tiny_model, row, kind):
    names = list(tiny_model.state_dict())
    filled(attach_adapter(tiny_model, Lora(rank=4, **KINDS[kind])))
    expected = logp(tiny_model, row)
    fold_adapter(tiny_model)
    assert not has_adapter(tiny_model) and list(tiny_model.state_dict()) == names
    assert not [n for n, _ in tiny_model.named_modules() if "lora" in n]
    assert float((logp(tiny_model, row) - expected).abs().max()) < 2e-4


def test_folding_follows_the_formula(tiny_model):
    """W + alpha / rank * B A, and alpha / sqrt(rank) with rslora."""
    for table, scale in (({"alpha": 8}, 2.0), ({"alpha": 8, "rslora": True}, 4.0)):
        model = filled(attach_adapter(copy.deepcopy(tiny_model), Lora(rank=4, **table)))
        layer = model.model.language_model.layers[1].mlp.down_proj
        weight, a, b = layer.base_layer.weight, layer.lora_A["default"].weight, layer.lora_B["default"].weight
        expected = (weight + scale * b @ a).detach().clone()
        fold_adapter(model)
        assert torch.allclose(model.model.language_model.layers[1].mlp.down_proj.weight, expected, atol=1e-6)


def test_folding_into_bfloat16_rounds_once(tiny_model):
    """In bfloat16 B A would be rounded before it is added; the sum is made in float32 instead."""
    model = filled(attach_adapter(tiny_model.to(torch.bfloat16), Lora(rank=4, alpha=4)))
    layer = model.model.language_model.layers[0].self_attn.q_proj
    parts = [
        p.detach().float() for p in (layer.base_layer.weight, layer.lora_B.default.weight, layer.lora_A.default.weight)
    ]
    expected = (parts[0] + parts[1] @ parts[2]).bfloat16()
    fold_adapter(model)
    folded = model.model.language_model.layers[0].self_attn.q_proj.weight
    assert folded.dtype == torch.bfloat16 and torch.equal(folded, expected)


def test_dropout_of_an_adapter_acts_on_gradients_only(tiny_model, row):
    attach_adapter(tiny_model, Lora(rank=4, dropout=0.5))
    policy = Policy(filled(tiny_model))
    with torch.no_grad():
        assert torch.equal(policy(row).logp, policy(row).logp)
    assert not torch.equal(policy(row).logp, policy(row).logp)


def test_freeze_of_a_part_the_model_lacks_is_an_error(tiny_folder, monkeypatch):
    monkeypatch.setattr("vlmrl.model.load.part_of", lambda name: "vision" if "visual" in name else "language")
    with pytest.raises(CheckpointError, match="names `connector`"):
        load_model(Model(path=str(tiny_folder), dtype="float32", device="cpu", freeze=["connector"]))


def test_4bit_without_bitsandbytes_is_an_error_in_words(tiny_folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(CheckpointError, match="needs bitsandbytes") as caught:
        load_model(Model(path=str(tiny_folder), dtype="bfloat16", device="cpu", quantize="4bit"))
    assert "pip install" in str(caught.value.hint)


def test_what_4bit_asks_of_transformers(tiny_folder, monkeypatch):
    """NF4, twice quantized, computing in the recipe's type; vision tower, connector and embeddings stay whole."""
    from transformers import AutoConfig

    from vlmrl.model.load import quantized_arguments

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: object())
    monkeypatch.setattr("transformers.BitsAndBytesConfig.post_init", lambda self: None)
    plain = AutoConfig.from_pretrained(tiny_folder)
    asked = quantized_arguments(Model(path=str(tiny_folder), dtype="bfloat16", device="cpu", quantize="4bit"), plain)
    config = asked["quantization_config"]
    assert (config.load_in_4bit, config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant) == (True, "nf4", True)
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    whole = set(config.llm_int8_skip_modules)
    assert {"lm_head", "model.visual.blocks.0.attn.qkv", "model.visual.merger.mlp.0"} <= whole
    assert not [n for n in whole if "language_model" in n]
    assert asked["device_map"] == {"": torch.device("cpu")}
    assert quantized_arguments(Model(path=str(tiny_folder)), plain) == {}


def test_4bit_for_real_where_bitsandbytes_is(small_folder, row, monkeypatch):
    """The language model's layers are quantized, no others; an adapter on them trains; at full width it is the same."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)  # packs weights for inference only
    settings = Model(path=str(small_folder), dtype="bfloat16", device="cpu", quantize="4bit")
    model = load_model(settings)
    quantized = [n for n, m in model.named_modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert quantized and all("language_model" in n for n in quantized)
    assert {n for n in linear_names(model) if "language_model" in n} == set(quantized)
    policy = Policy(filled(attach_adapter(model, Lora(rank=4), dtype=torch.bfloat16)))
    policy(row).logp.sum().backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained and all(p.dtype == torch.bfloat16 and bool(p.grad.any()) for p in trained)
    whole = attach_adapter(read_model(settings).dequantize(), Lora(rank=4), dtype=torch.bfloat16)
    load_adapter_tensors(whole, adapter_tensors(model))
    before = logp(model, row, shared_prefix=False)
    assert float((logp(fold_adapter(whole), row, shared_prefix=False) - before).abs().max()) < 0.1


def test_gradient_checkpointing_leaves_a_frozen_vision_tower_without_a_backward_pass():
    """transformers makes patches and embeddings ask for gradients when it is turned on; nobody needs those."""
    family = build("qwen2_5_vl")
    attach_adapter(family.model, Lora(rank=2))
    checkpoint_gradients(family.model)
    family.model.train()
    images, ids = family.picture(False, torch.Generator().manual_seed(0))
    assert not family.model.get_input_embeddings()(torch.tensor(ids)).requires_grad
    assert not family.model.model.get_image_features(**images).pooler_output[0].requires_grad
