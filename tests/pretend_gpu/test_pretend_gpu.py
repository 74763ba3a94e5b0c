"""vlmrl on a pretended GPU: no mix of devices or dtypes, the numbers of the CPU, no more waits than the golden file."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import warm
from command_line import own_process
from parity import TOLERANCE
from pretend_gpu.gpu_cases import RUNS
from pretend_gpu.start import environment, why_not
from small_runs import (
    answers,
    assert_close_history,
    assert_same_run,
    events,
    finite,
    history,
    make_place,
)

from vlmrl.store.files import EXIT_CODE, VARIABLE
from vlmrl.store.runs import Run, open_run

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
REQUIRED = "VLMRL_TEST_PRETEND_GPU"
"""Variable that makes a skip of this tier a failure; .ci/run sets it."""
WAITS = HERE / "waits.json"
"""Golden file: "FAMILY DTYPE" -> function -> waits per packed row. A new wait of the host is a mistake: remove it."""
RECIPE = """
model.dtype = "bfloat16"
model.device = "cuda"
model.gradient_checkpointing = true
rollout = {prompts_per_step = 2, samples_per_prompt = 3, max_new_tokens = 6}
train = {steps = 2, rows_per_step = 4, tokens_per_row = 110}
optim.lr = 1e-3
algo.kl_coef = 0.1
eval = {every_steps = 0, max_rows = 4}
checkpoint = {every_steps = 1, keep_last = 9}
"""

SMALL_STEPS = """
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 8, temperature = 0.9}
train = {steps = 2, rows_per_step = 4, tokens_per_row = 300}
optim.lr = 1e-3
eval = {every_steps = 2, max_rows = 2}
checkpoint = {every_steps = 0, keep_last = 9}
"""


@pytest.fixture(scope="module")
def gpu(tmp_path_factory) -> dict[str, str]:
    """The environment of a process with one pretended GPU."""
    reason = why_not()
    if reason and os.environ.get(REQUIRED):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    runs = {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PRETEND_COMPILE": "no"}
    return environment(1) | runs


def result(env: Mapping[str, str], *words: object) -> Any:
    """Return the values that a case of gpu_cases.py printed."""
    paths = os.pathsep.join([env["PYTHONPATH"], str(HERE.parent)])
    command = [sys.executable, str(HERE / "gpu_cases.py"), *map(str, words)]
    done = warm.run(command, env={**env, "PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout) if done.stdout.strip() else None


@pytest.mark.parametrize(
    ("family", "dtype", "path", "allowed"),
    [
        ("qwen2_5_vl", "float32", "packed rows, attention by flex", 2e-5),
        ("qwen2_5_vl", "bfloat16", "packed rows, attention by varlen", 0.1),
        ("qwen3_5", "float32", "forked cache", 2e-5),  # linear attention
        ("llava", "float32", "padded", 2e-5),
    ],
)
def test_a_family_is_on_a_gpu_what_it_is_on_a_cpu(gpu, family, dtype, path, allowed):
    gaps = result(gpu, "gaps", family, dtype, "auto")
    assert path in gaps["path"]
    assert gaps["logp"] < allowed and gaps["gradient"] < allowed / 3, gaps


def test_it_refuses_what_a_gpu_refuses(gpu):
    assert result(gpu, "accepted") == []


UPDATED = (
    *("gemma3", "gemma4", "glm4v", "idefics3", "internvl", "minicpmv4_6", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    *("internvl lora", "qwen2_5_vl lora"),
)
"""Families whose update by SDPA is compared: those whose gradients are not compared above. Adapters of all: rest.py."""


def test_an_update_is_on_a_gpu_what_it_is_on_a_cpu(gpu):
    gaps = result(gpu, "updates", ",".join(UPDATED))
    assert gaps.keys() == set(UPDATED)
    for name, (gap, gradient) in gaps.items():
        assert gap <= 2 * TOLERANCE and gradient <= 2 * TOLERANCE, name  # each may be that far from the reference


def test_runs_are_on_a_gpu_what_they_are_on_a_cpu(gpu, tmp_path, tiny_folder):
    place = make_place(tmp_path, tiny_folder, SMALL_STEPS, kinds=("rl", "sft"))
    deep = result(gpu, "runs", place)
    assert deep["agrees"] and deep["gradient"] is not None and deep["logp_max"] <= 2 * TOLERANCE
    for name in RUNS:
        near, far = (open_run(place / device / name, "last") for device in ("cpu", "cuda"))
        assert answers(far) == answers(near)
        assert_close_history(far, near, rel=1e-3, absolute=1e-5, without=("policy/attention_compilations",))


@pytest.mark.parametrize("case", json.loads(WAITS.read_text()))
def test_a_packed_row_waits_no_more_than_the_golden_file_says_and_sums_in_float32(gpu, case):
    seen = result(gpu, "waits", *case.split())
    assert seen == {"waits": json.loads(WAITS.read_text())[case], "half sums": []}


def test_a_handle_opens_the_memory_of_another_process(gpu):
    for own, device, there, after in result(gpu, "handles"):
        assert (device, there, after) == ("cuda:0", own, -5.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return on_gpu(make_place(tmp_path_factory.mktemp("place"), tiny_folder, "")).parent


def on_gpu(place: Path) -> Path:
    """Put the settings of these runs into a place's recipe; return its path."""
    recipe = place / "rl.toml"
    text = recipe.read_text().replace('model.dtype = "float32"\nmodel.device = "cpu"\n', "")
    recipe.write_text(text.replace("model.min_pixels", RECIPE.strip() + "\nmodel.min_pixels"))
    return recipe


def trained(place: Path, folder: Path, env: Mapping[str, str], *words: object) -> Run:
    done = own_process("train", place / "rl.toml", "--runs", ".", *words, cwd=folder, env=env)
    assert done.code == 0, done.err[-4000:]
    return open_run(folder, "last")


@pytest.fixture(scope="module")
def whole(gpu, place, tmp_path_factory) -> Run:
    run = trained(place, tmp_path_factory.mktemp("whole"), gpu)
    assert len(run.metrics("train")) == 2 and all(finite(m) for m in run.metrics("train"))
    return run


def test_a_run_that_was_killed_and_resumed_is_the_run_that_was_not(gpu, place, whole, tmp_path):
    crash = gpu | {VARIABLE: "mid-save:2"}
    done = own_process("train", place / "rl.toml", "--runs", ".", cwd=tmp_path, env=crash)
    assert done.code == EXIT_CODE, done.err[-4000:]
    done = own_process("train", "--resume", "last", "--runs", ".", cwd=tmp_path, env=gpu)
    assert done.code == 0, done.err[-4000:]
    assert_same_run(open_run(tmp_path, "last"), whole)


def test_two_ranks_share_a_model(gpu, place, whole, tmp_path):
    run = trained(place, tmp_path, gpu | environment(2) | {"PRETEND_COMPILE": "no"}, "--gpus", 2)
    assert len(history(run)) == len(history(whole))
    assert_close_history(run, whole, rel=0.2, absolute=0.1)


def test_memory_that_runs_out_halves_the_budget(gpu, place, tmp_path):
    result(gpu, "memory", place / "rl.toml", tmp_path)
    run = open_run(tmp_path, "last")
    assert run.status == "done"
    [event] = events(run, "budget halved")
    assert event["step"] == 1 and event["now"] <= event["was"] // 2
