"""`--debug-rank` and `--debug` at a terminal: breakpoint() stops where it should and is answered, without a clock."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import COMMAND, settings, this_process
from processes import TESTS, assert_all_gone, below
from small_runs import make_place, train

from vlmrl.process import DEBUG_RANK
from vlmrl.store.runs import open_run

pytestmark = pytest.mark.slow
RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 8}
train.steps = 2
optim.lr = 1e-3
eval = {every_steps = 0, max_rows = 2}
"""
CLOCKS = settings("reward.timeout_seconds=2.0", "parallel.timeout_seconds=4.0")
LAUNCH = """
import json, sys
from vlmrl.launch.ranks import Job, launch
ending, run = launch(Job(**json.loads(sys.argv[1])))
print(ending.message)
sys.exit(ending.code)
"""
REWARD = """
import os

def score(x):
    paid = min(1.0, x.response.count("e") / 4)
    if os.environ.get("STOP_IN_REWARD"):
        breakpoint()
    return paid
"""
STOPS = """
import importlib.abc, importlib.machinery, os, sys

class Stop(importlib.abc.MetaPathFinder):
    '''Puts a breakpoint before the update: what somebody who works on vlmrl would write there.'''

    def find_spec(self, name, path, target=None):
        if name != "vlmrl.train.rl" or not os.environ.get("STOP_IN_UPDATE"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            learn = module.learn

            def stopped(learner, collected, objective, before, step, meanwhile):
                breakpoint()
                return learn(learner, collected, objective, before, step, meanwhile)

            module.learn = stopped

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Stop())
"""


@dataclass
class Terminal:
    """A command at a terminal of its own. `seen`: all that it showed."""

    process: subprocess.Popen[bytes]
    fd: int
    seen: str = ""

    def until(self, pattern: str, after: int = 0) -> int:
        """Wait for a text that comes after a place of `seen`. Returns where it ends."""
        for _ in range(3000):
            if match := re.search(pattern, self.seen[after:]):
                return after + match.end()
            if not self.read():
                break
        raise AssertionError(f"{pattern!r} was never shown:\n{self.seen[-3000:]}")

    def read(self) -> bool:
        """Take what is shown within a moment; False = the command has let go of the terminal."""
        if select.select([self.fd], [], [], 0.1)[0]:
            try:
                data = os.read(self.fd, 65536)
            except OSError:
                return False
            self.seen += data.decode(errors="replace").replace("\r\n", "\n")
            return bool(data)
        return True

    def type(self, line: str) -> None:
        os.write(self.fd, f"{line}\n".encode())

    def end(self) -> int:
        """Wait for the end. Returns the exit code."""
        while self.read():
            pass
        return self.process.wait(60)


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder) -> Path:
    place = make_place(tmp_path_factory.mktemp("debugging"), tiny_folder, RECIPE, reward=REWARD, pairs=20)
    (place / "stops").mkdir()
    (place / "tmp").mkdir()
    (place / "stops" / "sitecustomize.py").write_text(STOPS)
    return place


@pytest.fixture
def at_terminal(place: Path) -> Iterator:
    """Start a command at a terminal: `at_terminal(*COMMAND, "train", ..., STOP_IN_REWARD="1")`."""
    opened: list[Terminal] = []

    def go(*words: str, **environment: str) -> Terminal:
        ours, theirs = pty.openpty()
        env = (
            os.environ
            | environment
            | {
                "PYTHONPATH": str(place / "stops"),
                "CUDA_VISIBLE_DEVICES": "",
                "TERM": "dumb",
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(place / "tmp"),
            }
        )
        process = subprocess.Popen(
            words, cwd=place, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True
        )
        os.close(theirs)
        opened.append(Terminal(process, ours))
        return opened[-1]

    yield go
    for terminal in opened:
        pids = [terminal.process.pid, *below(terminal.process.pid)] if terminal.process.poll() is None else []
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        terminal.process.wait()
        os.close(terminal.fd)
        assert_all_gone(pids)


def test_a_rank_and_its_rewards_stop_at_a_breakpoint_and_the_others_go_on(place, at_terminal):
    """Both clocks of the recipe, of a reward and of a phase, run out while somebody looks."""
    words = ("train", "rl.toml", "--gpus", "2", "--debug-rank", "0", "--runs", "two", *CLOCKS)
    t = at_terminal(*COMMAND, *words, STOP_IN_REWARD="1", STOP_IN_UPDATE="1")
    at = t.until(r"\(Pdb\) $")
    assert "rank 0 has this terminal" in t.seen and "return paid" in t.seen
    for _ in range(60):  # longer than parallel.timeout_seconds and reward.timeout_seconds
        assert t.read()
    t.type("p 'paid', paid, 40 + 2")
    at = t.until(r"\('paid', [\d.]+, 42\)\n\(Pdb\) $", at)
    t.type("import os; os.environ.pop('STOP_IN_REWARD')")
    at = t.until(r"\(Pdb\) $", at)
    t.type("c")
    at = t.until(r"return learn\(learner, collected, objective, before, step, meanwhile\)\n\(Pdb\) $", at)
    t.type("p learner.world.rank, learner.world.size, len(collected.groups)")
    at = t.until(r"\(0, 2, 2\)\n\(Pdb\) $", at)
    t.type("c")
    at = t.until(r"step 1/2(.|\n)*\(Pdb\) $", at)
    t.type("q")
    assert t.end() == 130 and "Traceback" not in t.seen, t.seen
    run = open_run(place / "two", "last")
    assert run.manifest.attempts[0].processes == 2 and len(run.metrics("train")) == 1
    assert t.seen.count("step 1/2") == 1, "the other rank is quiet"


def stub_ranks(at_terminal: Any, folder: Path, **job: Any) -> Terminal:
    """Two stub ranks at a terminal, which come to a breakpoint at their second step."""
    command = [str(TESTS / "stub_rank.py"), str(folder), "3", "stop:0:1"]
    words = json.dumps({"command": command, "ranks": 2} | job)
    return at_terminal(sys.executable, "-c", LAUNCH, words)


def test_another_rank_than_the_first_may_have_the_terminal_and_no_phase_times_out(at_terminal, tmp_path):
    t = stub_ranks(at_terminal, tmp_path, env={DEBUG_RANK: "1"}, timeout_seconds=1.0)
    at = t.until(r"\(Pdb\) $")
    for _ in range(30):
        assert t.read()
    t.type("p rank, step")
    at = t.until(r"\(1, 1\)\n\(Pdb\) $", at)
    t.type("c")
    assert t.end() == 0, t.seen
    assert t.seen.count("(Pdb)") == 2, "rank 0 came to the same breakpoint"
    assert "rank 1 is up" in t.seen and "rank 0 is up" not in t.seen


def test_without_it_a_breakpoint_of_a_rank_is_a_mistake_that_says_how_to_debug(at_terminal, tmp_path):
    t = stub_ranks(at_terminal, tmp_path)
    assert t.end() == 2, t.seen
    assert re.search(r"error: breakpoint\(\) on rank [01], which has no terminal", t.seen)
    assert re.search(r"hint: --debug-rank [01] gives it the terminal", t.seen)


def test_the_plain_torchrun_line_debugs_too(place):
    done = this_process("train", "rl.toml", "--gpus", "2", "--debug-rank", "1", "--dry-run", cwd=place)
    assert f"{DEBUG_RANK}=1" in done.out and "--debug-rank" not in done.out, done.err


def test_a_reward_is_debugged_on_saved_rollouts(place, at_terminal, tmp_path_factory):
    run = train(place, tmp_path_factory.mktemp("saved"), "train.steps=1")
    refused = at_terminal(*COMMAND, "reward-check", str(run.dir), STOP_IN_REWARD="1")
    assert refused.end() == 2 and "BdbQuit" in refused.seen and "--debug" in refused.seen, refused.seen
    t = at_terminal(*COMMAND, "reward-check", str(run.dir), "--debug", STOP_IN_REWARD="1")
    at = t.until(r"return paid\n\(Pdb\) $")
    t.type("p len(x.response) > 0")
    at = t.until(r"True\n\(Pdb\) $", at)
    t.type("import os; os.environ.pop('STOP_IN_REWARD')")
    at = t.until(r"\(Pdb\) $", at)
    t.type("c")
    assert t.end() == 0, t.seen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "2", "--debug-rank", "2"), "--debug-rank 2 does not exist: there are 2 processes"),
        (("--debug-rank", "1"), "--debug-rank 1 does not exist: there is one process"),
        (("--debug-rank", "0", "--json"), "--debug-rank uses the terminal"),
        (("--nnodes", "2", "--rdzv-endpoint", "h:1", "--debug-rank", "0"), "--debug-rank works on one machine only"),
    ],
)
def test_what_cannot_be_debugged_is_refused(place, words, said):
    done = this_process("train", "rl.toml", *words, cwd=place)
    assert done.code == 2 and said in done.err, done.err
