"""`vlmrl train --gpus 2` as a person runs it, with real ranks: how it ends, what it says, and how it goes on."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_line import started, this_process
from processes import END_SECONDS, assert_all_gone, below, free_endpoint
from small_runs import answers, make_place, paying

from vlmrl.checkpoint import io
from vlmrl.store.runs import Run, open_run
from vlmrl.store.verify import verify_run

pytestmark = pytest.mark.slow
FILE_LIMIT = 200_000
"""Bytes that a file may have on a disk that is full: metrics and rollouts fit, no rank's shard of the weights does."""
REWARD = f"""
import os
{paying(tokens=8, letters=4)}
def breaks(x):
    if os.environ["RANK"] == "1":
        raise ZeroDivisionError(f"the divisor of {{x.columns.get('prompt_id', 'a row')}} is gone")
    return score(x)
"""
RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 8}
train.steps = 12
optim.lr = 1e-3
eval = {every_steps = 0, max_rows = 2}
checkpoint.every_steps = 2
"""


@dataclass
class Command:
    """A `vlmrl` command that runs, and the beats of its ranks."""

    process: subprocess.Popen[str]
    tmp: Path

    def beat(self, rank: int) -> dict:
        """What a rank last said of itself; {} = nothing yet."""
        for path in self.tmp.glob(f"vlmrl-launch-*/rank-{rank}.beat"):
            try:
                return json.loads(path.read_bytes())
            except (ValueError, FileNotFoundError):
                pass
        return {}

    def until(self, reached: Callable[[dict], bool], rank: int = 1, seconds: float = 200.0) -> dict:
        """Wait until a rank's beat is so. Not by the clock: a machine that stands still is no failure."""
        for _ in range(int(seconds / 0.002)):
            if (state := self.beat(rank)) and reached(state):
                return state
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.002)
        raise AssertionError(f"rank {rank} never came there: {self.beat(rank)}")

    def tree(self) -> list[int]:
        """The command's process and all that it and they started."""
        return [self.process.pid, *below(self.process.pid)]

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=400)
        return self.process.returncode, out, err


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    return make_place(tmp_path_factory.mktemp("real-launch"), tiny_folder, RECIPE, reward=REWARD, pairs=20)


@pytest.fixture(scope="module")
def start(place: Path):
    """Start `vlmrl` with these words: `start("train", ..., file_limit=None)`. What is left is killed at the end."""
    commands: list[Command] = []

    def go(*words: str, file_limit: int | None = None) -> Command:
        tmp = place / f"tmp-{len(commands)}"
        tmp.mkdir()
        env = os.environ | {"TMPDIR": str(tmp), "CUDA_VISIBLE_DEVICES": ""}
        limit = None
        if file_limit is not None:
            limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))  # noqa: E731
        process = started(*words, cwd=place, env=env, preexec_fn=limit, start_new_session=True)
        commands.append(Command(process, tmp))
        return commands[-1]

    yield go
    for command in commands:
        pids = command.tree() if command.process.poll() is None else []
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        command.process.communicate()


def resume_words(err: str) -> list[str]:
    """The command that goes on, as it was printed."""
    found = re.findall(r"(?:continue|go on|resume) .*with: vlmrl (.+)", err)
    assert len(found) == 1, err
    return shlex.split(found[0])


def run_in(place: Path, root: str) -> Run:
    return open_run(place / root, "last")


@dataclass
class Ended:
    """How a run of two ranks ended."""

    code: int
    err: str
    pids: list[int]
    seconds: float
    beat: dict


@pytest.fixture(scope="module")
def killed(start) -> Ended:
    """Rank 1 was killed in an update."""
    command = start("train", "rl.toml", "--gpus", "2", "--runs", "killed", "--json")
    beat = command.until(lambda s: s["phase"] == "update" and s["step"] >= 3)
    pids, began = command.tree(), time.monotonic()
    os.kill(beat["pid"], signal.SIGKILL)
    beat = command.beat(1)
    code, out, err = command.end()
    assert out == ""
    return Ended(code, err, pids, time.monotonic() - began, beat)


@pytest.fixture(scope="module")
def finished(start, killed: Ended) -> tuple[int, str, str]:
    """That run, gone on with as the killed one said."""
    return start(*resume_words(killed.err), "--json").end()


def test_a_rank_killed_in_an_update_ends_all_and_is_named_on_the_screen_and_in_the_record(place, killed) -> None:
    assert killed.code == 2 and killed.seconds < END_SECONDS
    told = f"rank 1 was killed by SIGKILL in phase `{killed.beat['phase']}` of step {killed.beat['step']}"
    assert f"error: {told}\n" in killed.err and "Traceback" not in killed.err and "onnection" not in killed.err
    assert len(killed.pids) >= 5  # the launcher, two ranks, a reward worker each
    assert_all_gone(killed.pids, 5)
    assert "--gpus 2 --runs killed" in killed.err
    assert open_run(place / "killed", "last").manifest.attempts[0].status in ("failed", "killed")


def test_the_resume_line_of_a_killed_run_works_and_prints_one_object(place, killed, finished) -> None:
    code, out, err = finished
    assert code == 0, err
    assert json.loads(out)["status"] == "done" and json.loads(out)["steps"] == 12
    assert f"resuming {run_in(place, 'killed').id} (attempt 2) from checkpoint step-" in err
    for noise in ("Loading weights", "Writing model shards", "Warning", "gloo", "it/s"):
        assert noise not in err + killed.err
    attempts = run_in(place, "killed").manifest.attempts
    assert len(attempts) == 2 and attempts[1].from_step >= 2
    for attempt in attempts:  # the ranks run without the launch options; the record has them
        assert "--gpus 2" in " ".join(attempt.argv)


def test_every_command_reads_a_run_of_two_ranks(place, finished) -> None:
    run = run_in(place, "killed")
    assert verify_run(run.dir).errors == []
    options = ("--runs", "killed", "--json")
    assert this_process("runs", "show", run.id, *options, cwd=place).json["status"] == "done"
    watched = this_process("runs", "watch", run.id, "--runs", "killed", cwd=place)
    assert watched.code == 0 and "step 12/12" in watched.out + watched.err, watched
    page = place / "report.html"
    assert this_process("report", run.id, "--runs", "killed", "-o", page, cwd=place).code == 0 and page.stat().st_size
    merged = this_process(
        "merge", run.id, "--checkpoint", "last", "--out", "merged", "--skip-proof", *options, cwd=place
    )
    assert merged.code == 0 and (place / "merged" / "config.json").is_file(), merged.err
    words = ("eval", run.id, "--checkpoint", "last", "--split", "validation", "--max-rows", "2")
    assert this_process(*words, *options, cwd=place).code == 0


@pytest.fixture(scope="module")
def stopped(place: Path, start) -> tuple[int, str, Run]:
    """SIGTERM came to the launcher in a step."""
    command = start("train", "rl.toml", "--gpus", "2", "--runs", "stopped", "--set", "train.steps=300")
    command.until(lambda s: s["phase"] == "rollout" and s["step"] >= 3)
    pids = command.tree()
    command.process.send_signal(signal.SIGTERM)
    code, _, err = command.end()
    assert_all_gone(pids, 5)
    return code, err, run_in(place, "stopped")


def test_sigterm_finishes_the_step_saves_on_both_and_says_how_to_go_on(stopped) -> None:
    code, err, run = stopped
    assert code == 130 and run.status == "interrupted" and "error" not in err and "Traceback" not in err
    checkpoint = run.checkpoint_dirs()[-1]
    assert int(checkpoint.name[-6:]) == len(run.metrics("train")) >= 3
    assert {f.name[:11] for f in (checkpoint / "model").glob("*.safetensors")} == {"shard-00001", "shard-00002"}
    assert err.count("stopping after this step") == 1 and f"saved {checkpoint.name}" in err
    assert resume_words(err)[:3] == ["train", "--resume", run.id]


def test_a_disk_that_fills_while_both_save_is_told_in_words_and_older_checkpoints_stay(place, start, stopped) -> None:
    _, err, run = stopped
    before = [(folder, io.check_files(folder)) for folder in run.checkpoint_dirs()]
    code, out, err = start(*resume_words(err), file_limit=FILE_LIMIT).end()
    assert code == 2 and out == "" and "Traceback" not in err, err
    found = re.search(r"error: the checkpoint of step (\d+) could not be saved: .*File too large", err)
    assert found, err
    assert "older checkpoints are untouched" in err
    run = run_in(place, "stopped")
    assert run.status == "failed" and "could not be saved" in (run.manifest.error or "")
    assert [(folder, io.check_files(folder)) for folder in run.checkpoint_dirs()] == before
    assert not (run.dir / "checkpoints" / f"step-{int(found[1]):06d}").exists()
    assert verify_run(run.dir).errors == []


def test_a_users_error_on_one_rank_alone_is_the_one_shown_and_recorded(place, start) -> None:
    words = ("train", "rl.toml", "--gpus", "2", "--runs", "broken", "--set", "reward.name=reward.py:breaks")
    command = start(*words, "--set", "eval.max_rows=1")
    code, out, err = command.end()
    assert code == 2 and out == "", err
    assert err.count("error: ") == 1 and "ZeroDivisionError: the divisor of" in err and "reward.py" in err
    assert "(on rank 1; its log: " in err and "Traceback" not in err and "onnection" not in err
    run = run_in(place, "broken")
    assert run.status == "failed" and "ZeroDivisionError" in (run.manifest.error or "")


def test_ctrl_c_twice_stops_at_once_without_saving(place, start) -> None:
    command = start(
        "train",
        "rl.toml",
        "--gpus",
        "2",
        "--runs",
        "twice",
        "--set",
        "checkpoint.every_steps=0",
        "--set",
        "train.steps=300",
    )
    command.until(lambda s: s["phase"] == "rollout" and s["step"] >= 2)
    pids, began = command.tree(), time.monotonic()
    command.process.send_signal(signal.SIGINT)
    time.sleep(0.25)  # a person's two presses; nearer ones are one signal to the launcher
    command.process.send_signal(signal.SIGINT)
    code, out, err = command.end()
    assert code == 130 and out == "" and "Traceback" not in err and "error" not in err, err
    assert time.monotonic() - began < END_SECONDS
    assert_all_gone(pids, 5)
    assert run_in(place, "twice").status == "interrupted"
    assert resume_words(err)


def test_two_machines_make_one_run(place, start, finished) -> None:
    """Two launchers of one process each, as on two machines: the rollouts of two processes on one machine."""
    words = ("--gpus", "1", "--nnodes", "2", "--rdzv-endpoint", free_endpoint(), "--runs", "machines", "--json")
    ends = [c.end() for c in [start("train", "rl.toml", *words, "--node-rank", str(n)) for n in range(2)]]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert json.loads(ends[0][1])["status"] == "done" and not ends[1][1]
    here, there = run_in(place, "killed"), run_in(place, "machines")
    assert len(list((place / "machines").glob("*/manifest.json"))) == 1
    assert answers(here) == answers(there)
