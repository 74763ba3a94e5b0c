"""`vlmrl generate --gpus`: several processes write the file of one, and a killed one goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from command_line import own_process, settings, started, this_process
from PIL import Image
from processes import assert_all_gone, below

pytestmark = pytest.mark.slow
ROWS = 7
MANY = 300
"""Rows of two pieces of 128 per process."""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a table; the last row has no image."""
    for i in range(ROWS):
        Image.new("RGB", (56, 56), (30 * i, 90, 200)).save(tmp_path / f"{i}.png")
    rows = [{"prompt": f"<image>say {i}", "images": [f"{i}.png"], "answer": str(i)} for i in range(ROWS - 1)]
    rows.append({"prompt": "say 9", "images": [], "answer": "9"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    many = [{"prompt": f"say {i}", "answer": str(i)} for i in range(MANY)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(r) + "\n" for r in many))
    return tmp_path


def command(folder: Path, data: str, out: str, *more: str) -> list[str]:
    words = ["generate", str(folder), "--data", data, "--out", out, "--sample", "1", *more]
    return [*words, *settings("rollout.max_new_tokens=4", "rollout.engine=torch", "model.dtype=float32")]


def test_several_processes_write_the_file_of_one(place: Path, tiny_folder: Path) -> None:
    alone = this_process(*command(tiny_folder, "rows.jsonl", "one.jsonl", "--n", "2"), cwd=place)
    assert alone.code == 0, alone.err
    words = command(tiny_folder, "rows.jsonl", "two.jsonl", "--n", "2", "--gpus", "2", "--json")
    done = own_process(*words, cwd=place, env={"TMPDIR": str(place)})
    assert done.json == {"out": "two.jsonl", "rows": ROWS, "responses": 2 * ROWS, "refused": 0}
    assert "2 CPU processes" in done.err
    assert (place / "two.jsonl").read_bytes() == (place / "one.jsonl").read_bytes()
    assert list((place / "runs" / "unfinished").iterdir()) == []
    again = own_process(*words, cwd=place)
    assert again.code == 2 and "two.jsonl exists" in again.err and "CPU processes" not in again.err


def test_after_a_kill_the_same_command_goes_on(place: Path, tiny_folder: Path) -> None:
    words = command(tiny_folder, "many.jsonl", "answers.jsonl", "--gpus", "2")
    process = started(*words, cwd=place, env={**os.environ, "TMPDIR": str(place)})
    kept = first_piece(place / "runs" / "unfinished")
    tree = [process.pid, *below(process.pid)]
    os.kill(rank_pid(place, 1), signal.SIGKILL)
    out, err = process.communicate(timeout=400)
    assert process.returncode == 2 and not out and "Traceback" not in err
    assert "rank 1 was killed by SIGKILL" in err and "the responses so far are kept" in err
    assert_all_gone(tree)
    assert not (place / "answers.jsonl").exists()
    # A response that is there is not generated again: a mark in it is in the result.
    lines = kept.read_text().splitlines()
    marked = json.loads(lines[1]) | {"text": "kept"}
    kept.write_text("\n".join([lines[0], json.dumps(marked), *lines[2:]]) + "\n")
    done = own_process(*words, cwd=place, env={"TMPDIR": str(place)})
    assert done.code == 0, done.err
    answers = [json.loads(line) for line in (place / "answers.jsonl").read_text().splitlines()]
    assert [a["ground_truth"]["answer"] for a in answers] == [str(i) for i in range(MANY)]
    assert [a["response"] == "kept" for a in answers] == [i == marked["row"] for i in range(MANY)]
    assert list((place / "runs" / "unfinished").iterdir()) == []


def first_piece(folder: Path) -> Path:
    """Wait until a process has written its first responses. Returns their file."""
    for _ in range(100_000):
        for path in folder.glob("*.jsonl") if folder.is_dir() else ():
            if path.read_bytes().count(b"\n") > 128:
                return path
        time.sleep(0.002)
    raise AssertionError("no responses were kept")


def rank_pid(place: Path, rank: int) -> int:
    (path,) = place.glob(f"vlmrl-launch-*/rank-{rank}.beat")
    return json.loads(path.read_bytes())["pid"]
