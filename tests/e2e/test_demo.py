"""`vlmrl demo` on drawn data, at a size of seconds: every command of the chain, none of the learning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import refused, settings, this_process

from vlmrl import demo
from vlmrl.demo import DEMOS, chosen_checkpoint, run_demo
from vlmrl.errors import RecipeError
from vlmrl.evaluate.records import read_evaluation
from vlmrl.recipe.files import shipped_folder
from vlmrl.store.layout import eval_dirs
from vlmrl.store.runs import create_run

SMALL = settings(
    "train.steps=2",
    "train.rows_per_step=4",
    "train.rehearsal=false",
    "optim.warmup_steps=1",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.max_new_tokens=8",
    "eval.every_steps=2",
    "eval.max_rows=4",
)


DRAWN = [
    ("geometry", "figures"),
    ("boxes", "images"),
    ("counting", "images"),
    ("figures", "figures"),
    ("crop", "pictures"),
    ("python", "pictures"),
]


@pytest.mark.parametrize(("task", "unit"), DRAWN)
def test_the_chain_on_drawn_images_ends_with_a_paired_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, unit: str
) -> None:
    typed: list[str] = []

    def in_this_process(*words: Any, say: Any) -> dict[str, Any]:
        whole_calls = settings("rollout.max_new_tokens=60") if task in ("crop", "python") else []
        done = this_process(*words, *([*SMALL, *whole_calls] if words[0] in ("sft", "train") else ()), cwd=tmp_path)
        assert done.code == 0, done.err
        typed.append(str(words[0]))
        return json.loads(done.out) if done.out.startswith("{") else {}

    words = DEMOS[task].prep
    numbers = {words[i + 1] for i, word in enumerate(words) if word.startswith("--synthetic")}
    small = replace(DEMOS[task], prep=tuple("40" if word in numbers else word for word in words))
    monkeypatch.setitem(DEMOS, task, small)
    monkeypatch.setattr(demo, "vlmrl", in_this_process)
    spoken: list[str] = []
    result = run_demo(tmp_path / "out", 3, shipped_folder(), spoken.append, task)
    assert typed == ["prep", "sft", "train", "eval", "eval", "merge", "reward-check", "report"]
    assert set(result["difference"]) == {"reward", "accuracy"} and result["unit"] == unit
    low, high = result["difference"]["accuracy"]["ci95"]
    assert -1 <= low <= result["grpo"]["accuracy"] - result["sft"]["accuracy"] <= high <= 1
    assert Path(result["report"]).is_file() and (Path(result["model"]) / "config.json").is_file()
    if task == "boxes":  # the same rows at several steps, so that a report can show how the boxes move
        folders = eval_dirs(tmp_path / "out" / "runs" / result["run"])
        steps = [read_evaluation(folder).rows for folder in folders if folder.name.startswith("validation")]
        assert len(steps) == 2 and {row["prompt_id"] for row in steps[0]} == {row["prompt_id"] for row in steps[1]}
        assert all(row["truth"]["box"] and row["images"] for rows in steps for row in rows)
    assert [line[:3] for line in spoken if line[1:2] == "/"] == [f"{i}/8" for i in range(1, 9)]


@pytest.mark.parametrize(("step", "expected"), [(None, "best"), (0, "last"), (40, "best")])
def test_a_demo_that_was_never_better_than_its_start_shows_its_last_step(
    tmp_path: Path, step: int | None, expected: str
) -> None:
    with create_run(tmp_path, kind="rl", recipe_name="demo") as run:
        if step is not None:
            run.set_best(step, "reward", 0.5)
    assert chosen_checkpoint(run.dir) == expected


def test_a_demo_that_does_not_exist_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = refused("demo", "--task", "geometrie")
    assert isinstance(error, RecipeError) and "unknown task `geometrie`" in error.message
    assert "geometry" in str(error.hint) and list(tmp_path.iterdir()) == []


def test_the_help_names_every_demo(tmp_path: Path) -> None:
    text = this_process("demo", "--help", cwd=tmp_path).out
    assert f"Task to learn: {' or '.join(DEMOS)};" in " ".join(text.split())
