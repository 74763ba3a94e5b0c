"""`vlmrl eval --gpus`: several processes give the numbers of one, and end together."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from command_line import own_process, started, this_process
from PIL import Image
from processes import assert_all_gone, below

from vlmrl.store import layout
from vlmrl.store.listing import run_ids
from vlmrl.store.runs import open_run

pytestmark = pytest.mark.slow
ROWS = 5
REWARD = """
def score(x):
    return {"reward": len(set(x.response)) / 40, "accuracy": len(x.response) % 2}
"""
OWN = ("argv", "time", "seconds", "processes")
"""What an account of an evaluation says of its making, not of its numbers."""


@pytest.fixture
def place(tmp_path: Path, tiny_folder: Path) -> Path:
    """A folder with a table, a reward and a recipe; two rows share an image."""
    for i in range(ROWS - 1):
        Image.new("RGB", (56, 56), (50 * i, 90, 200)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": f"<image>say {i}", "images": [f"{min(i, ROWS - 2)}.png"], "answer": "1"} for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "mine.toml").write_text(
        f'[model]\npath = "{tiny_folder}"\ndtype = "float32"\nmax_pixels = 12544\n'
        '[[data]]\npath = "rows.jsonl"\n[reward]\nname = "reward.py:score"\n[rollout]\nmax_new_tokens = 6\n'
    )
    return tmp_path


def command(place: Path, tiny_folder: Path, runs: str, *more: str) -> list[str]:
    words = ["eval", str(tiny_folder), "--recipe", "mine.toml", "--runs", str(place / runs)]
    return [*words, "--sample", "1.0", "--n", "2", "--json", *more]


def test_several_processes_give_the_summary_and_the_rows_of_one(place: Path, tiny_folder: Path) -> None:
    alone = this_process(*command(place, tiny_folder, "alone"), cwd=place).json["evaluations"]
    done = own_process(*command(place, tiny_folder, "ranks", "--gpus", "2"), cwd=place, env={"TMPDIR": str(place)})
    ranks = done.json["evaluations"]
    assert "2 CPU processes" in done.err
    assert [e["meta"]["processes"] for e in (*alone, *ranks)] == [1, 2]
    summaries, files = [], []
    for (evaluation,) in (alone, ranks):
        folder = Path(evaluation["folder"])
        summary = json.loads((folder / layout.EVAL_SUMMARY).read_bytes())
        summary["meta"] = {key: value for key, value in summary["meta"].items() if key not in OWN}
        summaries.append(summary)
        files.append((folder / layout.EVAL_ROWS).read_bytes())
    assert summaries[0] == summaries[1] and summaries[0]["rows"] == 2 * ROWS
    assert files[0] == files[1]
    logs = Path(ranks[0]["folder"]).parents[1] / layout.LOGS
    assert {p.name for p in logs.rglob("rank-*.log")} <= {"rank-0.log", "rank-1.log"}


def test_a_process_that_is_killed_ends_the_others_with_words_and_writes_nothing(place: Path, tiny_folder: Path) -> None:
    words = command(place, tiny_folder, "runs", "--gpus", "2")
    process = started(*words, cwd=place, env={**os.environ, "TMPDIR": str(place)})
    pid = loading(place, rank=1)
    tree = [process.pid, *below(process.pid)]
    os.kill(pid, signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 2 and not out
    assert "rank 1 was killed by SIGKILL" in err and "the unfinished evaluation left no results" in err
    assert "Traceback" not in err
    assert_all_gone(tree)
    for run_id in run_ids(place / "runs"):
        folder, manifest = place / "runs" / run_id, open_run(place / "runs", run_id).manifest
        assert manifest.status in ("failed", "interrupted") and "rank 1 was killed" in (manifest.error or "")
        assert not list(layout.eval_dirs(folder))


def loading(place: Path, rank: int) -> int:
    """Wait until a rank loads its model or is past that. Returns its pid."""
    for _ in range(100_000):
        for path in place.glob(f"vlmrl-launch-*/rank-{rank}.beat"):
            try:
                state = json.loads(path.read_bytes())
            except (ValueError, FileNotFoundError):
                continue
            if state["phase"] != "start":
                return state["pid"]
        time.sleep(0.002)
    raise AssertionError(f"rank {rank} never began")
