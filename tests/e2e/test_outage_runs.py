"""Runs whose reward needs a service that is down for a while: they wait, mask or stop, and no sample is scored 0."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import time
import zlib
from pathlib import Path

import pytest
from command_line import settings, started
from judge_service import Judge
from small_runs import Ears, assert_same_run, begin, events, finite, go_on, make_place, rollouts, train

from vlmrl.errors import RewardUnavailable, exit_of
from vlmrl.rewards import attempts
from vlmrl.store.runs import open_run

pytestmark = pytest.mark.slow
STEPS = """
rollout = {prompts_per_step = 3, samples_per_prompt = 3, max_new_tokens = 8, temperature = 0.9}
train = {steps = 4, tokens_per_row = 300}
optim.lr = 1e-3
eval = {every_steps = 2, max_rows = 4, at_start = false}
checkpoint = {every_steps = 0, keep_last = 9}
reward.workers = 2
"""
REWARD = """
import pathlib
from vlmrl import RewardUnavailable
HERE = pathlib.Path(__file__)
def score(x):
    down = HERE.with_name("down")
    if down.exists() and (down.read_text() == "all" or x.sample == 1):
        raise RewardUnavailable("no answer from judge:8000")
    return {"length": min(1.0, x.num_tokens / 8), "letters": len(set(x.response)) / 40}
"""


class Switch(Ears):
    """Watcher that lets the service die after a step, and calls `then` when the run says that it waits."""

    def __init__(self, place: Path, after: int, then=None, how: str = "some") -> None:
        super().__init__()
        self.down, self.after, self.then, self.how = place / "down", after, then or self.up, how

    def up(self) -> None:
        self.down.unlink()

    def step(self, step, total, metrics) -> None:
        if step == self.after:
            self.down.write_text(self.how)

    def message(self, text: str) -> None:
        super().message(text)
        if text.startswith("waiting for a service") and self.down.exists():
            self.then()


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, STEPS, reward=REWARD)


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory):
    """The run without an outage."""
    return train(place, tmp_path_factory.mktemp("whole"))


@pytest.fixture(autouse=True)
def quick(place, monkeypatch):
    monkeypatch.setattr(attempts.AttemptRule, "first_seconds", 0.05)
    monkeypatch.setattr("vlmrl.rewards.scoring.TICK_SECONDS", 0.05)
    yield
    (place / "down").unlink(missing_ok=True)


@pytest.mark.parametrize(("after", "how"), [(0, "some"), (1, "all")])
def test_a_run_that_waits_is_the_run_without_the_outage(place, whole, tmp_path, after, how):
    """After step 1 comes a validation: that waits, too."""
    ears = Switch(place, after, how=how)
    run, status = begin(place, tmp_path, ears=ears)
    assert status == "done" and not (place / "down").exists()
    assert_same_run(run, whole)
    assert any("no answer from judge:8000" in text for text in ears.heard)
    assert any("answers again" in text for text in ears.heard)
    (begun,) = events(run, "waiting for a service")
    assert begun["step"] == after + 1 and events(run, "service answers")
    if after == 0:
        waited = [line.get("reward/outage_seconds", 0.0) > 0 for line in run.metrics("train")]
        assert waited == [False, True, False, False]


@pytest.mark.parametrize("setting", ["reward.on_unavailable=stop", "reward.outage_minutes=0.002"])
def test_a_run_that_stops_goes_on_at_that_step_with_the_same_tokens(place, whole, tmp_path, setting):
    with pytest.raises(RewardUnavailable, match="no answer from judge:8000") as caught:
        begin(place, tmp_path, setting, ears=Switch(place, 0, then=lambda: None))
    assert exit_of(caught.value)[0] == 75 and "--resume" in str(caught.value.hint)
    (folder,) = tmp_path.glob("*/checkpoints")
    assert [checkpoint.name for checkpoint in folder.iterdir()] == ["step-000001"]
    run = open_run(tmp_path, folder.parent.name)
    assert list(run.rollout_files()) == [0] and run.status == "failed"
    (place / "down").unlink()
    run, status = go_on(run)
    assert status == "done"
    assert_same_run(run, whole)


def test_a_run_that_cannot_even_validate_its_start_goes_on_there(place, tmp_path):
    settings = ("eval.at_start=true", "train.steps=2")
    whole = train(place, tmp_path / "whole", *settings)
    ears = Switch(place, -1, then=lambda: None)
    ears.down.write_text("all")
    with pytest.raises(RewardUnavailable):
        begin(place, tmp_path / "runs", *settings, "reward.outage=stop", ears=ears)
    run = open_run(tmp_path / "runs", "last")
    assert [checkpoint.name for checkpoint in run.checkpoint_dirs()] == ["step-000000"]
    ears.down.unlink()
    run, status = go_on(run)
    assert status == "done"
    assert_same_run(run, whole)


@pytest.mark.parametrize("after", [0, 1])
def test_ctrl_c_ends_a_wait_and_the_run_goes_on_at_that_step(place, whole, tmp_path, after):
    """The second is a wait within a validation: it is made after the resume."""
    ears = Switch(place, after, then=lambda: os.kill(os.getpid(), signal.SIGINT), how="all")
    run, status = begin(place, tmp_path, ears=ears)
    assert status == run.status == "interrupted"
    (place / "down").unlink()
    run, status = go_on(run)
    assert status == "done"
    assert_same_run(run, whole)


def test_a_step_that_is_masked_as_a_whole_is_recorded_and_changes_no_weight(place, tmp_path):
    ears = Switch(place, 0, how="all")
    ears.step = lambda step, total, metrics, own=ears.step: (
        own(step, total, metrics) if step == 0 else ears.down.unlink(missing_ok=True)
    )
    run, status = begin(place, tmp_path, "reward.outage=mask", "eval.every_steps=0", ears=ears)
    assert status == "done"
    lines = run.metrics("train")
    assert [line["optim/updates"] for line in lines] == [1, 1, 2, 3] and all(map(finite, lines))
    assert (lines[1]["reward/unavailable"], lines[1]["reward/errors"]) == (9, 0) and "reward/mean" not in lines[1]
    samples = [s for group in run.read_rollouts(1) for s in group.samples]
    assert all(s.masked and s.score.status == "unavailable" and math.isnan(s.score.value) for s in samples)
    assert all(s.advantage == 0.0 for s in samples) and len(rollouts(run)) == 4


def test_masked_samples_are_left_out_of_the_advantages(place, tmp_path):
    ears = Switch(place, -1)
    ears.down.write_text("some")
    run, status = begin(place, tmp_path, "reward.outage=mask", "train.steps=1", "eval.every_steps=0", ears=ears)
    assert status == "done", "not in the first steps either does an outage end a run that masks"
    for group in run.read_rollouts(0):
        first, down, last = group.samples
        assert down.masked and down.advantage == 0.0 and not first.masked
        assert first.advantage == pytest.approx(-last.advantage)  # of the two that have a score


BOMBS = """
import os
import zlib
ON_TIMEOUT = {{"length": -1.0}}
def score(x):
    kind = zlib.crc32(x.response.encode()) % 9
    if {armed} and kind == 0:
        os._exit(3)
    if {armed} and kind == 1:
        return {{"length": float(len(bytearray(1 << 40)))}}
    return {{"length": len(set(x.response)) / 40}}
"""


def test_bombs_among_good_responses_earn_on_timeout_and_change_no_other(place, tmp_path):
    scores = {}
    for armed in (False, True):
        (place / "bombs.py").write_text(BOMBS.format(armed=armed))
        settings = (f'reward.name="{place}/bombs.py:score"', "train.steps=1", "rollout.prompts_per_step=12")
        run, status = begin(place, tmp_path / str(armed), *settings, "eval.every_steps=0")
        assert status == "done"
        scores[armed] = [(s.text, s.score) for group in run.read_rollouts(0) for s in group.samples]
    bombs = 0
    for (text, score), (same, plain) in zip(scores[True], scores[False], strict=True):
        assert text == same and score.status == plain.status == "ok"
        kind = zlib.crc32(text.encode()) % 9
        if kind > 1:
            assert score == plain
        else:
            bombs += 1
            why = ("exit code 3", "MemoryError")[kind]
            assert score.value == -1.0 and why in score.note and score.note.endswith("scored as `on_timeout`")
    assert bombs >= 3 and run.metrics("train")[0]["reward/timeouts"] == bombs


def test_two_processes_wait_for_a_service_that_is_killed_and_started_again(place, tmp_path):
    """The whole command, with a real service."""
    (tmp_path / "runs").mkdir()
    with Judge() as judge:
        judge.write_reward(tmp_path / "judge.py")
        words = ("train", place / "rl.toml", "--gpus", "2", "--runs", "runs")
        more = settings('reward.name="judge.py:score"', "train.steps=5", "eval.every_steps=0")
        command = started(*words, *more, cwd=tmp_path, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob("runs/*/rollouts/*")) and time.monotonic() < deadline:
                assert command.poll() is None, command.communicate()
                time.sleep(0.02)
            judge.kill()
            log = awaited_text(tmp_path, "waiting for a service", command)
            assert "the judge does not answer" in log
            judge.start()
            _, err = command.communicate(timeout=180)
        finally:
            command.kill()
    assert command.returncode == 0 and "answers again" in err
    run = open_run(tmp_path / "runs", "last")
    samples = [s for step in run.rollout_files() for group in run.read_rollouts(step) for s in group.samples]
    assert len(samples) == 5 * 9 and all(s.score.status == "ok" and s.score.value >= 0.25 for s in samples)
    assert [line["step"] for line in run.metrics("train")] == list(range(5))
    assert sum(line.get("reward/outage_seconds", 0.0) for line in run.metrics("train")) > 0


def awaited_text(folder: Path, text: str, command: subprocess.Popen[str]) -> str:
    """The log of the first process, once it has the text."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for log in folder.glob("runs/*/logs/attempt-*/rank-0.log"):
            if text in (content := log.read_text()):
                return content
        assert command.poll() is None, command.communicate()
        time.sleep(0.05)
    raise AssertionError(f"the run never wrote: {text}")
