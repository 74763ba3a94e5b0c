"""A vLLM engine in each of two processes over one sharded policy is the engine of one process and dies with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from processes import END_SECONDS, TESTS, run_ranks
from test_launch import LAUNCH, Launched
from vllm_rank import CASES, DROPPED, SMALL_BUCKET

pytestmark = pytest.mark.slow

SCRIPT = TESTS / "ranks" / "vllm_rank.py"
MOST_ROUNDING = 6
"""Engine and trainer differ by at most this many times what float32 costs the trainer: each rounds for itself."""


@pytest.fixture(scope="module")
def outcome(tiny_folder, tmp_path_factory) -> dict[int, dict[str, Any]]:
    out = tmp_path_factory.mktemp("engines")
    for size in (1, 2):
        run_ranks(size, SCRIPT, tiny_folder, out)
    return {size: json.loads((out / f"{size}.json").read_text()) for size in (1, 2)}


@pytest.mark.parametrize("case", CASES)
def test_same_ids_as_the_engine_of_one_process_before_and_after_an_update(outcome, case) -> None:
    one, two = (outcome[size][case]["ids"] for size in (1, 2))
    assert two == one
    assert one[0] != one[1], "the update changed nothing"
    assert all(len({tuple(ids) for prompt in version for ids in prompt}) > 6 for version in one)


@pytest.mark.parametrize("case", CASES)
def test_an_engine_takes_groups_that_wait_for_a_slow_one_and_the_ids_stay_the_same(outcome, case) -> None:
    one, two = (outcome[size][case]["shared"] for size in (1, 2))
    # With all weights the answers to prompt 0 are far longer than the others. With the adapter they are not, so who
    # takes the last prompts depends on time.
    first, second = two["taken"]
    assert (first[0], second[0]) == (0, 1) and sorted([*first, *second]) == [0, 1, 2, 3]
    assert case == "adapter" or two["taken"] == [[0], [1, 3, 2]]
    assert one["taken"] == [[0, 1, 2, 3]]
    assert two["ids"] == one["ids"]


@pytest.mark.parametrize("case", CASES)
def test_every_sync_brings_the_trainers_weights(outcome, case) -> None:
    told, rounding = outcome[2][case], max(outcome[1][case]["rounding"])
    assert len(told["gaps"]) == 3 and max(told["gaps"]) < MOST_ROUNDING * rounding
    assert told["stale"] > 1000 * MOST_ROUNDING * rounding, "the update is too small for a stale engine to be seen"


def test_weights_are_gathered_in_buckets_and_never_all_at_once(outcome) -> None:
    """Alive at once: a bucket (here of the largest tensor alone), and what the engine has not put away yet."""
    told = outcome[2]["full"]["memory"]
    assert told["buckets"] > 10
    assert told["largest"] <= told["most"] <= told["largest"] + SMALL_BUCKET < told["total"] / 3


def test_adapters_alone_are_gathered_once_there_is_a_base(outcome) -> None:
    told = outcome[2]["adapter"]["memory"]
    assert told["buckets"] == 1 and told["most"] < outcome[2]["full"]["memory"]["total"] / 20


def test_a_tensor_that_is_dropped_is_named_on_all(outcome) -> None:
    """That both processes say the same is checked by them."""
    for size in (1, 2):
        assert f"1 tensor did not arrive in the engine: language_model.{DROPPED}" in outcome[size]["dropped"]


def test_engines_see_nothing_of_the_launcher_and_leave_its_variables_as_they_were(outcome) -> None:
    assert outcome[2]["seen"] == [] and outcome[2]["unchanged"]


@pytest.mark.parametrize("when", ["building", "generating"])
def test_nothing_is_left_when_one_is_killed(tiny_folder, tmp_path: Path, when: str) -> None:
    command = [str(SCRIPT), str(tiny_folder), str(tmp_path), "forever"]
    env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    job = json.dumps({"command": command, "ranks": 2, "env": env})
    nest = {**os.environ, warm.NEST: "1"}
    launcher = warm.Popen([sys.executable, "-c", LAUNCH, job], env=nest, stderr=subprocess.PIPE, text=True)
    launched = Launched(launcher, tmp_path)
    family: list[psutil.Process] = []
    try:
        victim = [launched.pid(f"{when}-{rank}") for rank in range(2)][1]
        family = psutil.Process(launcher.pid).children(recursive=True)
        os.kill(victim, signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=END_SECONDS)[1]
        assert launcher.wait(END_SECONDS) != 0
    finally:
        launcher.kill()
        told = launcher.communicate()[1]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    assert "rank 1" in told and "SIGKILL" in told, told
    assert (tmp_path / "generating-0").exists() == (when == "generating")
