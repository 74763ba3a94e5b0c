"""The walk-through in the documentation: three printed commands find the planted bug of a reward."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from command_line import this_process
from reward_runs import make_pair_run

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "reward-check.md").read_text(encoding="utf-8")
WALK = PAGE.split("## Find a planted bug")[1].split("\n## ")[0]


def test_the_three_commands_find_the_planted_bug(tmp_path):
    source = re.search(r"```python\n(.*?)```", WALK, flags=re.S)
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^\$ vlmrl (.*)$", WALK, flags=re.M)]
    assert source is not None and len(commands) == 3
    (tmp_path / "planted.py").write_text(source[1])
    make_pair_run(tmp_path / "runs")
    said = [this_process(*words, cwd=tmp_path) for words in commands]
    assert [done.code for done in said] == [0, 0, 3]
    changed = said[0].out.split("changed most")[1]
    assert re.search(r": 0 -> 0\.75, advantage", changed) and "oops" in changed
    leaks = said[1].out.split("leak: pays for what should earn nothing")[1]
    for trick in ("nothing", "tags only", "refusal"):
        assert re.search(rf"{trick} \(.*\): earns 0\.75", leaks), trick
    assert "failed: probe > 0" in said[2].out
