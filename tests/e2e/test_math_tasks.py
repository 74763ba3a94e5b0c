"""Mathematics without images, and sets of composite problems, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from task_runs import assert_answers_score_the_same, assert_no_hole, measured, prepared, probed, trained
from task_tables import sizes_of

RECIPE = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 32}
train.steps = 1
algo.entropy_coef = 0.01
optim.lr = 1e-3
eval = {every_steps = 1, metric = "accuracy", max_rows = 4}
checkpoint.every_steps = 1
reward.profile = "rllava"
[[data]]
path = "data"
task = "text_math"
variant = "think"
"""


def aime_row(number: int) -> dict[str, object]:
    """A row of an evaluation table in verl's form: a chat, and the answer beside its style."""
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"How much is 1 + {number}?"}]
    return {"prompt": chat, "reward_model": {"ground_truth": str(number + 1), "style": "rule"}, "data_source": "aime"}


@pytest.mark.slow
def test_text_alone_trains_and_evaluates_without_any_image(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"problem": f"What is {n} + 2?", "answer": str(n + 2)}) + "\n" for n in range(30))
    )
    (tmp_path / "aime.jsonl").write_text("".join(json.dumps(aime_row(n)) + "\n" for n in range(6)))
    made = prepared(tmp_path, "text_math", "train.jsonl", "--test", "aime.jsonl")
    assert sizes_of(made["info"]) == {"train": 27, "validation": 3, "test": 6}
    run = trained(tmp_path, tiny_folder, RECIPE)
    groups = list(run.read_rollouts(0))
    assert all(sample.score.status == "ok" for group in groups for sample in group.samples)
    assert not any(group.row.media for group in groups)
    assert measured(tmp_path, "--split", "test")["accuracy"]["n"] == 6
    probed(tmp_path)


SETS = """
rollout = {prompts_per_step = 2, samples_per_prompt = 2, max_new_tokens = 24}
train.steps = 1
algo.entropy_coef = 0.01
optim.lr = 1e-3
eval = {every_steps = 1, metric = "accuracy"}
checkpoint.every_steps = 1
[[data]]
path = "data"
task = "we_math"
variant = "direct"
"""


@pytest.mark.slow
def test_drawn_sets_go_through_every_command_and_have_intervals_over_sets(tmp_path: Path, tiny_folder: Path) -> None:
    made = prepared(tmp_path, "we_math", "--synthetic", 20, "--side", 84, "--most", 2, "--steps", "2")
    assert sizes_of(made["info"]) == {"train": 60, "validation": 60, "test": 120}
    trained(tmp_path, tiny_folder, SETS)
    metrics = measured(tmp_path)
    assert metrics["score_strict"]["n"] == 120 and metrics["score_strict"]["clusters"] == 40
    assert metrics["IK"]["value"] == 1.0  # random weights write no letter
    assert metrics["accuracy/num_steps-1"]["n"] == 80 and metrics["accuracy/num_steps-2"]["n"] == 40
    assert_no_hole(probed(tmp_path), "every letter")
    assert_answers_score_the_same(tmp_path)
