"""A run that was stopped and resumed is, to the bit, the run that was not: weights, moments, metrics, rollouts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from command_line import own_process, settings, started, this_process
from small_runs import (
    SIX_STEPS,
    Ears,
    assert_same_run,
    begin,
    go_on,
    history,
    make_place,
    once_a_kind,
    rollouts,
    same_tensors,
    train,
    train_in_parts,
    weights,
)

from vlmrl.checkpoint import io
from vlmrl.errors import CheckpointError, RewardError, StoreError
from vlmrl.store.files import EXIT_CODE, VARIABLE
from vlmrl.store.listing import list_runs
from vlmrl.store.metrics import MetricsWriter
from vlmrl.store.runs import open_run
from vlmrl.store.verify import verify_run


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, SIX_STEPS, kinds=("rl", "sft"))


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """kind -> the run that nobody stopped."""
    return once_a_kind(place, tmp_path_factory)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("stops", [(1,), (2, 5)])
def test_stopped_and_resumed_equals_uninterrupted(place, whole, tmp_path, kind, stops):
    assert_same_run(train_in_parts(place, tmp_path, kind=kind, stops=stops), whole(kind))


@pytest.mark.slow
def test_the_run_of_the_test_above_learns_and_differs_by_its_seed(place, whole, tmp_path):
    """Otherwise equal runs would show nothing."""
    expected = whole("rl")
    assert any(m.get("optim/updates", 0) > 3 for m in history(expected))
    assert expected.metrics("train")[-1]["policy/sampler_gap_max"] < 1e-4
    assert not same_tensors(weights(expected, 0), weights(expected))
    other = train(place, tmp_path, "train.seed=1", "train.steps=1")
    assert rollouts(other, [0])[0][0] != rollouts(expected, [0])[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_resumed_from_an_older_checkpoint_equals_uninterrupted(place, whole, tmp_path, kind):
    """A kill after step 5 whose last checkpoint is of step 3: steps 3 and 4 are done again, and count once."""
    run, _ = begin(place, tmp_path, kind=kind, stop_at=5)
    shutil.rmtree(run.checkpoint_dirs()[-1])
    assert run.checkpoint_dirs()[-1].name < "step-000005"
    run, status = go_on(run)
    assert status == "done"
    assert_same_run(run, whole(kind))


@pytest.mark.slow
def test_old_rollouts_go_as_the_run_goes_and_it_resumes_all_the_same(place, whole, tmp_path):
    run = train_in_parts(place, tmp_path, "log.keep_rollouts=1", "log.keep_rollouts_every=3", stops=(3,))
    steps = [line["step"] for line in run.metrics("train")]
    assert list(run.rollout_files()) == [s for s in steps if s % 3 == 0 or s == steps[-1]] != steps
    assert json.dumps(history(run)) == json.dumps(history(whole("rl")))
    assert not [p for p in verify_run(run.dir).errors if "rollouts" in p.message]


@pytest.mark.slow
def test_several_updates_a_step_with_a_reference_resume_too(place, tmp_path):
    overrides = ("train.updates_per_step=2", "algo.kl_coef=0.1", "algo.entropy_coef=0.01", "train.steps=3")
    expected = train(place, tmp_path / "a", *overrides)
    assert expected.metrics("train")[-1]["optim/updates"] == 6
    assert expected.metrics("train")[-1]["loss/kl"] > 0
    assert_same_run(train_in_parts(place, tmp_path / "b", *overrides), expected)


@pytest.mark.slow
def test_a_run_may_start_from_the_last_one_by_that_name_and_resume(place, tmp_path):
    """`last` means the run before, also once the new run is itself the last."""
    root = tmp_path / "runs"
    more = ("train.steps=2", "algo.kl_coef=0.1")
    parent = train(place, root, "train.steps=2", kind="sft")
    child = train_in_parts(place, root, 'model.path="last"', *more)
    assert child.manifest.parent["run"] == parent.id
    straight = train(place, root, f'model.path="{parent.id}"', *more)
    assert straight.manifest.parent == child.manifest.parent
    assert same_tensors(weights(child), weights(straight))


BROKEN = """
import pathlib
def score(x):
    if pathlib.Path(__file__).with_name("flag").exists():
        raise ZeroDivisionError("the divisor is gone")
    return x.num_tokens / 12
"""


@pytest.fixture
def broken(tmp_path) -> str:
    """The setting of a reward that raises, as long as there is a file `flag` beside it: in tmp_path."""
    (tmp_path / "broken.py").write_text(BROKEN)
    (tmp_path / "flag").write_text("")
    return f'reward.name="{tmp_path}/broken.py:score"'


@pytest.mark.slow
def test_a_reward_that_raises_at_once_stops_with_the_row(place, broken, tmp_path):
    with pytest.raises(RewardError, match="divisor is gone") as caught:
        begin(place, tmp_path, broken)
    assert "row" in str(caught.value)
    assert list_runs(tmp_path) == [] and open_run(tmp_path / "unfinished", "last").status == "failed"


@pytest.mark.slow
def test_a_finished_run_stays_done_when_its_resume_trains_nothing_and_can_be_resumed_later(place, broken, tmp_path):
    flag = tmp_path / "flag"
    flag.unlink()
    run, status = begin(place, tmp_path, broken, "train.steps=2")
    assert status == "done"
    kept = run.dir / "checkpoints"
    kept.rename(tmp_path / "kept")
    (run.dir / "packed.json").write_text('{"left_out": ["step-000002"]}')
    with pytest.raises(StoreError, match="has no checkpoint last"):  # it is not trained from step 0 again
        go_on(run, "train.steps=3")
    (tmp_path / "kept").rename(kept)
    flag.write_text("")
    with pytest.raises(RewardError, match="divisor is gone"):
        go_on(run, "train.steps=3")
    failed = open_run(tmp_path, run.id)
    assert (failed.status, failed.manifest.error) == ("done", None)
    assert [a.status for a in failed.manifest.attempts] == ["done", "failed"]
    flag.unlink()
    run, status = go_on(failed)  # its recipe has the third step already
    assert status == "done" and [line["step"] for line in run.metrics("train")] == [0, 1, 2]
    with pytest.raises(StoreError, match="has done all its 3 steps: there is nothing to resume"):
        go_on(run)


@pytest.mark.slow
def test_a_reward_that_breaks_later_is_masked_counted_and_stops_the_run_after_saving(place, broken, tmp_path):
    flag = tmp_path / "flag"
    flag.unlink()

    class BreakLater(Ears):
        def step(self, step: int, total: int, metrics) -> None:
            if step == 3:
                flag.write_text("")

    with pytest.raises(RewardError, match="of 75 samples"):
        begin(place, tmp_path, broken, "eval.every_steps=0", ears=BreakLater())
    run = open_run(tmp_path, "last")
    assert run.status == "failed"
    assert run.checkpoint_dirs()[-1].name == "step-000005"
    failed = [s for g in run.read_rollouts(4) for s in g.samples]
    assert all(s.masked and "divisor" in (s.score.error or "") and s.advantage == 0 for s in failed)
    assert run.metrics("train")[-1]["reward/errors"] == 15
    flag.unlink()  # mended: the run goes on, its old failures do not stop it again
    run, status = go_on(run)
    assert status == "done" and run.metrics("train")[-1]["reward/errors"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "beside"),
    [
        ("mid-rollout:4", False),
        ("mid-save:2", False),
        ("before-complete:2", False),
        ("mid-prune", False),
        ("mid-manifest:3", False),
        ("before-complete:1", False),
        ("mid-save:2", True),
        ("before-complete:2", True),
    ],
)
def test_killed_at_a_named_point_and_resumed_equals_uninterrupted(place, whole, tmp_path, point, beside):
    """`beside`: checkpoints are written by a thread while training goes on."""
    keep = "checkpoint.keep_last=1"  # so that there is something to prune
    more = settings(keep, f"checkpoint.asynchronous={str(beside).lower()}")
    crash = {"VLMRL_CRASH_AT": point}
    died = own_process("train", place / "rl.toml", *more, "--runs", ".", cwd=tmp_path, env=crash)
    assert died.code == 137, died.err
    run = open_run(tmp_path, "last")
    for folder in run.checkpoint_dirs():
        io.check_files(folder)
    resumed = this_process("train", "--resume", "last", "--json", "--runs", ".", cwd=tmp_path)
    assert resumed.json["status"] == "done"
    run = open_run(tmp_path, "last")
    assert run.attempt == 2
    assert_same_run(run, whole("rl"))
    assert not [p for p in run.dir.rglob("*") if p.name.startswith((".tmp-", ".trash-"))]


def test_a_write_that_fails_beside_the_training_ends_the_run_with_its_error(place, tmp_path, monkeypatch):
    real, began = io.write_staged, []

    def full(staged, world):
        began.append(staged.saved.step)
        if len(began) == 2:
            raise CheckpointError("the disk is full")
        return real(staged, world)

    monkeypatch.setattr(io, "write_staged", full)
    with pytest.raises(CheckpointError, match="the disk is full"):
        begin(place, tmp_path, "checkpoint.asynchronous=true", "checkpoint.every_steps=2", "eval.every_steps=0")
    run = open_run(tmp_path, "last")
    assert run.status == "failed" and "the disk is full" in (run.manifest.error or "")
    assert began == [2, 4] and [f.name for f in run.checkpoint_dirs()] == ["step-000002"]
    io.check_files(run.checkpoint_dirs()[0])


def test_a_disk_that_fills_up_leaves_the_command_to_go_on_with(place, tmp_path, monkeypatch):
    real = MetricsWriter.write

    def full(self, step, kind, metrics):
        if (step, kind) == (3, "train"):
            raise StoreError("cannot write metrics: the disk is full", where="metrics.jsonl")
        real(self, step, kind, metrics)

    monkeypatch.setattr(MetricsWriter, "write", full)
    often = ("--set", "checkpoint.every_steps=2", "--set", "eval.every_steps=0")
    done = this_process("sft", place / "sft.toml", "--runs", ".", *often, cwd=tmp_path)
    run = open_run(tmp_path, "last").id
    words = f"hint: its last checkpoint is step-000002; continue with: vlmrl sft --resume {run} --runs ."
    assert done.code == 2 and "the disk is full" in done.err and done.err.strip().endswith(words)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_exits_with_130_and_says_how_to_go_on(place, whole, tmp_path, number):
    process = started("train", place / "rl.toml", "--runs", ".", cwd=tmp_path)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and process.poll() is None:
        lines = list(tmp_path.glob("*/metrics.jsonl"))
        if lines and '"train"' in lines[0].read_text():
            break
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 130, error
    run = open_run(tmp_path, "last")
    assert run.status == "interrupted"
    assert f"--resume {run.id}" in error and "Traceback" not in error
    assert 1 <= int(run.checkpoint_dirs()[-1].name[-6:]) < 6
    resumed = this_process("train", "--resume", run.id, "--runs", ".", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert_same_run(open_run(tmp_path, "last"), whole("rl"))


@pytest.mark.slow
def test_killed_in_the_middle_of_a_rollout_file_the_run_goes_on_as_if_it_had_not_been(place, whole, tmp_path):
    """Beside the training a thread is writing: the fifth step's rollouts, after a checkpoint of the third."""
    done = own_process(
        "train", place / "rl.toml", "--runs", ".", cwd=tmp_path, env={**os.environ, VARIABLE: "mid-rollout:5"}
    )
    assert done.code == EXIT_CODE, done.err
    run = open_run(tmp_path, "last")
    assert run.status == "killed" and list(run.rollout_files()) == [0, 1, 2, 3]
    # the fourth step's metrics may still have been waiting; no step has them without its rollouts
    assert [m["step"] for m in run.metrics("train")] in ([0, 1, 2], [0, 1, 2, 3]) and not verify_run(run.dir).errors
    resumed, status = go_on(run)
    assert status == "done"
    assert_same_run(resumed, whole("rl"))


@pytest.mark.slow
def test_a_reward_bug_ends_the_command_with_2_the_row_and_no_traceback_of_ours(place, broken, tmp_path):
    done = own_process("train", place / "rl.toml", *settings(broken), "--runs", ".", cwd=tmp_path)
    assert done.code == 2, done.err
    assert "the divisor is gone" in done.err and "row" in done.err and "vlmrl/train" not in done.err
    assert done.out == ""
