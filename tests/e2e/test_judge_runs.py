"""A run with a judge: counted step by step, ended by its budget, killed and continued without a second call."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import Done, own_process, started
from judge_server import serve_judge
from PIL import Image

pytestmark = pytest.mark.slow
RECIPE = """
[model]
path = "model"
max_pixels = 12544
[[data]]
path = "train.jsonl"
[reward]
name = "judge"
args = { render = "none" }
[judge]
provider = "openai"
model = "judge-1"
endpoint = "ADDRESS"
key_env = "JUDGE_KEY"
rubric = "rubric.toml"
prices = { input = 1.0, output = 1.0 }
[rollout]
engine = "torch"
prompts_per_step = 2
samples_per_prompt = 3
max_new_tokens = 6
[train]
steps = 4
rehearsal = false
[eval]
enabled = false
[checkpoint]
every_steps = 1
"""
RUBRIC = 'instructions = "Read."\n[[axes]]\nname = "truth"\nweight = 1.0\ndescribe = "It is true."\n'
KEY = "sk-of-the-judge-0123456789abcdef"


def judgement(number: int, asked: Any) -> str:
    """A score that depends on the request's text alone, which has a mark of its own."""
    return json.dumps({"reason": "read", "truth": sum(asked.text.encode()) % 101 / 100})


def vlmrl(folder: Path, *words: str, **more: str) -> Done:
    return own_process(*words, cwd=folder, env={"JUDGE_KEY": KEY, **more})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with open(tmp_path / "train.jsonl", "w") as file:
        for n in range(8):
            Image.new("RGB", (56, 56), (n * 30, 40, 90)).save(tmp_path / f"{n}.png")
            file.write(json.dumps({"prompt": f"<image>Say {n}", "images": [f"{n}.png"], "answer": str(n)}) + "\n")
    (tmp_path / "rubric.toml").write_text(RUBRIC)
    made = vlmrl(tmp_path, "demo", "--model-only", "model", "--data", "train.jsonl")
    assert made.code == 0, made.err
    return tmp_path


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line.get("kind") == "train"]


def test_a_budget_ends_a_run_a_kill_loses_no_judgement_and_it_is_scored_again_offline(folder: Path) -> None:
    with serve_judge(judgement) as endpoint:
        (folder / "r.toml").write_text(RECIPE.replace("ADDRESS", endpoint.address))
        ended = vlmrl(folder, "train", "r.toml", "--name", "judged", "--set", "judge.max_calls=8")
        assert ended.code == 75 and "8 of 8 calls" in ended.err and "--set judge.max_calls=N" in ended.err
        (run,) = (folder / "runs").glob("2*")
        (first,) = steps_of(run)
        # 6 samples a step; equal texts of a group share a call. 900 + 40 tokens at 1.0 per million.
        assert first["judge/calls"] + first["judge/shared"] + first["judge/cached"] == 6
        assert first["judge/cost"] == pytest.approx(first["judge/calls"] * 940e-6)

        words = ("train", "--resume", "judged", "--set", "judge.max_calls=1000")
        process = started(*words, cwd=folder, env={**os.environ, "JUDGE_KEY": KEY})
        end = time.monotonic() + 120
        while len(steps_of(run)) < 2 and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        resumed = vlmrl(folder, *words)
        assert resumed.code == 0, resumed.err
        assert "judge: " in resumed.err and len({line["step"] for line in steps_of(run)}) == 4
        with sqlite3.connect(run / "judge.sqlite") as file:
            (judgements,) = file.execute("SELECT count(*) FROM verdicts").fetchone()
            (spent,) = file.execute("SELECT calls FROM spent WHERE account = 'run'").fetchone()
        # Each text was asked for once; calls in flight at the kill, at most those of a step, may be repeated.
        assert judgements <= spent <= judgements + 6
        shown = vlmrl(folder, "runs", "show", "judged")
        assert f"judge        training {spent:,} calls" in shown.out and ", cost 0.0" in shown.out
        sent = len(endpoint.requests)
        again = vlmrl(folder, "reward-check", "judged", VLMRL_JUDGE_OFFLINE="1", JUDGE_KEY="")
        assert again.code == 0 and len(endpoint.requests) == sent
        assert "are equal to the stored ones" in again.out
    for file in (file for file in run.rglob("*") if file.is_file()):
        assert KEY.encode() not in file.read_bytes()
