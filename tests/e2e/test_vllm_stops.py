"""Runs with the real vLLM that are killed, or stopped by a check."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import psutil
import pytest
from command_line import own_process, settings, started
from vllm_place import train, vllm_place

from vlmrl.store.runs import open_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory, small_folder) -> Path:
    return vllm_place(tmp_path_factory.mktemp("vllm"), small_folder)


def test_a_killed_run_leaves_no_process_and_goes_on(place):
    more = settings("train.steps=12", "checkpoint.every_steps=1", "eval.every_steps=0")
    quiet = {"stderr": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
    process = started("train", "rl.toml", "--runs", "killed", *more, cwd=place, **quiet)
    while not list((place / "killed").glob("*/checkpoints/*/COMPLETE")):
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.02)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(family, timeout=30)[1]
    [folder] = (place / "killed").glob("2*")
    done = own_process("train", "--resume", folder.name, "--runs", "killed", "--json", cwd=place)
    assert done.code == 0, done.err
    lines = open_run(place / "killed", folder.name).metrics("train")
    assert [line["step"] for line in lines] == list(range(12)) and {line["attempt"] for line in lines} == {1, 2}
    assert max(line["policy/sampler_gap_max"] for line in lines) < 1e-4


def test_a_sync_beyond_the_bound_stops_the_run(place):
    done = train(place, *settings("rollout.max_sync_gap=1e-9"))
    assert done.code == 2 and "Traceback" not in done.err
    assert "after the sync of version 1" in done.err and "rollout.max_sync_gap" in done.err
