"""A table of one's own with a reward of one's own, through `vlmrl train`: four spellings, two sources, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import this_process
from small_runs import recipe_text
from tinyworld import image

from vlmrl.store.runs import Run, open_run

TEXT = "Which number is it?"
ROWS = 12
LENGTH = "min(1.0, {text}.count('e') / 4) + len({text}) / 1000"
"""A score that differs between random responses: a group of equal scores would train nothing."""


def picture(index: int) -> dict[str, Any]:
    return {"images": [f"pictures/{index}.png"]}


def talk(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}]}


TABLES = {
    "vlmrl": lambda i: {"prompt": f"<image>{TEXT}", **picture(i), "answer": str(i), "level": "easy"},
    "trl": lambda i: {**talk(TEXT), **picture(i), "solution": str(i)},
    "verl": lambda i: {
        **talk(f"<image>{TEXT}"),
        **picture(i),
        "data_source": "mine",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"index": i},
    },
    "easyr1": lambda i: {"problem": f"<image>{TEXT}", **picture(i), "answer": str(i)},
}
REWARDS = {
    "vlmrl": f"""
NEEDS_IMAGES = True
def score(x):
    assert int(x.truth["answer"]) in range({ROWS}) and x.columns["level"] == "easy"
    (seen,) = x.images
    return {{"letters": {LENGTH.format(text="x.response")}, "wide": float(seen.width > 30), "later": None}}
""",
    "trl": f"""
def score(completions, prompts, solution, **columns):
    assert len(completions) == len(prompts) == len(solution) and all(int(s) in range({ROWS}) for s in solution)
    texts = [c[-1]["content"] for c in completions]
    return [{LENGTH.format(text="t")} for t in texts]
""",
    "verl": f"""
def score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "mine" and int(ground_truth) == extra_info["index"]
    return {{"score": {LENGTH.format(text="solution_str")}, "acc": len(solution_str) % 2 == 0}}
""",
    "easyr1": f"""
def score(reward_inputs):
    assert all(int(x["ground_truth"]) in range({ROWS}) for x in reward_inputs)
    return [{{"overall": {LENGTH.format(text='x["response"]')}, "format": 0.0, "accuracy": -1}} for x in reward_inputs]
""",
}
RECIPE = """
rollout = {prompts_per_step = 4, samples_per_prompt = 3, max_new_tokens = 10}
train.steps = 2
optim.lr = 1e-3
eval.every_steps = 0
"""


def source(name: str, reward: str, share: float = 1.0) -> str:
    return f'[[data]]\npath = "{name}.jsonl"\nreward = "{reward}:score"\nshare = {share}\n'


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with pictures, a table and a reward of each style."""
    (tmp_path / "pictures").mkdir()
    for i in range(ROWS):
        image(i, 40, 56).save(tmp_path / "pictures" / f"{i}.png")
    for style, row in TABLES.items():
        (tmp_path / f"{style}.jsonl").write_text("".join(json.dumps(row(i)) + "\n" for i in range(ROWS)))
        (tmp_path / f"{style}.py").write_text(REWARDS[style])
    return tmp_path


def train(place: Path, model: Path, data: str, more: str = ""):
    (place / "recipe.toml").write_text(recipe_text(model, RECIPE + more) + data)
    return this_process("train", "recipe.toml", "--json", cwd=place)


def only_run(place: Path, within: str = "runs") -> Run:
    (folder,) = (place / within).iterdir()
    return open_run(folder.parent, folder.name)


@pytest.mark.slow
@pytest.mark.parametrize("styles", [("vlmrl", "trl"), ("verl", "easyr1")])
def test_two_tables_with_rewards_of_other_houses_train_in_one_run(place, tiny_folder, styles):
    data = source(styles[0], f"{styles[0]}.py", 3.0) + source(styles[1], f"{styles[1]}.py", 1.0)
    more = ""
    if "verl" in styles:
        data = data.replace("share = 3.0", 'share = 3.0\nvalidation = "verl.jsonl"')
        more = 'eval.metric = "accuracy"\n'
    done = train(place, tiny_folder, data, more)
    assert done.json["status"] == "done", done.err
    assert "chosen: model.gradient_checkpointing = false: no GPU is used\n" in done.err
    run = only_run(place)
    assert json.loads((run.dir / "resolved.json").read_text())["recipe"]["model"]["gradient_checkpointing"] is False
    groups = [g for step in (0, 1) for g in run.read_rollouts(step)]
    assert [g.row.source for g in groups].count(styles[0]) == 6 and len(groups) == 8
    parts = {
        "vlmrl": {"letters", "wide", "later"},
        "trl": {"reward"},
        "verl": {"score", "acc"},
        "easyr1": {"overall", "format", "accuracy"},
    }
    for group in groups:
        assert len(group.row.media) == 1 and TEXT in group.prompt_text
        for sample in group.samples:
            assert sample.score.error is None and sample.score.parts.keys() == parts[group.row.source]
    last = run.metrics("train")[-1]
    assert last["optim/updates"] == 2 and {f"reward/source/{s}" for s in styles} <= last.keys()
    if "verl" not in styles:
        assert "reward/accuracy" not in last and "accuracy" not in done.err
        return
    rights = [s.score.parts.get("acc", s.score.parts.get("accuracy")) for g in groups[4:] for s in g.samples]
    assert last["reward/accuracy"] == pytest.approx(sum(rights) / 12) and {0.0, 1.0, -1.0} >= {*rights}
    told = "accuracy is the part `acc` of verl.py:score (verl); the part `accuracy` of easyr1.py:score (easyr1)"
    assert done.err.count(told) == 1 and f"accuracy {last['reward/accuracy']:.3f}  " in done.err
    first, second = run.metrics("validation")
    assert first["eval/metric"] == first["eval/accuracy"] and 0 <= first["eval/accuracy"] <= 1
    assert run.manifest.best is not None and run.manifest.best.metric == "accuracy"
    assert f"validation at step 2: reward {second['eval/reward']:.3f}" in done.err and "  accuracy " in done.err


@pytest.mark.slow
def test_every_table_of_ours_shows_the_model_its_picture_and_the_reward_its_truth(place, tiny_folder):
    """Otherwise the asserts inside the rewards above might never have run."""
    (place / "verl.py").write_text(REWARDS["verl"].replace('"mine"', '"other"'))
    done = train(place, tiny_folder, source("verl", "verl.py"))
    assert done.code == 2 and "AssertionError" in done.err
    run = only_run(place, "runs/unfinished")
    assert run.status == "failed"


BAD_REWARDS = {
    "raises": ('raise KeyError("no such word")', "no such word"),
    "nan": ('return float("nan")', "nan"),
    "a string": ('return "very good"', "very good"),
    "nothing": ("return None", "no part of the reward applies"),
    "none for every part": ('return {"a": None, "b": None}', "no part of the reward applies: a, b"),
    "an empty mapping": ("return {}", "it returned no part"),
    "a list": ("return [1.0]", "[1.0]"),
    "leaves": ("import os; os._exit(3)", "ended"),
    "hangs": ("import time; time.sleep(60)", "1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", BAD_REWARDS)
def test_a_broken_reward_ends_the_run_with_the_row_and_no_traceback_of_ours(place, tiny_folder, mistake):
    body, told = BAD_REWARDS[mistake]
    (place / "broken.py").write_text(f"def score(x):\n    {body}\n")
    done = train(place, tiny_folder, source("vlmrl", "broken.py"), "reward.timeout_seconds = 1")
    assert done.code == 2, done.err
    assert done.out == "" and "Traceback" not in done.err and "internal error" not in done.err
    message = done.err[done.err.index("error: ") :]
    assert "broken.py" in message and told in message and "row" in message
    run = only_run(place, "runs/unfinished")
    assert run.status == "failed" and run.manifest.error
    verified = this_process("runs", "verify", f"runs/unfinished/{run.id}", "--json", cwd=place)
    assert verified.json["ok"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"prompt"', '"wording"', "prompt"),
        ('"images"', '"photographs"', "image"),
        ("pictures/3.png", "pictures/33.png", "33.png"),
        ("pictures/3.png", "../pictures/3.png", "3.png"),
        ('"3"}', '"3"', "easyr1.jsonl:4"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused_before_there_is_a_run(place, tiny_folder, old, new, told):
    path = place / "easyr1.jsonl"
    text = path.read_text().replace('"problem"', '"prompt"')
    assert old in text
    path.write_text(text.replace(old, new))
    done = train(place, tiny_folder, source("easyr1", "easyr1.py"))
    assert done.code == 2 and "Traceback" not in done.err, done.err
    assert told in done.err[done.err.index("error: ") :]
    assert not (place / "runs").exists() or list((place / "runs").iterdir()) == []


@pytest.mark.slow
def test_validation_on_a_test_split_is_refused_unless_forced_and_then_labelled(place, tiny_folder):
    table = place / "mine"
    table.mkdir()
    for name in ("train", "test"):
        rows = [json.loads(line) for line in (place / "vlmrl.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"images": [f"../pictures/{i}.png"]}) for i, row in enumerate(rows)]
        (table / f"{name}.jsonl").write_text("\n".join(lines))
    data = '[[data]]\npath = "mine"\nreward = "vlmrl.py:score"\nvalidation = "test"\nimages_root = "."\n'
    data = data.replace('images_root = "."', f'images_root = "{place}"')
    for name in ("train", "test"):
        path = table / f"{name}.jsonl"
        path.write_text(path.read_text().replace("../pictures", "pictures"))
    done = train(place, tiny_folder, data)
    assert done.code == 2 and "test" in done.err and "allow_test_split" in done.err
    assert "Traceback" not in done.err and not (place / "runs").exists()
    text = (place / "recipe.toml").read_text().replace("eval.", "eval.allow_test_split = true\neval.")
    (place / "recipe.toml").write_text(text)
    done = this_process("train", "recipe.toml", "--json", cwd=place)
    assert done.json["status"] == "done", done.err
    assert any("test split" in label for label in only_run(place).manifest.labels)


@pytest.mark.slow
def test_a_supervised_start_that_nobody_scores_needs_no_reward(tiny_folder, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "How many?", "answer": "3", "response": "three"}\n' * 2)
    settings = """
train = {steps = 1, rows_per_step = 2}
optim.lr = 1e-3
eval.enabled = false
[[data]]
path = "rows.jsonl"
"""
    (tmp_path / "start.toml").write_text(recipe_text(tiny_folder, settings, "sft"))
    checked = this_process("check", "start.toml", cwd=tmp_path)
    assert checked.code == 0, checked.err
    done = this_process("sft", "start.toml", "--name", "start", "--json", cwd=tmp_path).json
    assert done["status"] == "done" and open_run(tmp_path / "runs", "start").manifest.rewards == ()
    refused = this_process("eval", "start", cwd=tmp_path)
    assert refused.code == 2 and "has no reward of its own" in refused.err
    by_loss = this_process("sft", "start.toml", "--set", "eval.enabled=true", cwd=tmp_path)
    assert by_loss.code == 0 and "loss" in by_loss.err
