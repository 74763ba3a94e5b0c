"""The task detection through the commands: drawn data, check, training, resume, evaluation, probe, report."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import this_process
from small_runs import recipe_text

from vlmrl.store.media import RunImages
from vlmrl.store.open_run import open_run

RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 8}
train.steps = 1
optim.lr = 1e-3
eval = {every_steps = 1, metric = "map", max_rows = 12}
checkpoint.every_steps = 1
reward.args.overlay = true
[[data]]
path = "data"
task = "detection"
variant = "seen_direct"
"""


@pytest.mark.slow
def test_drawn_detection_goes_through_every_command(tmp_path: Path, tiny_folder: Path) -> None:
    words = ("--synthetic", 20, "--side", 84, "--others", 1, "--asks", "kind", "--out", "data")
    made = this_process("prep", "detection", *words, cwd=tmp_path)
    assert made.code == 0, made.err
    (tmp_path / "recipe.toml").write_text(recipe_text(tiny_folder, RECIPE))
    checked = this_process("check", "recipe.toml", cwd=tmp_path)
    assert checked.code == 0, checked.err
    assert this_process("train", "recipe.toml", "--name", "own", "--json", cwd=tmp_path).json["status"] == "done"
    more = this_process("train", "--resume", "own", "--set", "train.steps=2", "--json", cwd=tmp_path)
    assert more.code == 0, more.err
    run = open_run(tmp_path / "runs", "own")
    for step in range(2):
        scores = [s.score for g in run.read_rollouts(step) for s in g.samples]
        assert scores and all(score.status == "ok" for score in scores)
        assert all(RunImages(run.dir).find(score.artifacts["boxes"]) for score in scores)
    (measured,) = this_process("eval", "own", "--max-rows", 12, "--json", cwd=tmp_path).json["evaluations"]
    metrics = measured["metrics"]
    assert metrics["parse_failure"]["value"] == 1.0  # random weights write no answer
    assert {"map", "ap50", "ap75", "map/circle"} <= set(metrics)
    assert (metrics["map"]["value"], metrics["map"]["low"], metrics["map"]["high"]) == (0.0, 0.0, 0.0)
    assert metrics["map"]["clusters"] == 12 and metrics["absent_accuracy"]["n"] < 12
    probed = this_process("reward-check", "own", "--probe", "--json", cwd=tmp_path).json
    assert probed["stored"]["equal"]
    (found,) = probed["probes"].values()
    assert found["flagged"] == 0 and "a box without confidence" in {probe["name"] for probe in found["probes"]}
    assert found["honest"]["informed"] > 0.8
    assert this_process("report", "own", cwd=tmp_path).code == 0
