"""Merging: a folder that anything loads, proven to be the trained model, or nothing at all."""

from __future__ import annotations

import copy
import errno
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_files import prove_items, save_checkpoint, seal
from safetensors import SafetensorError
from tinyworld import assert_close

from vlmrl.checkpoint import io
from vlmrl.checkpoint.merge import merge
from vlmrl.errors import CheckpointError
from vlmrl.model.policy import Policy
from vlmrl.store.checkpoints import HF, MODEL


@pytest.fixture(scope="module")
def model(_tiny_model):
    """Weights that no other folder holds."""
    made = copy.deepcopy(_tiny_model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return made


@pytest.fixture(scope="module")
def checkpoint_once(model, items, tiny_banned, tiny_processor, tmp_path_factory) -> Path:
    policy = Policy(model, temperature=0.7, banned_ids=tiny_banned)
    meta = {"dtype": "float32", "policy": {"temperature": 0.7, "banned_ids": list(tiny_banned)}}
    saved = io.CheckpointContent(12, meta, {}, prove_items(policy, items))
    return save_checkpoint(tmp_path_factory.mktemp("merge"), saved, model, tiny_processor, {})


@pytest.fixture
def checkpoint(checkpoint_once, tmp_path) -> Path:
    folder = tmp_path / "run" / checkpoint_once.name
    shutil.copytree(checkpoint_once, folder)
    return folder


def nothing_written(folder: Path) -> bool:
    return [p.name for p in folder.iterdir()] == ["run"]


def test_the_merged_folder_is_the_trained_model_for_anything_that_loads_it(checkpoint, model, tmp_path, items):
    from transformers import AutoModelForImageTextToText, AutoProcessor, GenerationConfig

    out = tmp_path / "deep" / "merged"
    merged = merge(checkpoint, out)
    assert (merged.folder, merged.step) == (out, 12)
    assert merged.logp_gap is not None and merged.logp_gap < 1e-4
    assert merged.bytes == sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    loaded = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    own = model.state_dict()
    assert all(torch.equal(v, own[k]) for k, v in loaded.state_dict().items())
    assert merged.parameters == sum(p.numel() for p in model.parameters())
    assert loaded.lm_head.weight.data_ptr() == loaded.model.language_model.embed_tokens.weight.data_ptr()
    assert GenerationConfig.from_pretrained(out).eos_token_id == model.generation_config.eos_token_id
    processor = AutoProcessor.from_pretrained(out)
    turn = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "same?"}]}]
    assert "<|image_pad|>" in processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    with torch.no_grad():
        ids = torch.tensor([items[0].prompt.ids])
        assert_close(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    # the training attention is ours; the folder must not ask anyone else for it
    assert "vlmrl" not in (out / "config.json").read_text()


def test_the_merged_folder_carries_the_processors_settings(checkpoint, tmp_path, tiny_processor):
    from transformers import AutoProcessor

    merge(checkpoint, tmp_path / "out")
    found = AutoProcessor.from_pretrained(tmp_path / "out").image_processor
    assert dict(found.size) == dict(tiny_processor.image_processor.size)


def test_merging_in_bfloat16_is_a_cast_and_says_its_gap(checkpoint, model, tmp_path):
    from transformers import AutoModelForImageTextToText

    own = copy.deepcopy(model.state_dict())
    merged = merge(checkpoint, tmp_path / "out", dtype="bfloat16")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(v, own[k].to(v.dtype)) for k, v in loaded.state_dict().items())
    assert merged.logp_gap is not None and merged.logp_gap > 0


def test_merge_refuses_a_folder_that_exists_and_leaves_it_alone(checkpoint, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="exists"):
        merge(checkpoint, out)
    assert [p.name for p in out.iterdir()] == ["precious"]
    merge(checkpoint, out, force=True)
    assert not (out / "precious").exists() and (out / "config.json").is_file()


@pytest.mark.parametrize(
    "name", [f"{MODEL}/model-00001-of-00001.safetensors", f"{HF}/config.json", "proof.safetensors"]
)
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(checkpoint, tmp_path, name):
    path = checkpoint / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="was changed"):
        merge(checkpoint, tmp_path / "out")
    assert nothing_written(tmp_path)


def test_an_incomplete_checkpoint_is_refused_and_nothing_is_written(checkpoint, tmp_path):
    (checkpoint / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="not complete"):
        merge(checkpoint, tmp_path / "out")
    assert nothing_written(tmp_path)


def test_a_model_that_is_not_the_proven_one_is_refused_and_nothing_is_written(checkpoint, tmp_path):
    """The weights are sound files, but not those whose log-probs were written down."""
    weights = checkpoint / MODEL / "model-00001-of-00001.safetensors"
    tensors = io.load_file(weights)
    tensors["model.language_model.norm.weight"] = tensors["model.language_model.norm.weight"] * 1.05
    io.save_file(tensors, weights)
    seal(checkpoint)
    with pytest.raises(CheckpointError, match="not the trained one"):
        merge(checkpoint, tmp_path / "out")
    assert nothing_written(tmp_path)


def test_a_place_that_cannot_be_written_is_an_error_in_words(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        merge(checkpoint, tmp_path / "file" / "out")
    assert "--out names another folder" in str(caught.value.hint) and "disk space" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("error", "start"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "choose another path"),
        (OSError(errno.EPERM, "Operation not permitted"), "choose another path"),
        (SafetensorError("I/O error: Permission denied (os error 13)"), "choose another path"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "free disk space"),
        (OSError(errno.ENOSPC, "No space left on device"), "free disk space"),
        (OSError("a library's own"), "free disk space"),
    ],
)
def test_the_hint_of_a_failed_write_is_that_of_its_cause(checkpoint, tmp_path, monkeypatch, error, start):
    def refuse(*args):
        raise error

    monkeypatch.setattr("vlmrl.checkpoint.merge._publish", refuse)
    with pytest.raises(CheckpointError, match="could not be written") as caught:
        merge(checkpoint, tmp_path / "out", skip_proof=True)
    assert str(caught.value.hint).startswith(start)
