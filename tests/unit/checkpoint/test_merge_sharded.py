"""A checkpoint that three processes wrote: merged to the bit, and refused when a shard is not what was saved."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import warm
from checkpoint_files import prove_items, save_checkpoint, seal
from processes import run_ranks

from vlmrl.checkpoint import io
from vlmrl.checkpoint.merge import merge
from vlmrl.errors import CheckpointError
from vlmrl.model.load import load_model
from vlmrl.model.policy import Policy
from vlmrl.recipe.schema import Model
from vlmrl.store.checkpoints import MODEL
from vlmrl.store.layout import MERGE_RECORD

SCRIPT = Path(__file__).parents[2] / "save_sharded.py"
RANKS = 3


@pytest.fixture(scope="module")
def parts(small_folder, tmp_path_factory) -> tuple[Path, Path]:
    """What three ranks saved at one step, and at another."""
    place = tmp_path_factory.mktemp("parts")
    first, other = place / "first", place / "other"
    run_ranks(RANKS, SCRIPT, small_folder, first, "1.05", other)
    for folder in (first, other):
        assert sorted(p.name for p in folder.glob("*.safetensors")) == [
            f"shard-{rank:05d}-model-00001-of-00001.safetensors" for rank in range(1, RANKS + 1)
        ]
    return first, other


@pytest.fixture(scope="module")
def whole(small_folder, tiny_processor, tiny_banned, items, tmp_path_factory) -> Path:
    """The same weights saved by one process."""
    model = load_model(Model(path=str(small_folder), dtype="float32", device="cpu"))
    meta = {"dtype": "float32", "policy": {"temperature": 0.7, "banned_ids": list(tiny_banned)}}
    proof = prove_items(Policy(model, temperature=0.7, banned_ids=tiny_banned), items)
    return save_checkpoint(
        tmp_path_factory.mktemp("whole"), io.CheckpointContent(5, meta, {}, proof), model, tiny_processor, {}
    )


@pytest.fixture
def sharded(whole, parts, tmp_path) -> Path:
    """The checkpoint of three processes."""
    checkpoint = tmp_path / "run" / "checkpoints" / whole.name
    shutil.copytree(whole, checkpoint)
    shutil.rmtree(checkpoint / MODEL)
    shutil.copytree(parts[0], checkpoint / MODEL)
    seal(checkpoint)
    return checkpoint


def shard(checkpoint: Path, rank: int) -> Path:
    return checkpoint / MODEL / f"shard-{rank:05d}-model-00001-of-00001.safetensors"


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def refused(checkpoint: Path, tmp_path: Path, told: str) -> CheckpointError:
    before = sorted(tmp_path.iterdir())
    with pytest.raises(CheckpointError, match=told) as caught:
        merge(checkpoint, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == before
    return caught.value


@pytest.mark.slow
def test_three_processes_shards_merge_to_the_bit_like_one_process(sharded, whole, tmp_path):
    one, three = merge(whole, tmp_path / "one"), merge(sharded, tmp_path / "three")
    for size in (None, "200KB"):
        if size is not None:
            one = merge(whole, tmp_path / "one", max_shard_size=size, force=True)
            three = merge(sharded, tmp_path / "three", max_shard_size=size, force=True)
        names = sorted(p.name for p in one.folder.iterdir())
        assert names == sorted(p.name for p in three.folder.iterdir())
        copies = [n for n in names if n not in (MERGE_RECORD, "README.md")]  # these name the folder
        assert [n for n in copies if digest(one.folder / n) != digest(three.folder / n)] == []
        assert (size is None) == ("model-00001-of-00001.safetensors" in names)
    assert three.logp_gap is not None and three.logp_gap < 1e-4 and three.whole is None


def test_the_merged_shards_are_the_model(sharded, small_folder, tmp_path):
    from transformers import AutoModelForImageTextToText

    merge(sharded, tmp_path / "out", max_shard_size="100KB")
    ours, own = (
        AutoModelForImageTextToText.from_pretrained(f, dtype=torch.float32) for f in (tmp_path / "out", small_folder)
    )
    assert all(torch.equal(v, own.state_dict()[k]) for k, v in ours.state_dict().items())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {p.name for p in files}


def test_a_shard_cut_short_is_named(sharded, tmp_path):
    path = shard(sharded, 2)
    path.write_bytes(path.read_bytes()[:-100])
    refused(sharded, tmp_path, rf"{path.name} was changed since it was saved")
    seal(sharded)  # even where the table was written for it
    refused(sharded, tmp_path, rf"{path.name} is cut short")


def test_a_shard_deleted_is_named(sharded, tmp_path):
    shard(sharded, 3).unlink()
    refused(sharded, tmp_path, r"shard-00003\S* is missing")
    seal(sharded)
    refused(sharded, tmp_path, r"has shape|do not form a whole tensor|a tensor of the model is missing")


def test_a_shard_of_another_step_is_named(sharded, parts, tmp_path):
    shutil.copyfile(parts[1] / shard(sharded, 1).name, shard(sharded, 1))
    refused(sharded, tmp_path, r"shard-00001\S* was changed since it was saved")
    seal(sharded)  # sound files that fit together, and the proof alone can tell
    refused(sharded, tmp_path, "not the trained one")


def test_a_shard_too_many_is_named(sharded, parts, tmp_path):
    extra = sharded / MODEL / "shard-00004-model-00001-of-00001.safetensors"
    shutil.copyfile(shard(sharded, 1), extra)
    refused(sharded, tmp_path, rf"{extra.name} does not belong")
    seal(sharded)
    refused(sharded, tmp_path, "do not form a whole tensor")


@pytest.mark.slow
def test_the_proof_runs_in_a_process_of_its_own(sharded, tmp_path, second_process):
    done = merge(sharded, tmp_path / "out")
    assert done.logp_gap is not None and done.logp_gap < 1e-4 and done.proof.rollouts == 4
    record = json.loads((tmp_path / "out" / MERGE_RECORD).read_text())
    assert record["proof"]["logp_gap"] == done.logp_gap and record["proof"]["limit"] == 1e-4
    assert record["proof"]["skipped"] is None and record["loaded_whole"] is None
    assert str(tmp_path) not in (tmp_path / "out" / MERGE_RECORD).read_text()


@pytest.mark.slow
def test_the_second_process_refuses_what_is_not_the_trained_model(sharded, parts, tmp_path, second_process):
    warm.prove_in_forks()
    shutil.rmtree(sharded / MODEL)
    shutil.copytree(parts[1], sharded / MODEL)
    seal(sharded)
    refused(sharded, tmp_path, "not the trained one")


def test_a_second_process_that_cannot_answer_is_told(sharded, tmp_path, second_process, monkeypatch):
    killed = tmp_path / "killed"
    killed.write_text("#!/bin/sh\nkill -9 $$\n")
    killed.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killed))
    assert "--skip-proof" in str(refused(sharded, tmp_path, "killed by signal 9").hint)
    killed.write_text("#!/bin/sh\necho no such library >&2\nexit 1\n")
    refused(sharded, tmp_path, "no such library")


def test_a_proof_that_was_skipped_is_recorded(sharded, tmp_path):
    done = merge(sharded, tmp_path / "out", skip_proof=True)
    assert done.logp_gap is None and done.proof.skipped == "--skip-proof"
    assert json.loads((tmp_path / "out" / MERGE_RECORD).read_text())["proof"]["skipped"] == "--skip-proof"


def test_a_checkpoint_without_rollouts_is_merged_unproven_and_says_so(sharded, tmp_path):
    io.save_file({}, sharded / "proof.safetensors")
    seal(sharded)
    done = merge(sharded, tmp_path / "out")
    assert done.logp_gap is None and "no log-probs" in str(done.proof.skipped)
    assert "no log-probs" in json.loads((tmp_path / "out" / MERGE_RECORD).read_text())["proof"]["skipped"]
