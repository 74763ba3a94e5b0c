"""A task of one's own through a run: the folder that `vlmrl init --task` writes, trained, evaluated, gone on with."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import this_process
from small_runs import recipe_text

from vlmrl.evaluate.records import read_evaluation
from vlmrl.store.media import RunImages
from vlmrl.store.runs import open_run
from vlmrl.types import Media

RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 8}
train.steps = 2
optim.lr = 1e-3
eval = {every_steps = 2, metric = "accuracy", max_rows = 4}
checkpoint.every_steps = 1
[[data]]
path = "squares/data"
task = "squares/task.py:task"
"""
LETTERS = """
    parts = {"format": x.response.count("e") / 100, "accuracy": 0.0, "nearness": len(x.response) / 1000}
    said = len(x.response)
    return RewardResult(parts, detail={"said": said}, artifacts={"said": picture_of(said % 20)})
"""
"""Score of random responses that differs between them: equal scores would train nothing."""


@pytest.mark.slow
def test_the_written_folder_passes_its_test_and_trains(tmp_path: Path, tiny_folder: Path) -> None:
    assert this_process("init", "--task", "squares", cwd=tmp_path).code == 0
    tested = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "squares"]
    done = subprocess.run(tested, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout
    file = tmp_path / "squares" / "task.py"
    start = file.read_text().index("    match = WHOLE.fullmatch")
    end = file.read_text().index("def picture_of(")
    file.write_text(file.read_text()[:start] + f"{LETTERS}\n\n" + file.read_text()[end:])
    made = this_process("prep", "squares/task.py:task", "--out", "squares/data", "--rows", 8, cwd=tmp_path)
    assert made.code == 0, made.err
    (tmp_path / "recipe.toml").write_text(recipe_text(tiny_folder, RECIPE))
    found = this_process("train", "recipe.toml", "--name", "own", "--json", cwd=tmp_path).json
    assert found["status"] == "done"
    run = open_run(tmp_path / "runs", "own")
    (data,) = [one for one in run.manifest.datasets if one["split"] == "train"]
    assert data["task"] == "squares/task.py:task" and len(data["task_sha256"]) == 64
    kept = run.dir / "kept" / f"task-{data['task_sha256'][:16]}.py"
    assert kept.read_text() == file.read_text()
    assert {g.row.task for g in run.read_rollouts(1)} == {"squares/task.py:task"}
    scores = [s.score for g in run.read_rollouts(1) for s in g.samples]
    assert all(score.detail == {"score": {"said": score.detail["score"]["said"]}} for score in scores)
    images = RunImages(run.dir)
    assert all(images.find(score.artifacts["said"]) for score in scores)
    shown = this_process("runs", "show", "own", "--rollout", "1", "--json", cwd=tmp_path).json["groups"]
    assert shown[0]["samples"][0]["artifacts"]["said"]["width"] == 240

    probed = this_process("reward-check", "own", "--probe", "--json", cwd=tmp_path)
    checked = json.loads(probed.out)
    assert probed.code == 5 and checked["probes"]["data"]["not_probed"]  # a reward for untrained models pays odd things
    assert checked["stored"]["equal"] and checked["disagreements"] is not None
    assert {"very long"} <= {p["name"] for one in checked["probes"].values() for p in one["probes"]}
    (measured,) = this_process("eval", "own", "--json", cwd=tmp_path).json["evaluations"]
    assert measured["metrics"]["accuracy"]["value"] == 0.0
    assert measured["metrics"]["correlation"]["better"] == "higher" if "correlation" in measured["metrics"] else True
    rows = read_evaluation(tmp_path / measured["folder"]).rows
    assert all(RunImages(run.dir).find(Media.of(one)) for row in rows for one in row["artifacts"])
    assert [row["detail"]["score"]["said"] for row in rows] == [row["said"] for row in rows]
    assert "accuracy/answer-1" in measured["metrics"] and measured["figures"][0]["title"] == "squares"
    assert this_process("report", "own", "--out", "report.html", cwd=tmp_path).code == 0
    assert "squares" in (tmp_path / "report.html").read_text()
    said = [row["said"] for row in read_evaluation(tmp_path / measured["folder"]).rows]
    assert all(number is not None for number in said), "the reward's detail is what is measured"
    assert ("correlation" in measured["metrics"]) == (len(set(said)) > 1)

    file.write_text(file.read_text() + "\nANOTHER = True\n")
    asked = this_process("train", "--resume", "own", "--set", "train.steps=3", cwd=tmp_path)
    assert asked.code == 2 and "task squares/task.py:task" in asked.err and "+ANOTHER = True" in asked.err
    unlike = this_process("reward-check", "own", "--reward", "exact_match", "--json", cwd=tmp_path)
    assert "is not the code that these rollouts were made with" in unlike.out + unlike.err
    words = ("train", "--resume", "own", "--set", "train.steps=3", "--accept-changes", "--json")
    assert this_process(*words, cwd=tmp_path).json["status"] == "done"
    assert len(list((run.dir / "kept").glob("task-*.py"))) == 2
