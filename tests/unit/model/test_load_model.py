"""What a loaded model is: no dropout, frozen parts, banned and stop ids, messages for what cannot be loaded."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
import torch

from vlmrl.errors import CheckpointError
from vlmrl.model.families import part_of
from vlmrl.model.load import banned_ids_of, load_model, load_processor, pick_device, stop_ids_of
from vlmrl.model.tiny import build_tiny
from vlmrl.recipe.schema import Model


def settings(folder, **changes) -> Model:
    return Model(path=str(folder), **({"dtype": "float32", "device": "cpu"} | changes))


def test_a_model_trained_with_dropout_is_loaded_without_any(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.5
    (folder / "config.json").write_text(json.dumps(config))
    model = load_model(settings(folder, gradient_checkpointing=True))
    assert not model.training
    rates = {getattr(m, "attention_dropout", 0.0) for m in model.modules()}
    assert rates == {0.0}
    assert all(m.p == 0.0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


@pytest.mark.parametrize("part", ["vision", "connector", "language", "embeddings"])
def test_a_frozen_part_has_no_gradient_and_the_others_have(tiny_folder, part):
    model = load_model(settings(tiny_folder, freeze=[part]))
    frozen = {part_of(n) for n, p in model.named_parameters() if not p.requires_grad}
    trained = {part_of(n) for n, p in model.named_parameters() if p.requires_grad}
    assert frozen == {part}
    assert trained == {"vision", "connector", "language", "embeddings"} - {part}


def test_every_parameter_belongs_to_a_part(frozen_tiny_model):
    assert all(part_of(name) for name, _ in frozen_tiny_model.named_parameters())


def test_image_video_and_padding_ids_are_banned_and_the_end_token_is_not(frozen_tiny_model, tiny_processor):
    tokenizer = tiny_processor.tokenizer
    banned = banned_ids_of(frozen_tiny_model, tokenizer)
    for name in ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|endoftext|>"):
        assert tokenizer.convert_tokens_to_ids(name) in banned
    assert stop_ids_of(frozen_tiny_model, tokenizer) == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert not set(banned) & set(stop_ids_of(frozen_tiny_model, tokenizer))


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "no_such_model"}'])
def test_a_folder_that_holds_no_model_is_a_clear_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="no model can be loaded") as caught:
        load_model(settings(tmp_path))
    assert caught.value.hint


def test_weights_that_are_cut_short_are_a_clear_error(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="no model can be loaded"):
        load_model(settings(folder))


def test_a_folder_without_a_processor_is_a_clear_error(tiny_folder, tmp_path):
    (tmp_path / "config.json").write_text((tiny_folder / "config.json").read_text())
    with pytest.raises(CheckpointError):
        load_processor(settings(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_is_a_clear_error():
    with pytest.raises(CheckpointError, match="no CUDA device"):
        pick_device("cuda")
    assert pick_device("auto").type == pick_device("cpu").type == "cpu"


def test_the_tiny_model_is_the_same_for_the_same_seed_and_leaves_the_random_state_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    a = build_tiny(tmp_path / "a", ["one two"], vocabulary=280, hidden=64, layers=1, vision_layers=1)
    assert torch.equal(torch.rand(3), expected)
    b = build_tiny(tmp_path / "b", ["one two"], vocabulary=280, hidden=64, layers=1, vision_layers=1)
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    c = build_tiny(tmp_path / "c", ["one two"], vocabulary=280, hidden=64, layers=1, vision_layers=1, seed=1)
    assert (a / "model.safetensors").read_bytes() != (c / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="not empty"):
        build_tiny(a, ["one two"])


def test_a_tiny_model_that_cannot_be_written_whole_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(CheckpointError, match=r"could not be written.*No space left"):
        build_tiny(tmp_path / "model", ["one two"], vocabulary=280, hidden=64, layers=1, vision_layers=1)
    assert list(tmp_path.iterdir()) == []
