"""Secrets that a reward put into names: keys of its detail, names of its images."""

from __future__ import annotations

from pathlib import Path

from vlmrl.evaluate.records import Evaluation, read_evaluation, write_evaluation
from vlmrl.store.rollouts import read_rollouts, write_rollouts
from vlmrl.types import Group, Media, Row, Score, ScoredSample, Segment, Trajectory

TOKEN = "sk-proj-" + "abcdefghijklmnopqrstuvwxyz0123456789ABCD"
MEDIA = Media("0" * 64, 1, 1)


def test_a_name_that_is_a_secret_reaches_no_file(tmp_path: Path) -> None:
    trajectory = Trajectory("t", "p", 0, 0, 0, 0, (1,), (Segment("assistant", (1,), True, (0.0,)),), (), "stop")
    score = Score(1.0, {"reward": 1.0}, detail={"judge": {TOKEN: 1, "axis": 2}}, artifacts={TOKEN: MEDIA})
    sample = ScoredSample(trajectory, "x", score)
    write_rollouts(tmp_path / "r.parquet", [Group(Row("p", "s", "t", {}), "x", (sample,))], step=0)
    [group] = read_rollouts(tmp_path / "r.parquet")
    kept = group.samples[0].score
    assert kept.detail == {"judge": {"<redacted>": 1, "axis": 2}} and list(kept.artifacts) == ["<redacted>"]
    row = {
        "prompt_id": "p",
        "sample": 0,
        "seed": 0,
        "source": "s",
        "task": "t",
        "truth": {},
        "text": "x",
        "finish": "stop",
        "num_tokens": 1,
        "score": 1.0,
        "parts": {},
        "note": "",
        "error": None,
        "status": "ok",
        "images": [],
        "detail": score.detail,
        "artifacts": [{"name": TOKEN, **MEDIA.fields()}],
        "outcome": {},
    }
    write_evaluation(tmp_path / "e", Evaluation([row], {"metrics": {}}), {})
    [back] = read_evaluation(tmp_path / "e").rows
    assert back["detail"] == kept.detail and back["artifacts"] == [{"name": "<redacted>", **MEDIA.fields()}]
