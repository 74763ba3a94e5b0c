"""Part of path.py: a run of `vlmrl train` whose reward calls a service on loopback that is killed for a while."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[2] / "tests")]

import kill  # noqa: E402
from eval_kills import in_fork  # noqa: E402
from judge_service import Judge  # noqa: E402

RECIPE = """
[model]
path = "model"
dtype = "float32"
device = "cpu"
[[data]]
path = "rows.jsonl"
[reward]
name = "reward.py:score"
workers = 2
[rollout]
engine = "torch"
prompts_per_step = 4
samples_per_prompt = 4
max_new_tokens = 8
[train]
steps = {steps}
[optim]
lr = 1e-3
[eval]
every_steps = 0
"""


def measure_service(*, down: float, steps: int) -> dict[str, Any]:
    """Train twice: with the service, and with a service that is killed after the first step and is down for a while.

    Args:
        down: seconds between the kill and the new start.
        steps: steps of both runs.
    """
    with tempfile.TemporaryDirectory() as name, Judge() as judge:
        folder = Path(name)
        rows = [{"prompt": f"say {i}", "answer": "1"} for i in range(16)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "mine.toml").write_text(RECIPE.format(steps=steps))
        judge.write_reward(folder / "reward.py")
        texts = [row["prompt"] for row in rows]
        in_fork(lambda: _build(folder / "model", texts))
        _wait(folder, _begin(folder, "whole"))
        pid = _begin(folder, "outage")
        while not list(folder.glob("outage/*/rollouts/*")):
            if os.waitpid(pid, os.WNOHANG)[0]:
                raise SystemExit(f"vlmrl train failed:\n{(folder / 'output').read_text()[-3000:]}")
            time.sleep(0.01)
        judge.kill()
        time.sleep(down)
        judge.start()
        _wait(folder, pid)
        whole, outage = (_seen(folder / runs) for runs in ("whole", "outage"))
    facts = {
        "down_seconds": down,
        "waited_seconds": round(outage["waited"], 1),
        "samples": len(outage["samples"]),
        "samples_without_a_score": sum(math.isnan(score) for _, score in outage["samples"]),
        "samples_at_0": sum(score == 0.0 for _, score in outage["samples"]),
        "tokens_lost": sum(len(ids) for ids, _ in whole["samples"]) - sum(len(ids) for ids, _ in outage["samples"]),
        "updates_lost": whole["updates"] - outage["updates"],
        "same_tokens_and_scores": whole["samples"] == outage["samples"],
    }
    lost = [facts[key] for key in ("samples_without_a_score", "samples_at_0", "tokens_lost", "updates_lost")]
    holds = facts["same_tokens_and_scores"] and not any(lost) and facts["waited_seconds"] > 0
    return facts | {"holds": holds}


def _build(folder: Path, texts: list[str]) -> None:
    from vlmrl.model.tiny import build_tiny

    build_tiny(folder, texts, vocabulary=300, hidden=64, layers=2, init_std=0.02)


def _begin(folder: Path, runs: str) -> int:
    with open(folder / "output", "wb") as out:
        return kill._fork(folder, ["train", "mine.toml", "--runs", runs], out.fileno(), out.fileno())


def _wait(folder: Path, pid: int) -> None:
    if os.waitpid(pid, 0)[1]:
        raise SystemExit(f"vlmrl train failed:\n{(folder / 'output').read_text()[-3000:]}")


def _seen(root: Path) -> dict[str, Any]:
    """(token ids, score) of every sample of the run, its updates, and the seconds that it waited."""
    from vlmrl.store.runs import open_run

    run = open_run(root, "last")
    samples = [
        (s.trajectory.response_ids, s.score.value)
        for step in run.rollout_files()
        for group in run.read_rollouts(step)
        for s in group.samples
    ]
    lines = run.metrics("train")
    waited = sum(line.get("reward/outage_seconds", 0.0) for line in lines)
    return {"samples": samples, "updates": lines[-1]["optim/updates"], "waited": waited}
