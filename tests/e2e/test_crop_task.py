"""The task crop through the commands: drawn data, check, supervised start on calls, GRPO with the tool, evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import this_process
from small_runs import recipe_text
from task_runs import assert_no_hole, measured, prepared, trained

RECIPE = """
environment = {name = ":Zoom", turns = 2, tokens = 400, images = 1}
rewards = [{name = "task"}, {name = "tool_use", weight = 0.1, gate = "task.accuracy"}]
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 96}
train.steps = 2
optim.lr = 1e-3
eval = {every_steps = 2, metric = "accuracy", max_rows = 2}
checkpoint.every_steps = 2
data = [{path = "data", task = "crop", variant = "seen_direct"}]
"""


@pytest.mark.slow
def test_drawn_lines_go_through_every_command(tmp_path: Path, tiny_folder: Path) -> None:
    prepared(tmp_path, "crop", "--synthetic", 20, "--side", 224, "--seen", 56, "--places", 2)
    run = trained(tmp_path, tiny_folder, RECIPE)
    (prompt,) = run.manifest.prompts
    assert prompt["environment"]["args"] == {"space": "seen"} and len(run.metrics("train")) == 2
    assert all(s.score.status == "ok" for g in run.read_rollouts(1) for s in g.samples)
    assert measured(tmp_path, "--max-rows", 2)["accuracy"]["n"] == 2
    checked = this_process("reward-check", "own", "--probe", "--json", cwd=tmp_path).json
    assert checked["stored"]["equal"] and len(checked["probes"]) == 2, "the sum, and the reward of the task"
    for probe in checked["probes"].values():
        assert_no_hole(probe, "wrong after four calls")
    (tmp_path / "sft.toml").write_text(recipe_text(tiny_folder, f"{RECIPE}train.rows_per_step = 4", "sft"))
    begun = this_process("sft", "sft.toml", "--name", "start", "--json", cwd=tmp_path)
    assert begun.code == 0, begun.err
