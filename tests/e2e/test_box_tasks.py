"""The tasks counting and grounding through the commands: drawn data, check, training, evaluation, probe, report."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import this_process
from small_runs import recipe_text

from vlmrl.store.media import RunImages
from vlmrl.store.open_run import open_run

RECIPE = """
rollout = {{prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 24}}
train.steps = 1
optim.lr = 1e-3
eval = {{every_steps = 1, metric = "{metric}", max_rows = 4}}
checkpoint.every_steps = 1
{reward}
[[data]]
path = "data"
task = "{task}"
variant = "{variant}"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "variant", "metric", "reward", "trick"),
    [
        ("counting", "direct", "accuracy", "", "numbers up to 29"),
        ("grounding", "seen_direct", "iou", "reward.args.overlay = true", "many boxes"),
    ],
)
def test_a_drawn_task_goes_through_every_command(
    tmp_path: Path, tiny_folder: Path, task: str, variant: str, metric: str, reward: str, trick: str
) -> None:
    made = this_process("prep", task, "--synthetic", 20, "--side", 84, "--others", 1, "--out", "data", cwd=tmp_path)
    assert made.code == 0, made.err
    text = RECIPE.format(task=task, variant=variant, metric=metric, reward=reward)
    (tmp_path / "recipe.toml").write_text(recipe_text(tiny_folder, text))
    checked = this_process("check", "recipe.toml", cwd=tmp_path)
    assert checked.code == 0, checked.err
    assert this_process("train", "recipe.toml", "--name", "own", "--json", cwd=tmp_path).json["status"] == "done"
    run = open_run(tmp_path / "runs", "own")
    scores = [s.score for g in run.read_rollouts(0) for s in g.samples]
    assert scores and all(score.status == "ok" for score in scores)
    pictures = [score.artifacts["boxes"] for score in scores if score.artifacts]
    assert len(pictures) == (len(scores) if reward else 0)
    assert all(RunImages(run.dir).find(picture) for picture in pictures)
    (measured,) = this_process("eval", "own", "--max-rows", 6, "--json", cwd=tmp_path).json["evaluations"]
    assert measured["metrics"][metric]["n"] == 6
    assert measured["metrics"]["parse_failure"]["value"] == 1.0  # random weights write no answer
    probed = this_process("reward-check", "own", "--probe", "--json", cwd=tmp_path).json
    assert probed["stored"]["equal"]
    (found,) = probed["probes"].values()
    assert found["flagged"] == 0 and trick in {probe["name"] for probe in found["probes"]}
    assert found["honest"]["informed"] > 0.8
    assert this_process("report", "own", cwd=tmp_path).code == 0
