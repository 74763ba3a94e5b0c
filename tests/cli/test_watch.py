"""`vlmrl runs watch`: what another terminal sees of a run that this process writes."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import own_process, started, this_process
from rich.console import Console

from vlmrl.cli.output import table_lines
from vlmrl.cli.run_screens import columns, step_table, waiting_text
from vlmrl.store import layout
from vlmrl.store.runs import Run, create_run, resume_run
from vlmrl.store.summary import Followed, phase_seconds

STEPS = 5


def train_line(step: int) -> dict[str, float]:
    return {
        "reward/mean": step / 10, "rollout/response_tokens_mean": 18.2, "rollout/response_tokens_max": 31,
        "policy/sampler_gap_max": 2.5e-6, "rollout/tokens_per_second": 1234.0, "memory/peak_bytes": 3 * 2**29,
        "time/rollout_seconds": 2.0, "time/update_seconds": 3.0, "time/reward_seconds": 0.1, "time/step_seconds": 5.2,
    }  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    resolved = {"schema": 1, "recipe": {"train": {"steps": STEPS}}, "origins": {}}
    made = create_run(tmp_path / "runs", kind="rl", recipe_name="digits", resolved=resolved, name="mine")
    yield made
    made.close()


def watching(run: Run, **streams) -> subprocess.Popen:
    return started("runs", "watch", "mine", "--every", "0.05", "--runs", ".", cwd=run.dir.parent, **streams)


def test_what_a_run_waits_for_is_shown_until_the_service_answers(run: Run) -> None:
    followed = Followed(run.dir)
    assert followed.waits_for is None and waiting_text(followed) == ""
    run.log(0, "train", train_line(0))
    run.event(1, "waiting for a service", reason="no answer from judge:8000", samples=3)
    run.event(1, "checkpoint saved", folder="step-000001")
    followed.look()
    text = waiting_text(followed)
    assert text.startswith("waiting for a service for ") and text.endswith(": no answer from judge:8000")
    run.event(1, "service answers", waited=61.0)
    followed.look()
    assert waiting_text(followed) == ""


@pytest.mark.slow
def test_a_pipe_gets_a_line_a_step_as_it_is_written_and_the_end_when_the_run_ends(run: Run) -> None:
    run.log(0, "train", train_line(0))
    watch = watching(run)
    assert watch.stdout is not None
    first = watch.stdout.readline()
    assert first == (
        "step 1/5  reward 0.000  length 18/31  gap 2.5e-06  tok/s 1,234  memory 1.5 GiB  seconds 5.2"
        "  phases update 3.0 rollout 2.0 reward 0.1\n"
    )
    run.log(1, "train", train_line(1))
    assert watch.stdout.readline().startswith("step 2/5  reward 0.100")
    with open(run.dir / layout.METRICS, "a") as file:
        file.write('{"step": 2, "attempt": 1, "kind": "train", "rew')  # half a line is not shown
    assert watch.poll() is None, "it ended although the run goes on"
    run.finish("interrupted")
    rest, told = watch.communicate(timeout=60)
    assert (watch.returncode, rest) == (0, "")
    assert told == f"{run.id}: interrupted after 2 steps; continue with: vlmrl train --resume mine --runs .\n"


@pytest.mark.slow
def test_a_terminal_gets_one_table_with_the_time_to_the_end(run: Run) -> None:
    for step in range(3):
        run.log(step, "train", train_line(step))
    run.log(2, "validation", {"eval/metric": 0.75})
    ours, theirs = pty.openpty()
    watch = watching(run, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "150"})
    os.close(theirs)
    seen = b""
    while b"min" not in seen and b" s left" not in seen:
        seen += os.read(ours, 4096)
    run.finish("done")
    try:
        while data := os.read(ours, 4096):
            seen += data
    except OSError:  # how a terminal ends on Linux
        pass
    assert watch.wait(60) == 0
    text = seen.decode()
    for word in (
        "step 3/5",
        "validation at step 2: 0.7500",
        "reward",
        "18/31",
        "update 3.0",
        "1.5 GiB",
        "done after 3",
    ):
        assert word in text, text
    os.close(ours)


@pytest.mark.slow
def test_a_run_that_has_ended_is_shown_at_once_and_json_is_one_object(run: Run) -> None:
    run.log(0, "train", train_line(0))
    run.finish("done")
    done = own_process("runs", "watch", "--runs", run.dir.parent, cwd=run.dir.parent)
    assert done.code == 0 and done.out.startswith("step 1/5") and "done after 1 step" in done.err
    told = this_process("runs", "watch", "mine", "--json", "--runs", run.dir.parent, cwd=run.dir.parent).json
    assert (told["status"], told["steps"], told["of"], told["last"]["step"]) == ("done", 1, STEPS, 0)


def test_a_killed_owner_ends_the_watch(run: Run) -> None:
    run.log(0, "train", train_line(0))
    run.close()
    done = this_process("runs", "watch", "mine", "--runs", run.dir.parent, cwd=run.dir.parent)
    again = f"vlmrl train --resume mine --runs {run.dir.parent}"
    assert done.code == 0 and f"killed after 1 step; continue with: {again}\n" in done.err


def test_steps_of_an_attempt_that_a_resume_made_void_are_counted_once(run: Run) -> None:
    for step in range(3):
        run.log(step, "train", train_line(step))
    followed = Followed(run.dir)
    assert [n["step"] for n in followed.lines()] == [0, 1, 2]
    run.close()
    again = resume_run(run.dir.parent, run.id)
    again.log(0, "train", {**train_line(0), "reward/mean": 0.9})
    assert followed.look()
    assert [(n["step"], n["reward/mean"]) for n in followed.lines()] == [(0, 0.9)]
    again.finish("done")
    assert not followed.look()


def test_the_time_left_is_that_of_the_steps_left_at_the_pace_of_the_lines(run: Run) -> None:
    times = ["2026-01-01T00:00:00+00:00", "2026-01-01T00:00:10+00:00", "2026-01-01T00:00:30+00:00"]
    lines = [{"step": n, "attempt": 1, "kind": "train", "time": t} for n, t in enumerate(times)]
    (run.dir / layout.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    # Two steps took 30 s, 15 s each; after step 2 of 0 to 4 two are left.
    assert Followed(run.dir).seconds_left == 30.0
    (run.dir / layout.METRICS).unlink()
    assert Followed(run.dir).seconds_left is None


def test_phases_are_the_longest_first_without_the_step_itself() -> None:
    lines = [train_line(0), {**train_line(1), "time/rollout_seconds": 6.0}]
    assert list(phase_seconds(lines).items()) == [("rollout", 4.0), ("update", 3.0), ("reward", 0.1)]


def test_a_reward_of_one_number_is_said_once():
    from vlmrl.cli.progress import _step_parts

    line = {"reward/mean": 0.481, "reward/part/reward": 0.481, "rollout/dead_group_share": 0.0,
            "rollout/truncated_share": 0.0, "rollout/response_tokens_mean": 4.0,
            "rollout/tokens_per_second": 9.0, "time/step_seconds": 1.0, "memory/peak_bytes": 0}  # fmt: skip
    assert " ".join(_step_parts(line)).count("reward") == 1
    assert "acc 0.25" in _step_parts(line | {"reward/part/acc": 0.25})
    both = {"reward/accuracy": 0.25, "reward/part/accuracy": 0.25, "reward/part/near": 0.5}
    assert [part for part in _step_parts(line | both) if "accuracy" in part] == ["accuracy 0.250"]
    measured = _step_parts(line | both | {"reward/accuracy": 0.75})
    assert {"accuracy 0.750", "accuracy 0.25"} <= {*measured}, "the task measures another thing"


def test_a_table_of_a_narrow_terminal_has_smaller_gaps_then_fewer_columns_then_shorter_cells():
    cells = [["run", "best", "about"], ["20261130-a", "reward 0.5", "x" * 40], ["b", "漢字漢字漢字漢字漢字漢字", ""]]
    shown, left_out = table_lines(cells, 60, ("best",))  # 10 + 2 + 24 + 2 + 22
    assert shown[1] == f"20261130-a  reward 0.5{' ' * 14}  {'x' * 19}..." and left_out == []
    shown, left_out = table_lines(cells, 53, ("best",))  # 10 + 1 + 24 + 1 + 17
    assert shown[1] == f"20261130-a reward 0.5{' ' * 14} {'x' * 14}..." and left_out == []
    shown, left_out = table_lines(cells, 50, ("best",))
    assert shown[1] == f"20261130-a  {'x' * 35}..." and left_out == ["best"]
    shown, left_out = table_lines(cells, 50, ())  # 10 + 1 + 22 + 1 + 16
    assert (
        shown[1:] == [f"20261130-a reward 0.5{' ' * 12} {'x' * 13}...", "b          漢字漢字漢字漢字漢..."]
        and left_out == []
    )


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_of_steps_fits_on_a_line_each(tmp_path, columns):
    with create_run(tmp_path, kind="rl", recipe_name="r") as run:
        metrics = {
            "reward/mean": 0.25,
            "reward/accuracy": 0.5,
            "rollout/response_tokens_mean": 12.0,
            "rollout/response_tokens_max": 32.0,
            "rollout/truncated_share": 0.0,
            "rollout/dead_group_share": 1.0,
            "policy/sampler_gap_max": 9.5e-6,
            "policy/entropy": 0.37,
            "loss/kl": 0.0138,
            "rollout/tokens_per_second": 2091.0,
            "memory/peak_bytes": 2.0**30,
            "time/step_seconds": 0.4,
            "time/rollout_seconds": 0.2,
            "time/update_seconds": 0.1,
            "health/warning": "reward up, accuracy down: look at the responses",
        }
        for step in range(3):
            run.log(step, "train", metrics)
    followed = Followed(run.dir)
    followed.look()
    stream = io.StringIO()
    Console(file=stream, width=columns).print(step_table(followed, columns, 40))
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= columns and len(lines) == 6, "two lines of facts, the names, one line per step"
    assert ("gap" in lines[2]) == (columns == 120) and "accuracy" in lines[2]
    assert lines[3].startswith("1 ") and "0.250" in lines[3] and "reward up" in lines[3]
    assert " kl " in lines[2] and " 0.014 " in lines[3]


@pytest.mark.parametrize("metric", ["loss/kl", "policy/kl_in_reward"])
def test_a_step_shows_the_kl_that_it_is_trained_on(metric):
    from vlmrl.cli.progress import _step_parts

    line = {**train_line(0), "rollout/truncated_share": 0.0, metric: 0.0138}
    assert "kl 0.014" in _step_parts(line) and columns(line)["kl"] == "0.014"
    del line[metric]
    assert not any(part.startswith("kl") for part in _step_parts(line)) and columns(line)["kl"] == ""
