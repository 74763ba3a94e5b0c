"""vLLM in a process of its own, for two trainers: what it samples is what they would, with weights as fresh as said."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import warm
from command_line import settings, started
from processes import below, command_of, lives
from run_rank import job, run_jobs
from small_runs import TWO_STEPS, make_place
from wild_tools import SHOWS, WILD

from vlmrl.dist.world import ENGINES_VARIABLE
from vlmrl.store.runs import Run, open_run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
SPLIT = [
    "rollout.engine=vllm",
    "rollout.engine_gpus=1",
    "rollout.kv_cache_gib=0.2",
    "rollout.max_prompt_tokens=400",
    "eval.every_steps=0",
    "eval.max_rows=2",
]
AHEAD = [*SPLIT, "rollout.overlap=true", "train.steps=4", "lora.rank=4"]
EPISODES = [
    "environment.tokens=300", "environment.turns=3", "rollout.max_new_tokens=8", 'rollout.stop=["e", "a"]',
    "train.tokens_per_row=1000", "rollout.max_prompt_tokens=600",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    place = make_place(tmp_path_factory.mktemp("split"), small_folder, TWO_STEPS)
    (place / "wild.py").write_text(WILD + SHOWS)
    return place


@pytest.fixture(scope="module")
def runs(place: Path) -> Path:
    """Runs of two trainers and an engine, and of one process with the built-in engine."""
    alone = job(place, "alone", "train.steps=4", "eval.every_steps=0", "lora.rank=4")
    with pytest.MonkeyPatch.context() as patch:
        warm.all_in_forks(patch)
        patch.setenv(ENGINES_VARIABLE, "cpu")
        run_jobs(2, [job(place, "split", *SPLIT), job(place, "ahead", *AHEAD, stop_at=2)], place)
        run_jobs(2, [job(place, "ahead", resume=True)], place)
        tools = [*EPISODES, f"environment.name={place / 'wild.py'}:Shows"]
        run_jobs(2, [job(place, "episodes", *AHEAD, *tools)], place)
        patch.setenv(ENGINES_VARIABLE, "")
        run_jobs(1, [alone], place)
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
    # the engine's log-probs are in the ratio, and no weight beside it
    assert not any("policy/importance_weight" in m for m in steps)
    assert all(m["policy/sync_gap_max"] < 1e-4 for m in steps if "policy/sync_gap_max" in m)
    versions = [{s.trajectory.version for g in run.read_rollouts(k) for s in g.samples} for k in range(4)]
    assert versions == [{0}, {0}, {2}, {2}]


def test_episodes_go_on_during_the_update(runs: Path) -> None:
    run = open_run(runs / "episodes", "last")
    steps = run.metrics("train")
    assert run.status == "done" and [m.get("rollout/version_lag", 0) for m in steps] == [0, 1, 1, 1]
    assert steps[0]["policy/sampler_gap_max"] < 1e-4 and all(m["episode/turns"] > 1 for m in steps)
    for step in range(1, 4):
        samples = [s for g in run.read_rollouts(step) for s in g.samples]
        assert {s.trajectory.version for s in samples} == {step - 1} and any(len(s.turns) > 1 for s in samples)
        assert not any(s.score.error for s in samples)


def test_a_resume_draws_the_rows_again_that_were_drawn_ahead(runs: Path) -> None:
    run = open_run(runs / "ahead", "last")
    assert [a.from_step for a in run.manifest.attempts] == [0, 2]
    assert prompts(run) == prompts(open_run(runs / "alone", "last"))


def test_an_engine_that_is_killed_ends_the_run_in_words_and_leaves_nothing(place: Path, monkeypatch) -> None:
    warm.all_in_forks(monkeypatch)
    more = settings(*SPLIT, "train.steps=500")
    env = {k: v for k, v in os.environ.items() if k != ENGINES_VARIABLE}
    process = started(
        "train", "rl.toml", "--runs", "killed", "--gpus", "2", *more, cwd=place, env=env, stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 150
    while not (steps := list((place / "killed").glob("*/rollouts/000002.parquet"))):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.2)
    [engine] = [p for p in below(process.pid) if "vlmrl.rollout.vllm.host" in command_of(p)]
    os.kill(engine, signal.SIGKILL)
    told = process.communicate(timeout=30)[1]
    assert process.returncode == 2 and "engine 0 has died" in told and "engine-0.log" in told, told[-2000:]
    assert open_run(place / "killed", steps[0].parent.parent.name).status == "failed"
    assert not lives(engine)
