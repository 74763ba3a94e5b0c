"""Runs that train an adapter: resumed, continued, evaluated and merged; the base model never changes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from command_line import this_process
from small_runs import assert_same_run, begin, go_on, make_place, train, train_in_parts, weights

from vlmrl.checkpoint import io
from vlmrl.errors import CheckpointError
from vlmrl.store.checkpoints import ADAPTER, MODEL
from vlmrl.store.runs import Run, open_run

pytestmark = pytest.mark.slow


RECIPE = """
model.gradient_checkpointing = true
model.freeze = []
lora.rank = 4
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 10}
train = {steps = 4, rows_per_step = 5, tokens_per_row = 400}
optim.lr = 1e-2
eval = {every_steps = 2, max_rows = 4}
checkpoint = {every_steps = 2, keep_last = 9}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("lora"), small_folder, RECIPE, kinds=("rl", "sft"))


@pytest.fixture(scope="module")
def unadapted(place) -> Path:
    """The same recipes without an adapter."""
    folder = place / "whole"
    folder.mkdir()
    for name in ("rl.toml", "sft.toml"):
        (folder / name).write_text((place / name).read_text().replace("lora.rank = 4\n", ""))
    return folder


@pytest.fixture(scope="module")
def parent(place) -> Run:
    """A supervised run with an adapter, in the runs folder that others continue from."""
    return train(place, place / "runs", kind="sft")


def assert_same_adapter_run(a: Run, b: Run) -> None:
    """The same run, and no whole model in its checkpoint."""
    folder = a.checkpoint_dirs()[-1]
    assert (folder / ADAPTER).is_dir() and not (folder / MODEL).exists()
    assert_same_run(a, b)


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize(
    "more", [(), ("lora.vision=true", "lora.dora=true", "train.steps=3")], ids=["language", "everywhere"]
)
def test_stopped_and_resumed_equals_uninterrupted(place, tmp_path, kind, more):
    whole = train(place, tmp_path / "a", *more, kind=kind)
    assert float(max(t.abs().max() for n, t in weights(whole).items() if "lora_B" in n)) > 1e-3
    assert_same_adapter_run(train_in_parts(place, tmp_path / "b", *more, kind=kind), whole)


def test_the_kl_reference_is_the_base_and_resumes(place, tmp_path):
    more = ("algo.kl_coef=0.1", "train.updates_per_step=2", "train.steps=3")
    whole = train(place, tmp_path / "a", *more)
    kl = [m["loss/kl"] for m in whole.metrics("train")]
    assert kl[-1] > kl[0] >= 0
    assert_same_adapter_run(train_in_parts(place, tmp_path / "b", *more), whole)


def test_in_bfloat16_the_masters_are_the_adapters_alone_and_the_reference_leaves_them_training(place, tmp_path):
    run = train(place, tmp_path, "model.dtype=bfloat16", "algo.kl_coef=0.1", "train.steps=2")
    tensors = io.load_optimizer_tensors(run.checkpoint_dirs()[-1])
    masters = [n for n in tensors if n.startswith("master.")]
    assert masters and all(".lora_" in n and tensors[n].dtype == torch.float32 for n in masters)
    assert all(t.dtype == torch.bfloat16 for t in weights(run).values())
    assert any(bool(t.any()) for n, t in weights(run).items() if "lora_B" in n)


def test_a_run_goes_on_from_an_adapter_whose_reference_it_then_is(place, parent, tmp_path):
    """`--set model.path=<run>`: base and adapter; the first KL is 0, since the reference is what the run began with."""
    more = (f"model.path={parent.id}", "algo.kl_coef=0.1", "train.steps=2")
    child = train(place, place / "runs", *more)
    assert child.metrics("train")[0]["loss/kl"] == pytest.approx(0.0, abs=1e-7)
    assert child.manifest.parent is not None and child.manifest.parent["run"] == parent.id
    meta = json.loads((child.checkpoint_dirs()[-1] / "meta.json").read_text())
    own = json.loads((parent.checkpoint_dirs()[-1] / "meta.json").read_text())
    assert meta["base"] == own["base"]  # one adapter on one base, not a chain
    assert_same_adapter_run(train_in_parts(place, place / "runs", *more), child)


def test_an_adapter_of_another_shape_cannot_go_on(place, parent):
    with pytest.raises(CheckpointError, match=r"`lora.rank` is 8, but the adapter of .* was made with 4") as caught:
        begin(place, place / "runs", f"model.path={parent.id}", "lora.rank=8")
    assert "vlmrl merge" in str(caught.value.hint)


def test_a_run_of_whole_weights_goes_on_from_base_and_adapter(place, unadapted, parent):
    child = train(unadapted, place / "runs", f"model.path={parent.id}", "train.steps=1", "optim.lr=1e-9")
    folder = child.checkpoint_dirs()[-1]
    assert (folder / MODEL).is_dir() and not (folder / ADAPTER).exists()
    last = parent.metrics("validation")[-1]["eval/metric"]
    assert child.metrics("validation")[0]["eval/metric"] == pytest.approx(last, abs=0.1)


def test_an_adapter_may_sit_on_the_checkpoint_of_a_run(place, unadapted, tmp_path):
    """Its base is then that checkpoint, found by the run's id, wherever the runs folder is."""
    whole = train(unadapted, tmp_path / "runs", "train.steps=1", kind="sft")
    base = whole.checkpoint_dirs()[-1]
    run, _ = begin(place, tmp_path / "runs", f"model.path={base}", "train.steps=2", stop_at=1)
    (tmp_path / "runs").rename(tmp_path / "moved")
    run, status = go_on(open_run(tmp_path / "moved", run.id))
    assert status == "done"
    done = this_process("merge", run.id, "--checkpoint", "last", "--runs", tmp_path / "moved", "--json", cwd=tmp_path)
    assert done.json["logp_gap"] < 1e-4


def test_the_run_below_an_adapter_is_found_in_the_folder_that_runs_names(place, unadapted, tmp_path):
    """`train --resume`, `eval` and `merge` find it there alike; without it they say that it was a run, and which."""
    whole = train(unadapted, tmp_path / "runs", "train.steps=1", kind="sft")
    run, _ = begin(place, tmp_path / "runs", f"model.path={whole.id}", "train.steps=2", stop_at=1)
    (tmp_path / "runs").rename(tmp_path / "moved")
    moved = tmp_path / "moved" / run.id
    (tmp_path / "bases").mkdir()
    (tmp_path / "moved" / whole.id).rename(tmp_path / "bases" / whole.id)
    merge, evaluate = ("merge", moved, "--checkpoint", "last"), ("eval", moved, "--checkpoint", "last")
    for words in (merge, (*evaluate, "--split", "validation"), ("train", "--resume", moved)):
        lost = this_process(*words, "--runs", tmp_path / "moved", cwd=place)
        assert lost.code == 2 and "hub" not in lost.err, lost.err
        assert f"of this adapter is step-000001 of run {whole.id}" in lost.err and "--runs DIR" in lost.err
        assert open_run(tmp_path / "moved", run.id).status == "interrupted", "a resume that trains nothing ends no run"
        done = this_process(*words, "--runs", tmp_path / "bases", cwd=place)
        assert done.code == 0, done.err
    copied = tmp_path / "copied" / run.id
    shutil.copytree(moved, copied)
    shutil.move(tmp_path / "bases", tmp_path / "runs")
    assert this_process("merge", copied, "--checkpoint", "last", "--force", cwd=tmp_path).code == 0, "in ./runs"


def test_such_a_run_is_evaluated_and_merged_both_ways(place, parent, tmp_path):
    runs = place / "runs"
    own = this_process("eval", parent.id, "--runs", runs, "--split", "validation", "--name", "v", "--json", cwd=place)
    scores = [own.json]
    for out, option in (("merged", []), ("adapter", ["--adapter"])):
        done = this_process("merge", parent.id, "--runs", runs, "--out", tmp_path / out, "--json", *option, cwd=place)
        assert done.json["logp_gap"] < 1e-4
    merged = this_process(
        "eval", tmp_path / "merged", "--recipe", "rl.toml", "--runs", runs, "--split", "validation", "--json", cwd=place
    )
    scores.append(merged.json)
    values = [json.dumps(s["evaluations"][0]["metrics"]["reward"]["value"]) for s in scores]
    assert float(values[0]) == pytest.approx(float(values[1]), abs=0.05)
    done = this_process("merge", parent.id, "--runs", runs, "--out", tmp_path / "adapter", "--adapter", cwd=place)
    assert done.code == 2 and "exists" in done.err
    done = this_process("eval", tmp_path / "adapter", "--recipe", "rl.toml", "--runs", runs, cwd=place)
    assert done.code == 2 and "holds an adapter without its base model" in done.err
    assert this_process("runs", "verify", parent.id, "--runs", runs, cwd=place).code == 0
    done = this_process(
        "try", "rl.toml", "--set", f"model.path={parent.id}", "--prompts", "2", "--runs", runs, cwd=place
    )
    assert done.code == 0, done.err


def test_dropout_of_a_supervised_adapter_resumes_and_ends_where_reinforcement_begins(place, tmp_path):
    whole = train(place, tmp_path / "a", "lora.dropout=0.5", kind="sft")
    run = train_in_parts(place, tmp_path / "b", "lora.dropout=0.5", kind="sft")
    assert_same_adapter_run(run, whole)
    child = train(place, tmp_path / "b", f"model.path={run.checkpoint_dirs()[-1]}", "train.steps=1")
    assert child.metrics("train")[0]["policy/sampler_gap_max"] < 1e-4


def test_on_4_bits_a_run_trains_resumes_and_is_merged_at_full_width(place, tmp_path, monkeypatch):
    pytest.importorskip("bitsandbytes")
    # On some CPUs it packs weights anew for inference, which cannot be trained through; on CUDA there is no such thing.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    more = ("model.quantize=4bit", "model.dtype=bfloat16", "optim.name=adamw_8bit", "algo.kl_coef=0.1", "train.steps=3")
    run = train_in_parts(place, tmp_path / "b", *more)
    assert_same_adapter_run(run, train(place, tmp_path / "a", *more))
    done = this_process("merge", run.id, "--checkpoint", "last", "--runs", tmp_path / "b", "--json", cwd=tmp_path)
    assert 0 < done.json["logp_gap"] < 0.1
    assert "quantization_config" not in (Path(done.json["folder"]) / "config.json").read_text()


def test_check_counts_the_adapter_and_train_too_names_what_is_wrong_before_a_run_begins(place, tmp_path):
    words = ("check", "rl.toml", "--runs", tmp_path, "--set", "rollout.max_new_tokens=40")
    sound = this_process(*words, "--json", cwd=place)
    plan = sound.json["plan"]
    assert plan["model"]["trained"] == 8192 and plan["memory"]["phases"][1]["parts"]["moments"] == 8 * 8192
    assert plan["disk"]["checkpoint_bytes"] == 12 * 8192
    for word, told in (
        ('lora.targets=["q_prj"]', "did you mean `q_proj`"),
        ('lora.exclude=["*.layers.9.*"]', "matches no layer"),
        ("lora.dropout=0.1", "would not be the one that sampled"),
        ('model.freeze=["language"]', "nothing is left to train"),
    ):
        for command in ("check", "train"):
            done = this_process(command, *words[1:], "--set", word, cwd=place)
            said = " ".join((done.out + done.err).split())
            assert done.code == 2 and told in said and "Traceback" not in said
    assert not list(tmp_path.iterdir()), "a run was begun"
