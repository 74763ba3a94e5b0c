"""What a run warns of is said where people look: the line of a step, `watch`, the last line, the report, `diagnose`."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from command_line import this_process

from vlmrl.cli.progress import ConsoleWatcher
from vlmrl.cli.train import closing_lines, result_fields
from vlmrl.store.runs import Run, create_run, open_run
from vlmrl.train.journal import Health
from vlmrl.types import Group, Row, Score, ScoredSample, Segment, Trajectory

STEPS = 30
BEGINS = 12
"""The first step of which all responses are digits."""
REST = {
    "rollout/tokens_per_second": 1.0, "memory/peak_bytes": 1, "time/step_seconds": 0.1, "rollout/truncated_share": 0.0,
    "rollout/response_tokens_mean": 9.0, "rollout/dead_group_share": 0.0,
}  # fmt: skip


def group_of(step: int, number: int) -> Group:
    text = f"{'3134' * 30}{number}" if step >= BEGINS else f"the left one is open and closed at the top {number}"
    samples = []
    for k in range(2):
        t = Trajectory(
            "d", f"{step}-{number}", 0, k, step, 0, (1, 2), (Segment("assistant", (1,), True, (0.0,)),), (), "stop"
        )
        samples.append(ScoredSample(t, f"{text}{k}", Score(float(k), {}), 0.0, False))
    return Group(Row(f"{step}-{number}", "d", "digits", {"same": bool(number % 2)}), "prompt", tuple(samples))


def metrics_of(step: int) -> dict[str, float]:
    noise = 0.02 * (-1) ** step
    return {"reward/mean": (0.99 if step >= BEGINS else 0.2) + noise, "reward/accuracy": 0.2 - noise, **REST}


def train(run: Run, steps: range) -> list[str]:
    """Write the lines of these steps as training does. Returns what the console showed of each."""
    health, stream = Health(run), io.StringIO()
    watcher = ConsoleWatcher(stream)
    for step in steps:
        metrics = metrics_of(step) | health.measure([group_of(step, n) for n in range(4)])
        metrics |= health.warn(step, metrics)
        run.log(step, "train", metrics)
        watcher.step(step, STEPS, metrics)
    return stream.getvalue().splitlines()


@pytest.fixture
def hacked(tmp_path: Path) -> tuple[Run, list[str]]:
    with create_run(tmp_path / "runs", kind="rl", recipe_name="r", name="hacked") as run:
        shown = train(run, range(STEPS))
    return open_run(tmp_path / "runs", run.id), shown


WORDS = "reward up, accuracy flat"


@pytest.mark.slow
def test_the_line_of_a_step_warns_soon_after_the_change_and_not_before(hacked):
    _, shown = hacked
    assert not any(" ! " in line for line in shown[: BEGINS + 5])
    assert all(f"  ! {WORDS}" in line for line in shown[BEGINS + 6 :])
    assert shown[-1].endswith("digits 4% -> 100%")


@pytest.mark.parametrize(
    ("values", "best", "expected"),
    [
        ([0.35, 0.3], 0, "0.3500 at step 0, the model it started from: no later validation was better than the start"),
        ([0.35, 0.35], 1, "0.3500 at step 1 (not kept), as at step 0: no later validation was better than the start"),
        ([0.35, 0.4], 1, "0.4000 at step 1 (not kept)"),
        ([0.35], 0, "0.3500 at step 0, the model it started from"),
    ],
)
def test_the_last_line_says_when_no_validation_was_better_than_the_start(tmp_path, values, best, expected):
    with create_run(tmp_path, kind="rl", recipe_name="r") as run:
        for step, value in enumerate(values):
            run.log(step, "validation", {"eval/metric": value})
        run.set_best(best, "reward", values[best])
    assert closing_lines(run).splitlines()[0].partition("; best reward ")[2] == expected


@pytest.mark.slow
def test_an_attempt_that_goes_on_knows_the_steps_before_it(hacked, tmp_path):
    _, shown = hacked
    with create_run(tmp_path / "parts", kind="rl", recipe_name="r") as run:
        first = train(run, range(20))
        rest = train(run, range(20, STEPS))
    cut = lambda lines: [line.partition("  left ")[2].partition("  ! ")[2] for line in lines]  # noqa: E731
    assert cut(first + rest) == cut(shown)


@pytest.mark.slow
def test_watch_the_last_line_its_json_the_report_and_diagnose_say_it(hacked, tmp_path):
    run, _ = hacked
    assert f"  ! {WORDS}, from step {BEGINS + 1} on" in closing_lines(run).splitlines()[0]
    assert "\nwhy: vlmrl runs diagnose hacked" in closing_lines(run)
    warnings = {w["name"]: w for w in result_fields(run)["warnings"]}
    assert warnings["reward_without_accuracy"]["step"] == BEGINS
    root = ("--runs", run.dir.parent)
    assert f"! {WORDS}" in this_process("runs", "watch", run.id, *root, cwd=tmp_path).out.splitlines()[-1]
    this_process("report", run.id, *root, "-o", tmp_path / "r.html", cwd=tmp_path)
    page = (tmp_path / "r.html").read_text()
    assert "the reward rose from 0.200 to 0.990 while the accuracy stayed" in page and "Digits (share of" in page
    found = this_process("runs", "diagnose", run.id, *root, "--json", cwd=tmp_path).json
    assert found["causes"][0]["name"] == "reward_without_accuracy" and not found["healthy"]


@pytest.mark.slow
def test_a_process_that_does_not_write_the_run_measures_nothing(hacked):
    health = Health(hacked[0])  # opened for reading
    assert health.measure([group_of(0, 0)]) == {} and health.warn(0, metrics_of(0)) == {}
