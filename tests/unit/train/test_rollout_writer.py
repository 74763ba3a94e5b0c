"""Rollouts written beside the training: their order, what waits for them, what fails, and kills."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from vlmrl.errors import StoreError
from vlmrl.store.files import EXIT_CODE, VARIABLE
from vlmrl.store.prune import RolloutRule, pruned_ranges
from vlmrl.store.runs import Run, create_run, open_run, resume_run
from vlmrl.store.verify import verify_run
from vlmrl.train.journal import MOST_UNDER_WAY, RolloutWriter
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory


def group(step: int) -> Group:
    segments = (Segment("assistant", (5, 6), True, (-0.5, -0.25)),)
    trajectory = Trajectory("table", f"p{step}", 0, 0, step, 7, (1, 2), segments, (), "stop")
    return Group(Row(f"p{step}", "rows", "table", {}), "prompt", (ScoredSample(trajectory, "text", Score(0.5, {})),))


@pytest.fixture
def run(tmp_path: Path):
    made = create_run(tmp_path, kind="rl", recipe_name="digits")
    yield made
    made.close()


class Gate:
    """A writer's thread waits before each step until it is let through."""

    def __init__(self, writer: RolloutWriter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[int] = []
        self.open = threading.Semaphore(0)
        write = writer.files.write

        def gated(step: int, groups: Any) -> dict[str, str]:
            self.begun.append(step)
            assert self.open.acquire(timeout=60)
            return write(step, groups)

        monkeypatch.setattr(writer.files, "write", gated)


def lines(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics("train")]


def in_a_thread(work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_training_goes_on_while_rollouts_are_written_and_metrics_wait_for_them(run, monkeypatch):
    gate = Gate(writer := RolloutWriter(run), monkeypatch)
    for step in (0, 1):
        writer.write(step, [group(step)])
        writer.log(step, "train", {"x": step})
    assert lines(run) == [] and list(run.rollout_files()) == []
    gate.open.release()
    gate.open.release()
    writer.finish()
    assert lines(run) == [0, 1] == list(run.rollout_files()) and gate.begun == [0, 1]
    writer.close()


def test_only_so_many_steps_are_under_way(run, monkeypatch):
    gate = Gate(writer := RolloutWriter(run), monkeypatch)
    for step in range(MOST_UNDER_WAY):
        writer.write(step, [group(step)])
        writer.log(step, "train", {})
    third = in_a_thread(lambda: writer.write(MOST_UNDER_WAY, [group(MOST_UNDER_WAY)]))
    third.join(0.2)
    assert third.is_alive() and lines(run) == []
    gate.open.release()  # one is written, and there is room again
    third.join(60)
    assert not third.is_alive() and lines(run) == [0]
    for _ in range(MOST_UNDER_WAY):
        gate.open.release()
    writer.close()
    assert list(run.rollout_files()) == [0, 1, 2] and lines(run) == [0, 1]  # the last has no metrics yet


def test_a_validation_comes_after_the_steps_before_it(run, monkeypatch):
    gate = Gate(writer := RolloutWriter(run), monkeypatch)
    writer.write(0, [group(0)])
    writer.log(0, "train", {})
    in_a_thread(gate.open.release)
    writer.log(1, "validation", {"eval/metric": 0.5})
    kinds = [line.split('"kind": "')[1].split('"')[0] for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["train", "validation"]
    writer.log(1, "train", {"x": 1})  # of a run without rollouts (sft): at once
    assert lines(run) == [0, 1]
    writer.close()


@pytest.mark.parametrize("meets", ["next write", "finish", "other line"])
def test_a_write_that_fails_is_raised_later_and_nothing_is_written_after_it(run, monkeypatch, meets):
    writer = RolloutWriter(run)
    write = writer.files.write

    def full(step: int, groups: Any) -> dict[str, str]:
        if step == 1:
            raise StoreError("cannot write: No space left on device", where="disk")
        return write(step, groups)

    monkeypatch.setattr(writer.files, "write", full)
    for step in range(MOST_UNDER_WAY + 1):
        writer.write(step, [group(step)])
        if step != 1:
            writer.log(step, "train", {}) if step == 0 else None
    with pytest.raises(StoreError, match="No space left"):
        {
            "next write": lambda: writer.write(9, [group(9)]),
            "finish": writer.finish,
            "other line": lambda: writer.log(5, "validation", {}),
        }[meets]()
    writer.close()
    assert list(run.rollout_files()) == [0] and lines(run) == [0] and run.metrics("validation") == []
    assert "since an earlier write failed" in run.log_path().read_text()


def test_what_a_failing_run_had_sampled_is_kept(run):
    """An error between the rollouts and the metrics of a step: the rollouts show why."""
    writer = RolloutWriter(run)
    writer.write(0, [group(0)])
    writer.close()
    assert list(run.rollout_files()) == [0] and lines(run) == []


def test_old_rollouts_go_in_order(run):
    writer = RolloutWriter(run, RolloutRule(keep=2, every=3))
    for step in range(7):
        writer.write(step, [group(step)])
        writer.log(step, "train", {})
    writer.close()
    assert list(run.rollout_files()) == [0, 3, 5, 6] and pruned_ranges(run.dir) == [range(1, 3), range(4, 5)]
    assert lines(run) == list(range(7))


@pytest.mark.slow
@pytest.mark.parametrize("hit", [1, 2, 4])
def test_killed_while_a_step_is_written_no_step_has_metrics_without_rollouts(tmp_path, hit):
    made = create_run(tmp_path, kind="rl", recipe_name="digits")
    made.close()
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_rollout_writer import *
run = resume_run({str(tmp_path)!r}, {made.id!r})
writer = RolloutWriter(run)
for step in range(6):
    writer.write(step, [group(step)])
    writer.log(step, "train", {{"rollout/samples": 1}})
writer.close()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, VARIABLE: f"mid-rollout:{hit}"}, capture_output=True, text=True
    )
    assert done.returncode == EXIT_CODE, done.stderr
    reader = open_run(tmp_path, made.id)
    assert list(reader.rollout_files()) == list(range(hit - 1))
    assert lines(reader) == list(range(len(lines(reader)))) and len(lines(reader)) < hit
    assert not verify_run(made.dir).errors
    with resume_run(tmp_path, made.id) as again:
        writer = RolloutWriter(again)
        writer.write(0, [group(0)])
        writer.log(0, "train", {"rollout/samples": 1})
        writer.close()
    assert not verify_run(made.dir).errors
