"""Mathematics without images, and sets of composite problems, through the commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import this_process
from small_runs import recipe_text

from vlmrl.store.open_run import open_run

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
    made = this_process(
        "prep", "text_math", "train.jsonl", "--test", "aime.jsonl", "--out", "data", "--json", cwd=tmp_path
    )
    assert made.code == 0, made.err
    assert {split: facts["rows"] for split, facts in made.json["info"]["splits"].items()} == {
        "train": 27,
        "validation": 3,
        "test": 6,
    }
    (tmp_path / "recipe.toml").write_text(recipe_text(tiny_folder, RECIPE))
    checked = this_process("check", "recipe.toml", cwd=tmp_path)
    assert checked.code == 0, checked.err
    assert this_process("train", "recipe.toml", "--name", "own", "--json", cwd=tmp_path).json["status"] == "done"
    run = open_run(tmp_path / "runs", "own")
    groups = list(run.read_rollouts(0))
    assert all(sample.score.status == "ok" for group in groups for sample in group.samples)
    assert not any(group.row.media for group in groups)
    (measured,) = this_process("eval", "own", "--split", "test", "--json", cwd=tmp_path).json["evaluations"]
    assert measured["metrics"]["accuracy"]["n"] == 6
    probed = this_process("reward-check", "own", "--probe", "--json", cwd=tmp_path).json
    assert probed["stored"]["equal"]
    assert this_process("report", "own", cwd=tmp_path).code == 0


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
    options = ["--synthetic", 20, "--side", 84, "--most", 2, "--steps", "2", "--out", "data", "--json"]
    made = this_process("prep", "we_math", *options, cwd=tmp_path)
    assert made.code == 0, made.err
    assert {split: facts["rows"] for split, facts in made.json["info"]["splits"].items()} == {
        "train": 60,
        "validation": 60,
        "test": 120,
    }
    (tmp_path / "recipe.toml").write_text(recipe_text(tiny_folder, SETS))
    checked = this_process("check", "recipe.toml", cwd=tmp_path)
    assert checked.code == 0, checked.err
    assert this_process("train", "recipe.toml", "--name", "own", "--json", cwd=tmp_path).json["status"] == "done"
    (measured,) = this_process("eval", "own", "--json", cwd=tmp_path).json["evaluations"]
    metrics = measured["metrics"]
    assert metrics["score_strict"]["n"] == 120 and metrics["score_strict"]["clusters"] == 40
    assert metrics["IK"]["value"] == 1.0  # random weights write no letter
    assert metrics["accuracy/num_steps-1"]["n"] == 80 and metrics["accuracy/num_steps-2"]["n"] == 40
    probed = this_process("reward-check", "own", "--probe", "--json", cwd=tmp_path).json
    (probes,) = probed["probes"].values()
    assert probes["flagged"] == 0 and "every letter" in {probe["name"] for probe in probes["probes"]}
    assert probes["honest"]["informed"] > 0.8
    assert this_process("report", "own", cwd=tmp_path).code == 0
