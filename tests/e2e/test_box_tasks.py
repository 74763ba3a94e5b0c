"""The tasks counting and grounding through the commands: drawn data, check, training, evaluation, probe, report."""

from __future__ import annotations

from pathlib import Path

import pytest
from task_runs import assert_answers_score_the_same, assert_no_hole, measured, prepared, probed, trained

from vlmrl.store.media import RunImages

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
    prepared(tmp_path, task, "--synthetic", 20, "--side", 84, "--others", 1)
    run = trained(tmp_path, tiny_folder, RECIPE.format(task=task, variant=variant, metric=metric, reward=reward))
    scores = [s.score for g in run.read_rollouts(0) for s in g.samples]
    assert scores and all(score.status == "ok" for score in scores)
    pictures = [score.artifacts["boxes"] for score in scores if score.artifacts]
    assert len(pictures) == (len(scores) if reward else 0)
    assert all(RunImages(run.dir).find(picture) for picture in pictures)
    metrics = measured(tmp_path, "--max-rows", 6)
    assert metrics[metric]["n"] == 6
    assert metrics["parse_failure"]["value"] == 1.0  # random weights write no answer
    assert_no_hole(probed(tmp_path), trick)
    assert_answers_score_the_same(tmp_path)
