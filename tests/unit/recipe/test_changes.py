"""What may change in a run that goes on: every key has a rule, and the difference of two recipes is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.errors import ProblemsError
from vlmrl.key_facts import OnResume
from vlmrl.recipe.changes import compare_recipes, rule_of
from vlmrl.recipe.explain import all_keys
from vlmrl.recipe.key_fields import key_name, leaf_fields
from vlmrl.recipe.load import leaves, load_recipe, recipe_from_resolved, reload_recipe
from vlmrl.recipe.schema import Recipe
from vlmrl.recipe.tables import SOURCES

RECIPE = """
kind = "rl"
[model]
path = "models/base"
[[data]]
path = "rows.jsonl"
prompt = "ask.jinja"
[reward]
name = "score.py:fn"
[reward.args]
scale = 2
[optim]
lr = 1e-5
[rollout]
stop = ["a", "b"]
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return tmp_path / "recipe.toml"


def changed(recipe: Path, *overrides: str) -> dict[str, tuple]:
    """What -> (old, new, kind) of the recipe resumed with these overrides."""
    old = json.loads(json.dumps(load_recipe(recipe).resolved))
    loaded = reload_recipe(old, recipe, overrides=overrides)
    return {c.what: (c.old, c.new, c.kind) for c in compare_recipes(old["recipe"], loaded, Path.cwd())}


def test_every_key_of_the_schema_declares_one_rule():
    rules = {
        key_name(key): [mark for mark in field.metadata if isinstance(mark, OnResume)]
        for key, field in leaf_fields(Recipe)
    }
    assert list(rules) == all_keys()
    assert {key: len(marks) for key, marks in rules.items() if len(marks) != 1} == {}
    assert all(rule_of(tuple(key.split("."))) is marks[0] and marks[0].reason for key, marks in rules.items())


def test_a_rule_holds_for_what_is_inside_a_table_of_ones_own():
    assert rule_of(("reward", "args", "scale")) is rule_of(("reward", "args"))
    assert rule_of(("data", 3, "columns", "answer")) is rule_of(("data", 0, "columns"))
    with pytest.raises(KeyError):
        rule_of(("optim", "nothing"))


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("train.steps", "free"),
        ("train.max_seconds", "free"),
        ("checkpoint.every_steps", "free"),
        ("eval.every_steps", "free"),
        ("log.keep_rollouts", "free"),
        ("rollout.batch_tokens", "free"),
        ("rollout.kv_cache_gib", "free"),
        ("parallel.timeout_seconds", "free"),
        ("model.device", "free"),
        ("optim.lr", "asked"),
        ("algo.name", "asked"),
        ("reward.name", "asked"),
        ("data.share", "asked"),
        ("rollout.temperature", "asked"),
        ("train.seed", "asked"),
        ("eval.metric", "asked"),
        ("model.path", "refused"),
        ("model.dtype", "refused"),
        ("lora.rank", "refused"),
        ("optim.name", "refused"),
        ("model.freeze", "refused"),
        ("kind", "refused"),
    ],
)
def test_keys_that_everybody_asks_about(key, kind):
    assert rule_of(tuple(key.split("."))).kind == kind


def test_nothing_is_changed_by_nothing(recipe):
    assert changed(recipe) == {}


def test_a_key_that_was_added_since_has_not_changed_unless_it_is_set(recipe):
    """A run made before `eval.at_start`, `reward.outage` and `log.project` goes on as it was."""
    old = json.loads(json.dumps(load_recipe(recipe).resolved))
    for table, key in (("eval", "at_start"), ("reward", "outage"), ("log", "project")):
        del old["recipe"][table][key], old["origins"][f"{table}.{key}"]
    assert compare_recipes(old["recipe"], reload_recipe(old, recipe), Path.cwd()) == []
    loaded = reload_recipe(old, recipe, overrides=["eval.at_start=false"])
    (change,) = compare_recipes(old["recipe"], loaded, Path.cwd())
    assert (change.what, change.old, change.new) == ("eval.at_start", True, False)


def test_changes_say_old_new_and_rule(recipe):
    found = changed(recipe, "train.steps=200", "optim.lr=1e-6", "model.path=other", "rollout.stop=[]")
    assert found == {
        "train.steps": (100, 200, "free"),
        "optim.lr": (1e-5, 1e-6, "asked"),
        "model.path": ("models/base", "other", "refused"),
        "rollout.stop": (["a", "b"], [], "asked"),
    }


def test_a_table_that_was_left_out_can_be_asked_for_and_is_told_key_by_key(recipe):
    found = changed(recipe, "lora.rank=8")
    assert found["lora.rank"] == (None, 8, "refused") and set(found) > {"lora.alpha", "lora.targets"}


def test_tables_of_ones_own_are_compared_entry_by_entry(recipe):
    assert changed(recipe, "reward.args.scale=3", "reward.args.more=true") == {
        "reward.args.scale": (2, 3, "asked"),
        "reward.args.more": (None, True, "asked"),
    }
    assert changed(recipe, "reward.args={}") == {"reward.args.scale": (2, None, "asked")}


def test_another_number_of_sources_is_one_change(recipe):
    old = load_recipe(recipe).resolved["recipe"]
    loaded = reload_recipe(load_recipe(recipe).resolved, recipe, overrides=["data.1.path=more.jsonl"])
    (change,) = compare_recipes(old, loaded, Path.cwd())
    assert (change.old, change.new, change.rule) == (["rows.jsonl"], ["rows.jsonl", "more.jsonl"], SOURCES)


def test_another_spelling_of_the_same_place_is_no_change(recipe, tmp_path):
    same = (
        f'data.0.path="{tmp_path}/rows.jsonl"',
        f'reward.name="./{tmp_path.name}/../score.py:fn"',
        f'model.path="{tmp_path}/models/../models/base"',
    )
    assert changed(recipe, *same) == {}
    assert changed(recipe, 'reward.name="./score.py:other"')["reward.name"][2] == "asked"
    assert changed(recipe, 'reward.name="moved/mine.py:fn"')["reward.name"][2] == "free", "its source is compared"
    assert changed(recipe, 'reward.name="length"')["reward.name"][2] == "asked"
    assert changed(recipe, 'data.0.reward="moved/mine.py:fn"')["data.0.reward"][2] == "asked", "it was another's"
    assert changed(recipe, "data.0.path=elsewhere.jsonl") == {"data.0.path": ("rows.jsonl", "elsewhere.jsonl", "free")}


def test_a_hidden_secret_cannot_be_compared(recipe):
    old = json.loads(json.dumps(load_recipe(recipe, overrides=["reward.args.api_key=abc"]).resolved))
    old["recipe"]["reward"]["args"]["api_key"] = "<redacted>"
    loaded = load_recipe(recipe, overrides=["reward.args.api_key=abc"])
    assert compare_recipes(old["recipe"], loaded, Path.cwd(), "<redacted>") == []
    assert [c.what for c in compare_recipes(old["recipe"], loaded, Path.cwd())] == ["reward.args.api_key"]


def test_a_changed_value_says_where_it_was_written(recipe, tmp_path):
    old = load_recipe(recipe).resolved
    (by_set,) = compare_recipes(old["recipe"], reload_recipe(old, recipe, overrides=["optim.lr=2e-5"]), tmp_path)
    assert by_set.where == "--set optim.lr=2e-5"
    recipe.write_text(RECIPE.replace("lr = 1e-5", "lr = 3e-5"))
    (by_file,) = compare_recipes(old["recipe"], load_recipe(recipe), tmp_path)
    assert by_file.where == f"{recipe}:13"


def test_a_reloaded_recipe_is_the_run_s_with_its_origins_and_no_new_default(recipe):
    """A default that changed between two versions must not slip into a run that goes on."""
    old = json.loads(json.dumps(load_recipe(recipe, overrides=["train.steps=7"]).resolved))
    old["recipe"]["rollout"]["batch_tokens"] = 1234  # was the default once
    loaded = reload_recipe(old, recipe, overrides=["eval.patience=3", "reward.args.scale=5"])
    assert loaded.recipe.rollout.batch_tokens == 1234
    assert loaded.recipe.train.steps == 7 and loaded.recipe.eval.patience == 3
    told = loaded.resolved["origins"]
    assert told["rollout.batch_tokens"] == "default" and told["optim.lr"] == f"{recipe}:13"
    assert told["train.steps"] == told["eval.patience"] == told["reward.args.scale"] == "--set"
    assert told["reward.style"] == "default"
    assert loaded.is_set(("optim", "lr")) and not loaded.is_set(("optim", "beta1"))
    assert recipe_from_resolved(loaded.resolved, where="x") == loaded.recipe
    assert dict(leaves(reload_recipe(loaded.resolved, recipe).resolved["recipe"])) == dict(
        leaves(loaded.resolved["recipe"])
    )


def test_a_wrong_override_of_a_reloaded_recipe_is_told_as_ever(recipe):
    old = load_recipe(recipe).resolved
    with pytest.raises(ProblemsError, match="stepz"):
        reload_recipe(old, recipe, overrides=["train.stepz=3"])
    with pytest.raises(ProblemsError, match="vlmrl sft"):
        reload_recipe(old, recipe, kind="sft")
