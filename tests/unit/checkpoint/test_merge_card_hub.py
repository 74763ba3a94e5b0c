"""The model card says what the record holds; the upload is private unless asked otherwise."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_files import prove_items, save_checkpoint, write_meta
from hub_server import TOKEN, serve_hub

from vlmrl.checkpoint import io
from vlmrl.checkpoint.merge import CARD, merge, model_card, tool_options
from vlmrl.checkpoint.proof import Proof
from vlmrl.model.policy import Policy
from vlmrl.store.layout import MERGE_RECORD, RESOLVED
from vlmrl.store.manifest import update_manifest
from vlmrl.store.runs import create_run

PROVEN = Proof(3.2e-6, 40, 8, 1e-4)
META = {
    "kind": "rl",
    "dtype": "float32",
    "policy": {"temperature": 0.7, "banned_ids": []},
    "base": {"path": "org/base-3B", "revision": "abc123", "fingerprint": "f"},
}


def evaluation(run_dir: Path, name: str, step: int, metrics: dict, during: bool = False) -> None:
    folder = run_dir / "eval" / name
    folder.mkdir(parents=True)
    meta = {"step": step, "during": "training"} if during else {"step": step, "source": "digits", "split": "test"}
    (folder / "summary.json").write_text(json.dumps({"schema": 1, "meta": meta, "metrics": metrics}))


@pytest.fixture
def checkpoint(tmp_path, frozen_tiny_model, tiny_processor, tiny_banned, items) -> Path:
    datasets = [
        {
            "name": "digits",
            "path": str(tmp_path / "data"),
            "task": "digits",
            "split": "train",
            "rows": 900,
            "fingerprint": "0123456789abcdef",
        }
    ]
    recipe = {
        "kind": "rl",
        "algo": {"name": "dapo"},
        "train": {"steps": 50, "seed": 3},
        "optim": {"lr": 1e-6},
        "rollout": {"prompts_per_step": 32, "samples_per_prompt": 8, "temperature": 1.0},
    }
    run = create_run(
        tmp_path / "runs",
        kind="rl",
        recipe_name="digits_im",
        recipe_text="x = 1",
        resolved={"recipe": recipe},
        name="im",
        datasets=datasets,
        rewards=[{"source": "digits", "name": "same | digit", "sha256": "beef" * 16}],
        labels=["validated on the test split"],
    )
    proof = prove_items(Policy(frozen_tiny_model, temperature=0.7, banned_ids=tiny_banned), items)
    meta = META | {"policy": {"temperature": 0.7, "banned_ids": list(tiny_banned)}}
    folder = save_checkpoint(run.dir, io.CheckpointContent(50, meta, {}, proof), frozen_tiny_model, tiny_processor, {})
    run.finish()
    return folder


def test_the_card_says_where_the_weights_come_from_and_how_good_they_are(checkpoint, tmp_path):
    run_dir = checkpoint.parent.parent
    accuracy = {"value": 0.913, "low": 0.89, "high": 0.934, "n": 600}
    evaluation(run_dir, "test-50", 50, {"accuracy": accuracy, "part/format": accuracy, "auc": accuracy | {"low": None}})
    evaluation(run_dir, "test-10", 10, {"accuracy": {"value": 0.5, "low": 0.4, "high": 0.6, "n": 600}})
    evaluation(run_dir, "validation-50", 50, {"reward": accuracy}, during=True)
    card = model_card(checkpoint, PROVEN, adapter=False, name="org/im")
    head = card.split("---\n")[1].splitlines()
    assert head[:3] == ["library_name: transformers", "pipeline_tag: image-text-to-text", "base_model: org/base-3B"]
    assert head[3:] == ["tags:", "- vlmrl", "- dapo"]
    for told in (
        "# im, step 50",
        "| base model | org/base-3B (revision abc123) |",
        f"| run | {run_dir.name} |",
        "dapo, 32 prompts x 8 samples per step, temperature 1.0, 50 steps planned, seed 3, learning rate 1e-06",
        "digits: task digits, split train, 900 rows, fingerprint 0123456789ab",
        r"digits: same \| digit source beefbeefbeef",
        "| note | validated on the test split |",
        "| test-50 | digits/test | accuracy | 0.913 | [0.89, 0.934] | 600 |",
        "| validation-50 | validation in training | reward | 0.913 | [0.89, 0.934] | 600 |",
        "| test-50 | digits/test | auc | 0.913 |  | 600 |",
        "difference 3.2e-06 nats over 40 tokens of 8 rollouts",
        "vllm serve org/im",
    ):
        assert told in card, told
    assert "0.5" not in card.split("## Evaluation")[1].split("## Proof")[0]  # another step's
    assert "part/format" not in card and str(tmp_path) not in card


def test_the_card_names_the_tools_and_serves_them(checkpoint):
    run_dir = checkpoint.parent.parent
    assert tool_options(checkpoint) == "" and "tools" not in model_card(checkpoint, PROVEN, adapter=False, name="o")
    resolved = json.loads((run_dir / RESOLVED).read_text())
    resolved["recipe"]["environment"] = {"name": "shop.py:Shop", "calls": "auto"}
    (run_dir / RESOLVED).write_text(json.dumps(resolved))
    tools = {"": [{"type": "function", "function": {"name": name}} for name in ("price", "zoom")]}
    record = {"name": "Shop", "sha256": "feed" * 16, "args": {}, "tools": tools}
    prompts = ({"source": "digits", "sha256": "", "environment": record},)
    update_manifest(run_dir, lambda manifest: replace(manifest, prompts=prompts))
    for adapter in (False, True):
        card = model_card(checkpoint, PROVEN, adapter=adapter, name="org/im")
        assert "| tools | digits: environment Shop (sha256 feedfeedfeed) with price, zoom |" in card
        assert "--enable-auto-tool-choice --tool-call-parser hermes\n" in card and "run the calls" in card
    (checkpoint / "hf" / "chat_template.jinja").write_text("<function=a><parameter=b>")
    assert tool_options(checkpoint).endswith("--tool-call-parser qwen3_xml")


def test_the_card_claims_nothing_that_is_not_known(checkpoint, tmp_path):
    card = model_card(checkpoint, Proof(None, skipped="--skip-proof"), adapter=True, name="out")
    assert "This checkpoint was not evaluated." in card and "Not proven: --skip-proof." in card
    assert "library_name: peft" in card and "--enable-lora --lora-modules trained=out" in card
    assert "vllm serve org/base-3B --enable-lora" in card
    damaged = checkpoint.parent.parent / "eval" / "test" / "summary.json"
    damaged.parent.mkdir(parents=True)
    damaged.write_text("{")
    assert "its summary is damaged" in model_card(checkpoint, PROVEN, adapter=False, name="out")
    away = tmp_path / "elsewhere" / "checkpoints" / "step-000050"
    away.parent.mkdir(parents=True)
    checkpoint.rename(away)
    assert "moved out of its run" in model_card(away, PROVEN, adapter=False, name="out")


def test_a_base_that_is_a_folder_is_named_without_the_machines_paths(checkpoint, tmp_path):
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["base"]["path"] = str(tmp_path / "models" / "tiny")
    write_meta(checkpoint, meta)
    card = model_card(checkpoint, PROVEN, adapter=False, name="out")
    assert "| base model | tiny (a local folder) (revision abc123) |" in card and "base_model:" not in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize("is_merged", [False, True])
def test_the_base_is_that_of_the_first_run_behind_the_weights(checkpoint, tmp_path, is_merged):
    """An earlier run trained `org/first`; this one began with its checkpoint, or with the model merged from it."""
    earlier = create_run(
        tmp_path / "runs", kind="sft", recipe_name="sft", resolved={"recipe": {"model": {"path": "org/first"}}}
    )
    run_dir, folder = checkpoint.parent.parent, tmp_path / "merged"
    if is_merged:
        folder.mkdir()
        (folder / MERGE_RECORD).write_text(json.dumps({"run": earlier.id}))
        resolved = json.loads((run_dir / "resolved.json").read_text())
        resolved["recipe"]["model"] = {"path": str(folder)}
        (run_dir / "resolved.json").write_text(json.dumps(resolved))
    else:
        update_manifest(run_dir, lambda m: replace(m, parent={"run": earlier.id, "checkpoint": "step-000004"}))
    card = model_card(checkpoint, PROVEN, adapter=False, name="out")
    assert "| base model | org/first |" in card and "base_model: org/first" in card and "trained from org/first" in card
    earlier.finish()
    shutil.rmtree(earlier.dir)
    card = model_card(checkpoint, PROVEN, adapter=False, name="out")
    assert f"| base model | run {earlier.id} |" in card and "base_model:" not in card and str(tmp_path) not in card


def test_the_commands_of_an_adapters_card_name_a_base_model_that_is_there(checkpoint, tmp_path):
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["base"]["path"] = "models/tiny folder"
    write_meta(checkpoint, meta)
    card = model_card(checkpoint, PROVEN, adapter=True, name="out", base_path="models/tiny folder")
    assert "vllm serve 'models/tiny folder' --enable-lora" in card
    assert 'AutoModelForImageTextToText.from_pretrained("models/tiny folder"' in card
    meta["base"] |= {"run": "20260101-000000-sft-abcd", "step": 40}
    write_meta(checkpoint, meta)
    card = model_card(checkpoint, PROVEN, adapter=True, name="out")
    assert "vllm serve BASE --enable-lora" in card and 'from_pretrained("BASE"' in card
    assert "`vlmrl merge 20260101-000000-sft-abcd --checkpoint 40 --out BASE` writes it" in card


def test_every_merge_has_a_card(checkpoint, tmp_path):
    done = merge(checkpoint, tmp_path / "out")
    card = (done.folder / CARD).read_text()
    out = tmp_path / "out"
    assert f"vllm serve {out}\n" in card and f'AutoProcessor.from_pretrained("{out}")' in card
    assert f"{done.logp_gap:.1e} nats over {done.proof.tokens} tokens" in card


PUSH = """
import json, os, sys
from pathlib import Path
from vlmrl.checkpoint.merge import check_access, push
from vlmrl.errors import VlmrlError
for line in sys.stdin:
    folder, repo, how, os.environ["HF_TOKEN"] = json.loads(line)
    try:
        check_access(repo)
        print(push(Path(folder), repo, public=how == "public"), flush=True)
    except VlmrlError as error:
        print("refused:", error.message, flush=True)
"""


@contextmanager
def pusher(address: str, home: Path) -> Iterator[Callable[..., str]]:
    """(folder, repository, how, token) -> what is said of an upload to the hub there, by one process for all: the hub's
    address is read when its client is imported."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {"HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", PUSH], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdin is not None and process.stdout is not None

        def push(folder: Path, repo: str, how: str = "private", token: str = TOKEN) -> str:
            process.stdin.write(json.dumps([str(folder), repo, how, token]) + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield push
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.slow
def test_an_upload_is_private_whole_and_never_into_a_public_repository(checkpoint, tmp_path):
    folder = merge(checkpoint, tmp_path / "out", max_shard_size="400KB", name="org/im").folder
    with serve_hub() as hub, pusher(hub.address, tmp_path) as push:
        told = push(folder, "org/im")
        assert told == f"{hub.address}/org/im/commit/{'1' * 40}"
        assert hub.private == {"org/im": True}
        own = {p.name: p.read_bytes() for p in folder.iterdir()}
        assert hub.files["org/im"] == own and {CARD, MERGE_RECORD, "config.json"} <= own.keys()
        assert len([n for n in own if n.endswith(".safetensors")]) > 1

        assert push(folder, "org/open", "public").startswith(hub.address)
        assert hub.private["org/open"] is False
        hub.files.clear()
        assert "exists and is public: nothing was uploaded" in push(folder, "org/open")
        assert hub.files == {}


@pytest.mark.slow
def test_what_cannot_be_uploaded_is_known_before_anything_is_done(tmp_path):
    with serve_hub() as hub, pusher(hub.address, tmp_path) as push:
        assert "does not accept your token" in push(tmp_path, "org/im", token="hf_wrong")
        assert "is not a valid name of a hub repository" in push(tmp_path, "a/b/c")
        assert not any("create" in request for request in hub.requests)
    with pusher("http://127.0.0.1:9", tmp_path) as push:
        assert "the hub does not accept your token" in push(tmp_path, "org/im")
