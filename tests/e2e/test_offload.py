"""`parallel.offload` with one process, by the commands: killed, resumed, evaluated, merged, reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import own_process, settings, this_process
from small_runs import TWO_STEPS, assert_same_run, make_place, train

from vlmrl.store.runs import Run, open_run

OFFLOAD = "parallel.offload=true"
SAVING = ("train.steps=3", "checkpoint.every_steps=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("offload"), tiny_folder, TWO_STEPS)


@pytest.fixture(scope="module")
def run(place) -> Run:
    """A run that was killed in the middle of a save, and resumed."""
    died = own_process(
        "train",
        "rl.toml",
        *settings(OFFLOAD, *SAVING),
        "--runs",
        "runs",
        cwd=place,
        env={"VLMRL_CRASH_AT": "mid-save:2"},
    )
    assert died.code == 137, died.err
    assert "weights, gradients and moments are in main memory between their uses" in died.err
    resumed = this_process("train", "--resume", "last", "--json", "--runs", "runs", cwd=place)
    assert resumed.json["status"] == "done"
    return open_run(place / "runs", "last")


def test_killed_and_resumed_it_is_the_plain_run_to_the_bit(place, run, tmp_path):
    assert [a.from_step for a in run.manifest.attempts] == [0, 1]
    assert_same_run(run, train(place, tmp_path, *SAVING))


def test_it_is_evaluated_merged_and_reported_like_any_other(place, run, tmp_path):
    runs = place / "runs"
    done = this_process("eval", run.id, "--runs", runs, "--split", "validation", "--max-rows", "5", "--json", cwd=place)
    assert done.json["evaluations"]
    done = this_process("merge", run.id, "--runs", runs, "--out", tmp_path / "merged", "--json", cwd=place)
    assert done.json["logp_gap"] < 1e-4
    done = this_process("report", run.id, "--runs", runs, "-o", tmp_path / "report.html", cwd=place)
    assert done.code == 0 and (tmp_path / "report.html").stat().st_size > 10_000, done.err
    assert this_process("runs", "verify", run.id, "--runs", runs, cwd=place).code == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["model.dtype=bfloat16", "optim.name=adamw_bf16_kahan"],
            'optim.name = "adamw_bf16_kahan" cannot be combined with parallel.offload',
        ),
        (["parallel.shard_size=2"], "parallel.shard_size = 2 does not divide 1 process\n"),
    ],
)
def test_what_cannot_be_combined_is_named_before_a_run_begins(place, tmp_path, more, message):
    for words in (["train", "rl.toml"], ["check", "rl.toml"]):
        done = this_process(*words, *settings(OFFLOAD, *more), "--runs", tmp_path, cwd=place)
        assert done.code == 2 and message in done.out + done.err, done
        assert "Traceback" not in done.err and not list(tmp_path.iterdir())
