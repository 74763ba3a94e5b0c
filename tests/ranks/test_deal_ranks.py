"""Two real ranks share the prompts of a draw; the death of one does not hang the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from deal_rank import COUNT, FIRST
from processes import END_SECONDS, TESTS, free_endpoint, run_ranks

SCRIPT = TESTS / "ranks" / "deal_rank.py"


def test_two_ranks_take_every_prompt_once_draw_after_draw(tmp_path: Path) -> None:
    run_ranks(2, SCRIPT, tmp_path, "none")
    told = [(tmp_path / str(rank)).read_text().split() for rank in range(2)]
    assert told[0] == told[1]
    taken = [[int(item[2:]) for item in told[0] if item[0] == str(rank)] for rank in range(2)]
    assert sorted(taken[0] + taken[1]) == list(range(COUNT))
    for rank in range(2):
        assert {*range(rank, COUNT, 2)[:FIRST]} <= {*taken[rank]}


@pytest.mark.parametrize("dies", [0, 1])
def test_a_rank_that_dies_in_the_middle_does_not_hang_the_other(tmp_path: Path, dies: int) -> None:
    """Rank 0 has the queues. Without it the other rank cannot take any more; with it the queue ends in an error."""
    host, port = free_endpoint().split(":")
    env = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = f"{TESTS}{os.pathsep}{TESTS.parent}"
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(dies)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [warm.Popen(command, env=env | {"RANK": str(rank)}, **pipes) for rank in range(2)]
    try:
        assert ranks[dies].wait(END_SECONDS) == 1
        (tmp_path / "dead").touch()
        text = ranks[1 - dies].communicate(timeout=END_SECONDS)[0]
        assert ranks[1 - dies].returncode == 1 and "Error" in text, text
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert list(tmp_path.iterdir()) == [tmp_path / "dead"]
