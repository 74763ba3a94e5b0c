"""The whole chain as a person types it, each command with --json, on a tiny model; trainings in own processes."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from command_line import own_process, settings, this_process

SMALL = [
    "rollout.prompts_per_step=4",
    "rollout.samples_per_prompt=3",
    "eval.max_rows=8",
    "eval.every_steps=2",
]
OWN_PROCESS = ("sft", "train", "eval im", "merge")


@pytest.fixture(scope="module")
def chain(tmp_path_factory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The folder in which everything was typed, and what each command said."""
    place = tmp_path_factory.mktemp("chain")
    said: dict[str, dict[str, Any]] = {}

    def step(name: str, *words: Any) -> dict[str, Any]:
        run = own_process if name in OWN_PROCESS else this_process  # each process loads torch for seconds
        done = run(*words, "--json", cwd=place)
        assert done.code == 0, f"vlmrl {' '.join(map(str, words))}\n{done.err}"
        assert "Traceback" not in done.err
        said[name] = json.loads(done.out)
        return said[name]

    step("prep", "prep", "digits", "--pairs", "60")
    step("demo", "demo", "--model-only", "demo/model", "--data", "data/digits")
    step("check", "check", "digits_im", *settings(*SMALL))
    step("try", "try", "digits_im", "--prompts", "3", "--samples", "2", *settings(*SMALL))
    step(
        "sft",
        "sft",
        "digits_sft",
        "--name",
        "sft",
        *settings("train.steps=4", "optim.warmup_steps=2", "train.rows_per_step=8"),
        *settings("eval.max_rows=8", "eval.every_steps=2"),
    )
    step(
        "train",
        "train",
        "digits_im",
        "--name",
        "im",
        "--tag",
        "chain",
        "--note",
        "a note",
        *settings("model.path=sft", "train.steps=3", "optim.warmup_steps=1", *SMALL),
    )
    for name in ("sft", "im"):
        step(f"eval {name}", "eval", name, "--split", "test", "--max-rows", "24")
    step("compare", "compare", "sft", "im")
    step("merge", "merge", "im", "--out", "models/im")
    step("reward-check", "reward-check", "im")
    step("report", "report", "sft", "im", "-o", "report.html")
    step("list", "runs", "list")
    for name in ("show", "verify"):
        step(name, "runs", name, "im")
    step("pack", "runs", "pack", "im", "-o", "im.tar.gz")
    return place, said


@pytest.mark.slow
def test_data_check_and_trial(chain):
    place, said = chain
    assert said["prep"]["outcome"] == "created" and said["prep"]["info"]["splits"]["test"]["rows"] >= 1000
    assert said["demo"]["parameters"] > 100_000 and (place / "demo/model/config.json").is_file()
    assert [p for p in said["check"]["problems"] if p["level"] == "error"] == []
    assert len(said["try"]["groups"]) == 3 and all(len(g["samples"]) == 2 for g in said["try"]["groups"])
    assert (place / "runs" / said["try"]["run"] / "rollouts").is_dir()


@pytest.mark.slow
def test_both_trainings_end_and_leave_their_record(chain):
    place, said = chain
    assert (said["sft"]["status"], said["sft"]["steps"]) == ("done", 4)
    assert (said["train"]["status"], said["train"]["steps"]) == ("done", 3)
    assert said["sft"]["last"]["optim/updates"] == 4
    run = place / said["train"]["dir"]
    assert len(list((run / "rollouts").glob("*.parquet"))) == 3
    assert (run / "checkpoints" / said["train"]["checkpoints"][-1] / "COMPLETE").is_file()
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["parent"]["run"] == said["sft"]["run"] and manifest["tags"] == ["chain"]


@pytest.mark.slow
def test_evaluation_and_comparison_are_of_the_test_split(chain):
    _, said = chain
    for name in ("eval sft", "eval im"):
        (found,) = said[name]["evaluations"]
        assert found["meta"]["split"] == "test" and found["prompts"] == 24
        assert {"reward", "accuracy", "brier", "auc", "parse_failure"} <= found["metrics"].keys()
        assert all({"value", "low", "high", "n"} <= m.keys() for m in found["metrics"].values())
    (paired,) = [e for e in said["compare"]["evaluations"] if e["rows_paired"] == 24]
    assert {"reward", "accuracy"} <= {m["metric"] for m in paired["metrics"]}
    assert any(row["key"].startswith("model.path") for row in said["compare"]["recipe"])


@pytest.mark.slow
def test_the_merged_folder_is_an_ordinary_model_with_the_weights_of_the_checkpoint(chain):
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from vlmrl.checkpoint.io import load_file

    place, said = chain
    assert said["merge"]["logp_gap"] is not None and said["merge"]["logp_gap"] < 1e-4
    model = AutoModelForImageTextToText.from_pretrained(place / "models/im", dtype=torch.float32)
    own = model.state_dict()
    (file,) = (place / said["merge"]["checkpoint"] / "model").glob("*.safetensors")
    saved = load_file(file)
    assert saved and all(torch.equal(own[name], tensor) for name, tensor in saved.items())
    assert AutoProcessor.from_pretrained(place / "models/im").chat_template


@pytest.mark.slow
def test_rewards_are_the_same_when_scored_again_and_the_report_loads_nothing(chain):
    import re

    place, said = chain
    stored = said["reward-check"]["stored"]
    assert stored["equal"] and stored["different"] == 0 and said["reward-check"]["samples"] == 3 * 4 * 3
    page = (place / "report.html").read_text()
    assert "data:image/png;base64," in page and said["train"]["run"] in page
    assert not re.search(r"""(?:src|href|action)\s*=\s*["']?\s*(?:https?:)?//|@import|url\(\s*["']?http""", page)


@pytest.mark.slow
def test_the_run_is_listed_shown_whole_and_packed_with_its_images(chain):
    place, said = chain
    kinds = {r["id"]: (r["kind"], r["status"]) for r in said["list"]["runs"]}
    assert kinds[said["train"]["run"]] == ("rl", "done") and kinds[said["try"]["run"]] == ("try", "done")
    assert said["show"]["status"] == "done"
    assert said["verify"]["ok"] and said["verify"]["problems"] == []
    assert said["pack"]["missing_images"] == [] and said["pack"]["images"] > 0
    with tarfile.open(place / "im.tar.gz") as archive:
        archive.extractall(place / "elsewhere", filter="data")
    folder = place / "elsewhere" / said["train"]["run"]
    verified = this_process("runs", "verify", folder, "--json", cwd=place / "elsewhere").json
    assert verified["ok"] and verified["counts"]["images"] > 0
