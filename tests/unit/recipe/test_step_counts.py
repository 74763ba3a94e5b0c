"""Steps that are counted: `train.epochs` beside `train.steps`, `optim.warmup_ratio` beside `optim.warmup_steps`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.errors import ProblemsError
from vlmrl.recipe.auto_values import keep_choices, open_keys
from vlmrl.recipe.changes import compare_recipes
from vlmrl.recipe.load import LoadedRecipe, load_recipe, reload_recipe
from vlmrl.recipe.rules.training import NUMBER_RULES
from vlmrl.setup.auto_choice import count_steps, fill_for_answers, fill_for_run

RECIPE = """[model]
path = "m"
[[data]]
path = "{rows}"
[rollout]
engine = "torch"
prompts_per_step = 4
[train]
epochs = 3
[optim]
warmup_ratio = 0.1
"""


@pytest.fixture
def file(tmp_path) -> Path:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "1"}) + "\n" for i in range(10)))
    (tmp_path / "r.toml").write_text(RECIPE.format(rows=rows))
    return tmp_path / "r.toml"


def filled(file: Path, *overrides: str) -> LoadedRecipe:
    return fill_for_run(load_recipe(file, overrides=overrides), file.parent)[0]


def lengths(loaded: LoadedRecipe) -> tuple[int, int]:
    return loaded.recipe.train.steps, loaded.recipe.optim.warmup_steps


def test_steps_are_counted_from_the_rows_and_the_warm_up_from_the_steps(file):
    loaded = filled(file)
    assert lengths(loaded) == (8, 1)  # 3 x 10 rows at 4 a step: 7.5; a tenth of 8: 0.8
    assert loaded.origins["train.steps"] == "auto: 3 epochs of 10 rows, 4 per step"
    assert loaded.origins["optim.warmup_steps"] == "auto: 0.1 of 8 steps"
    assert loaded.resolved["recipe"]["train"]["steps"] == 8 and loaded.resolved["recipe"]["train"]["epochs"] == 3.0


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("train.epochs=0.4",), 1),  # 0.4 x 10 / 4
        (("train.epochs=0.1", "rollout.prompts_per_step=1"), 1),  # not 2: a tenth is no binary number
        (("train.epochs=1", "data.0.max_rows=9"), 3),
        (("train.epochs=2", "kind=sft", "train.rows_per_step=7"), 3),  # 20 / 7
        (("train.epochs=0.001",), 1),
    ],
)
def test_epochs_are_counted_in_rows_per_step(file, overrides, steps):
    assert filled(file, *overrides).recipe.train.steps == steps


def test_all_sources_count_together_whatever_their_shares(file):
    second = file.parent / "second.jsonl"
    second.write_text("".join(json.dumps({"prompt": f"b{i}", "answer": "1"}) + "\n" for i in range(30)))
    text = file.read_text().replace("[rollout]", f'share = 3\n[[data]]\npath = "{second}"\n[rollout]')
    file.write_text(text)
    assert filled(file, "train.epochs=2").recipe.train.steps == 20  # 2 x (10 + 30) / 4


def test_what_is_written_last_decides(file):
    steps = filled(file, "train.steps=5", "optim.warmup_steps=2")
    assert lengths(steps) == (5, 2) and steps.recipe.train.epochs is None and steps.recipe.optim.warmup_ratio is None
    child = file.parent / "child.toml"
    child.write_text('extends = "r.toml"\n[train]\nsteps = 6\n[optim]\nwarmup_steps = 0\n')
    assert lengths(filled(child)) == (6, 0)
    assert lengths(filled(child, "train.epochs=1", "optim.warmup_ratio=0.5")) == (3, 2)


@pytest.mark.parametrize("overrides", [("train.steps=5", "train.epochs=2"), ("train={steps=5, epochs=2}",)])
def test_both_at_one_place_are_an_error(file, overrides):
    with pytest.raises(ProblemsError, match=r"`train\.steps` and `train\.epochs` are both set"):
        load_recipe(file, overrides=overrides)
    file.write_text(file.read_text().replace("warmup_ratio", "warmup_steps = 3\nwarmup_ratio"))
    with pytest.raises(ProblemsError) as error:
        load_recipe(file)
    assert [p.where for p in error.value.problems] == [f"{file}:12"]


def test_no_steps_at_all_are_an_error(file):
    (problem,) = [p for rule in NUMBER_RULES for p in rule(load_recipe(file, overrides=["train.steps=0"]))]
    assert problem.message == "`train.steps` is 0: nothing would be trained" and "train.epochs" in str(problem.hint)
    assert not [p for rule in NUMBER_RULES for p in rule(load_recipe(file))]


def test_a_run_that_goes_on_keeps_its_count_unless_the_epochs_change(file):
    before = json.loads(json.dumps(filled(file).resolved))
    rows = file.parent / "rows.jsonl"
    rows.write_text(rows.read_text() * 2)
    edited = keep_choices(load_recipe(file), before)
    assert lengths(edited) == (8, 1) and compare_recipes(before["recipe"], edited, file.parent) == []
    assert lengths(reload_recipe(before, file)) == (8, 1)
    longer = reload_recipe(before, file, overrides=["train.steps=12"])
    assert lengths(longer) == (12, 1) and longer.recipe.train.epochs is None
    again = keep_choices(load_recipe(file, overrides=["train.epochs=4"]), before)
    assert open_keys(again.recipe)[0] == "train.steps"
    more = fill_for_run(reload_recipe(before, file, overrides=["train.epochs=4"]), file.parent)[0]
    assert lengths(more) == (20, 1)  # 4 x 20 rows at 4 a step; the warm-up is that of before
    changes = {c.what: c.kind for c in compare_recipes(before["recipe"], more, file.parent)}
    assert changes == {"train.steps": "free", "train.epochs": "free"}


def test_a_run_of_before_these_keys_opens_as_it_was(file):
    loaded = load_recipe(file, overrides=["train.steps=7", "optim.warmup_steps=2"])
    before = json.loads(json.dumps(loaded.resolved))
    del before["recipe"]["train"]["epochs"], before["recipe"]["optim"]["warmup_ratio"]
    assert lengths(reload_recipe(before, file)) == (7, 2)
    assert compare_recipes(before["recipe"], keep_choices(loaded, before), file.parent) == []


def test_rows_that_cannot_be_counted_are_left_to_the_check_of_the_data(file):
    (file.parent / "rows.jsonl").unlink()
    found = count_steps(load_recipe(file).recipe)
    assert found.value == 100 and found.reason.startswith("the rows cannot be counted: ")


def test_an_evaluation_counts_no_rows(file):
    (file.parent / "rows.jsonl").unlink()
    recipe, _ = fill_for_answers(load_recipe(file).recipe, "m")
    assert open_keys(recipe) == []
