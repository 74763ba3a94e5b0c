"""vLLM in a process of its own, for two trainers: what it samples is what they would, with weights as fresh as said."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_shared_runs import RECIPE, REWARD, SCRIPT, job
from test_shared_update import run_ranks

from vlmrl.dist.worker import ENGINES_VARIABLE
from vlmrl.store.runs import Run, open_run
from vlmrl.tasks.digits.task import prepare_digits

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
SPLIT = ["rollout.engine=vllm", "rollout.engine_gpus=1", "rollout.kv_cache_gib=0.2", "rollout.max_prompt_tokens=400",
         "eval.every_steps=0", "eval.max_rows=2"]  # fmt: skip
AHEAD = [*SPLIT, "rollout.overlap=true", "train.steps=4", "lora.rank=4"]


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    folder = tmp_path_factory.mktemp("split")
    (folder / "reward.py").write_text(REWARD)
    data = prepare_digits(folder / "digits", num_pairs=24).path
    text = RECIPE.format(model=small_folder, data=data, folder=folder)
    (folder / "rl.toml").write_text('kind = "rl"\n[algo]\nname = "grpo"\n' + text)
    return folder


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """Runs of two trainers and an engine, and of one process with the built-in engine."""
    jobs = {
        "two": [job(place, "split", overrides=SPLIT), job(place, "ahead", overrides=AHEAD, stop_at=2)],
        "again": [job(place, "ahead", resume=True)],
        "one": [job(place, "alone", overrides=["train.steps=4", "eval.every_steps=0", "lora.rank=4"])],
    }
    for name, some in jobs.items():
        (place / f"{name}.json").write_text(json.dumps(some))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(ENGINES_VARIABLE, "" if name == "one" else "cpu")
            run_ranks(1 if name == "one" else 2, SCRIPT, str(place / f"{name}.json"))
    return place


def prompts(run: Run) -> list[list[str]]:
    return [[g.row.prompt_id for g in run.read_rollouts(step)] for step in run.rollout_files()]


def test_the_engine_samples_from_the_weights_of_this_very_step(runs: Path) -> None:
    run = open_run(runs / "split", "last")
    steps = run.metrics("train")
    assert run.status == "done" and len(steps) == 2 and steps[-1]["optim/updates"] > 0
    for m in steps:
        assert m["policy/sampler_gap_max"] < 1e-4 and m["rollout/samples"] == 15
        assert m["policy/sync_gap_max"] < 1e-4
        assert "rollout/version_lag" not in m
    assert {s.trajectory.version for g in run.read_rollouts(1) for s in g.samples} == {1}
    assert (run.log_path().parent / "engine-0.log").is_file()


def test_ahead_of_the_update_the_weights_are_one_step_older_and_the_samples_say_so(runs: Path) -> None:
    run = open_run(runs / "ahead", "last")
    steps = run.metrics("train")
    assert [m.get("rollout/version_lag", 0) for m in steps] == [0, 1, 0, 1]  # resumed after two: nothing was ahead
    gaps = [m["policy/sampler_gap_max"] for m in steps]
    assert gaps[0] < 1e-4 and gaps[2] < 1e-4 and gaps[1] > 1e-3 and gaps[3] > 1e-3
    assert all("policy/importance_weight" in m for m in steps)
    assert all(m["policy/sync_gap_max"] < 1e-4 for m in steps if "policy/sync_gap_max" in m)
    versions = [{s.trajectory.version for g in run.read_rollouts(k) for s in g.samples} for k in range(4)]
    assert versions == [{0}, {0}, {2}, {2}]


def test_a_resume_draws_the_rows_again_that_were_drawn_ahead(runs: Path) -> None:
    run = open_run(runs / "ahead", "last")
    assert [a.from_step for a in run.manifest.attempts] == [0, 2]
    assert prompts(run) == prompts(open_run(runs / "alone", "last"))


def test_an_engine_that_is_killed_ends_the_run_in_words_and_leaves_nothing(place: Path) -> None:
    settings = [word for o in [*SPLIT, "train.steps=500"] for word in ("--set", o)]
    command = [sys.executable, "-m", "vlmrl", "train", str(place / "rl.toml"), "--runs", str(place / "killed"),
               "--gpus", "2", *settings]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != ENGINES_VARIABLE}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env)
    end = time.monotonic() + 150
    while not (steps := list((place / "killed").glob("*/rollouts/step-000001.parquet"))):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.2)
    [engine] = [p for p in children(process.pid) if b"vlmrl.rollout.host" in command_of(p)]
    os.kill(engine, signal.SIGKILL)
    told = process.communicate(timeout=30)[1]
    assert process.returncode == 2 and "engine 0 has died" in told and "engine-0.log" in told, told[-2000:]
    assert open_run(place / "killed", steps[0].parent.parent.name).status == "failed"
    assert not Path(f"/proc/{engine}").exists()


def children(pid: int) -> list[int]:
    """Processes below a process, and below those."""
    found = [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [x for p in found for x in children(p)]


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
