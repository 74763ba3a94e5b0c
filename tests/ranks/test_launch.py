"""Real processes and real kills: what the launcher does when ranks end well, fail, die, hang, or it is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from processes import END_SECONDS, TESTS, assert_all_gone, awaited, free_endpoint, lives

LAUNCH = """
import json, sys
from vlmrl.launch.ranks import Job, launch_twice
job = Job(**json.loads(sys.argv[1]))
ending, run = launch_twice(job, lambda run: job, lambda text: print(text, file=sys.stderr))
print(f"code {ending.code} run {run}")
print(ending.message, file=sys.stderr)
sys.exit(ending.code)
"""
PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


@dataclass
class Launched:
    """A launcher that runs, and where its stub ranks write."""

    process: subprocess.Popen[str]
    folder: Path

    def until(self, name: str) -> str:
        """What a rank writes into a file."""
        return awaited(self.folder / name, self.process)

    def pid(self, name: str = "pid-0") -> int:
        return int(self.until(name))

    def end(self) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)."""
        out, err = self.process.communicate(timeout=400)
        return self.process.returncode, out, err

    def log(self, rank: int) -> str:
        return (self.folder / "logs" / "attempt-1" / f"rank-{rank}.log").read_text()


@pytest.fixture
def start(tmp_path: Path):
    """Start a launcher over stub ranks: `start(steps, fault, ranks=2, **job)`. What is left is killed at the end."""
    started: list[Launched] = []

    def go(
        steps: int, fault: str = "none:0:0", *, ranks: int = 2, folder: str = "run", pipes: Any = PIPES, **job
    ) -> Launched:
        run = tmp_path / folder
        run.mkdir(exist_ok=True)
        command = [str(TESTS / "stub_rank.py"), str(run), str(steps), fault]
        words = json.dumps({"command": command, "ranks": ranks, "env": {"OMP_NUM_THREADS": "1"}} | job)
        env = {**os.environ, warm.NEST: "1"}
        process = warm.Popen([sys.executable, "-c", LAUNCH, words], **pipes, text=True, env=env, start_new_session=True)
        started.append(Launched(process, run))
        return started[-1]

    yield go
    for launched in started:
        launched.process.kill()
        launched.process.communicate()
        for path in launched.folder.glob("pid-*"):
            if lives(int(path.read_text())):
                os.kill(int(path.read_text()), signal.SIGKILL)


def test_ranks_that_end_well_end_the_launcher_well_and_rank_0_alone_talks_and_no_library(start) -> None:
    launched = start(3)
    code, out, err = launched.end()
    assert code == 0, err
    assert out == f"early word of rank 0\ncode 0 run {launched.folder}\n"
    assert "counting" in err and "rank 0 is up" in err and "rank 1" not in out + err and "library" not in out + err
    for rank in (0, 1):
        log = f"early word of rank {rank}\nHF_TOKEN=<redacted> of rank {rank}\na library's progress on rank {rank}\n"
        log += f"rank {rank} is up\n"
        assert launched.log(rank) == log


def test_ranks_start_where_the_output_goes_to_a_file(start, tmp_path) -> None:
    with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
        launched = start(1, ranks=1, pipes={"stdout": out, "stderr": err})
        assert launched.process.wait(400) == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text() == f"early word of rank 0\ncode 0 run {launched.folder}\n"
    assert "a library's progress on rank 0" in launched.log(0)


def test_the_last_line_of_a_rank_that_dies_before_its_run_is_known_is_shown(start) -> None:
    # It lives long enough for the launcher to open its pipe.
    dies = "print('no space \x1b left\\n'); time.sleep(2); os._exit(3)"
    dies = f"import os, time; from vlmrl.dist import world as rank_process; rank_process.begin(); {dies}"
    code, _, err = start(1, ranks=1, command=["-c", dies]).end()
    assert code == 2
    assert "rank 0 ended with exit code 3 and without an error message" in err
    assert "    no space \\u001b left\n" in err


def test_the_first_failing_ranks_error_is_the_one_shown(start) -> None:
    launched = start(1000, "user:1:3")
    code, _, err = launched.end()
    assert code == 2
    assert "error: row 17 has no image\n  --> digits row 17\n(on rank 1; its log: " in err
    assert "Traceback" not in err and "peer" not in err.lower() and "onnection" not in err
    assert "row 17 has no image" in launched.log(1)
    assert re.search("onnection closed by peer|onnection reset", launched.log(0)), "rank 0 noticed nothing of it?"


def test_a_bug_on_a_rank_is_shown_with_its_traceback_and_exit_code_1(start) -> None:
    code, _, err = start(1000, "bug:0:2").end()
    assert code == 1
    assert "ValueError: a bug of ours" in err and "this is a bug in vlmrl" in err and err.count("Traceback") == 1


def test_memory_that_runs_out_on_a_rank_starts_all_once_more_with_half_the_budget(start) -> None:
    launched = start(20, "memory:1:3")
    code, out, err = launched.end()
    assert code == 0, err
    assert out.endswith(f"code 0 run {launched.folder}\n")
    assert "error: out of memory with a row\n(on rank 1; its log: " in err
    assert "starting all processes once more, with train.tokens_per_row = 200 (was 400)" in err
    assert err.count("rank 0 is up") == 2 and "Traceback" not in err
    for rank in (0, 1):
        assert (launched.folder / f"halved-{rank}").read_text() == '{"train.tokens_per_row": [400, 200]}'


def test_memory_that_runs_out_again_ends_the_run(start) -> None:
    code, _, err = start(20, "memories:1:3").end()
    assert code == 2 and err.count("rank 0 is up") == 2 and err.count("once more, with") == 1
    assert err.count("error: out of memory with a row") == 2


def test_a_killed_rank_ends_all_and_is_named(start) -> None:
    launched = start(100_000)
    launched.until("step-0")
    pids = [launched.pid("pid-0"), launched.pid("pid-1")]
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, err = launched.end()
    assert time.monotonic() - began < END_SECONDS
    assert code == 2 and re.search(r"error: rank 1 was killed by SIGKILL in phase `\w+` of step \d+", err), err
    assert_all_gone(pids, 0)


def test_a_killed_rank_ends_peers_that_notice_nothing_and_listen_to_no_signal(start) -> None:
    launched = start(1, "peerless:0:0")
    launched.until("step-0"), launched.until("step-1")
    pids = [launched.pid("pid-0"), launched.pid("pid-1")]
    os.kill(pids[0], signal.SIGKILL)
    began = time.monotonic()
    code, _, err = launched.end()
    assert time.monotonic() - began < END_SECONDS
    assert code == 2 and "rank 0 was killed by SIGKILL in phase `rollout`" in err
    assert_all_gone(pids, 0)


def test_what_a_killed_rank_started_is_ended_too(start) -> None:
    launched = start(100_000, "child:1:1")
    child = launched.pid("child-1")
    os.kill(launched.pid("pid-1"), signal.SIGKILL)
    launched.end()
    assert_all_gone([child], 5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_rank_once_and_they_finish_and_save(start, number: signal.Signals) -> None:
    launched = start(100_000)
    launched.until("step-0")
    launched.process.send_signal(number)
    code, _, err = launched.end()
    assert code == 130, err
    assert "error" not in err
    said = [(launched.folder / f"saved-{rank}").read_text() for rank in (0, 1)]
    # The votes are summed in a step: a rank whose signal comes a moment later saves with the others.
    assert all(re.fullmatch(rf"step \d+, signals \[({number:d})?\]", text) for text in said), said
    assert said[0].split(",")[0] == said[1].split(",")[0]


def test_a_hang_is_ended_and_names_rank_and_phase_and_leaves_stacks(start) -> None:
    launched = start(100_000, "hang:1:3", timeout_seconds=4.0)
    pids = [launched.pid("pid-0"), launched.pid("pid-1")]
    code, _, err = launched.end()
    assert code == 2
    assert "error: rank 1 hangs: in phase `rollout` of step 3 for more than 4 s (rank 0 in `update`)" in err
    assert "parallel.timeout_seconds" in err
    assert "stub_rank.py" in launched.log(1) and "in main" in launched.log(1), "no stack in the log"
    assert_all_gone(pids, 0)


def test_the_launcher_killed_leaves_no_rank(start) -> None:
    launched = start(100_000)
    launched.until("step-0")
    pids = [launched.pid("pid-0"), launched.pid("pid-1")]
    os.kill(launched.process.pid, signal.SIGKILL)
    assert_all_gone(pids)


def test_an_error_of_the_command_line_on_every_rank_is_shown_once(start) -> None:
    words = ["-m", "vlmrl", "runs", "show", "nothing", "--runs", "/nowhere"]
    code, out, err = start(0, command=words).end()
    assert code == 2 and out == "code 2 run None\n"
    assert err.count("error: no run `nothing`") == 1 and "Traceback" not in err and "(on rank " in err


@pytest.fixture
def two_nodes(start):
    """Start two launchers of one rank each that meet on loopback, the host of the meeting point last."""

    def go(steps: int) -> list[Launched]:
        job = {"ranks": 1, "nnodes": 2, "endpoint": free_endpoint(), "job_id": "two-nodes"}
        return [start(steps, node_rank=n, **job) for n in (1, 0)]

    return go


def test_two_agents_on_loopback_are_two_nodes(two_nodes) -> None:
    nodes = two_nodes(3)
    ends = [node.end() for node in nodes]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert sum("rank 0 is up" in err for _, _, err in ends) == 1 and not any("rank 1" in e for _, _, e in ends)
    assert nodes[0].log(0) and nodes[0].log(1)


def test_a_rank_killed_on_one_node_ends_both(two_nodes) -> None:
    nodes = two_nodes(100_000)
    nodes[0].until("step-0")
    pids = [nodes[0].pid("pid-0"), nodes[0].pid("pid-1")]
    began = time.monotonic()
    os.kill(pids[1], signal.SIGKILL)
    ends = [node.end() for node in nodes]
    assert time.monotonic() - began < END_SECONDS
    assert_all_gone(pids, 0)
    assert sorted(code for code, _, _ in ends) == [1, 2], ends
    assert sum("rank 1 was killed by SIGKILL" in err for _, _, err in ends) == 1


def test_a_launcher_killed_on_one_node_ends_both(two_nodes) -> None:
    nodes = two_nodes(100_000)
    nodes[0].until("step-0")
    pids = [nodes[0].pid("pid-0"), nodes[0].pid("pid-1")]
    os.kill(nodes[0].process.pid, signal.SIGKILL)
    assert_all_gone(pids)
    assert nodes[1].end()[0] != 0


def test_sigterm_at_both_nodes_saves_on_both(two_nodes) -> None:
    nodes = two_nodes(100_000)
    nodes[0].until("step-0")
    for node in nodes:
        node.process.send_signal(signal.SIGTERM)
    assert [node.end()[0] for node in nodes] == [130, 130]
    assert (nodes[0].folder / "saved-0").exists() and (nodes[0].folder / "saved-1").exists()
