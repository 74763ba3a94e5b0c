"""Keys that were renamed: old recipes, runs and command lines work as before, and a note names the present key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.errors import RecipeError
from vlmrl.recipe.changes import compare_recipes
from vlmrl.recipe.explain import all_keys, explain
from vlmrl.recipe.files import RENAMED
from vlmrl.recipe.load import load_recipe, recipe_from_resolved, reload_recipe
from vlmrl.recipe.toml_lines import dotted

TEXT = 'model.path = "m"\n[[data]]\npath = "d"\n[reward]\nname = "taxonomy"\n'


@pytest.fixture
def old(tmp_path: Path) -> Path:
    (tmp_path / "old.toml").write_text(TEXT + 'on_unavailable = "stop"\n')
    return tmp_path / "old.toml"


def test_a_recipe_with_the_old_name_is_read_and_noted(old):
    loaded = load_recipe(old)
    assert loaded.recipe.reward.outage == "stop"
    assert loaded.origins["reward.outage"] == f"{old}:6" == loaded.where(("reward", "outage"))
    (note,) = loaded.warnings
    assert (note.level, note.where) == ("warning", f"{old}:6") and "is now called `reward.outage`" in note.message
    assert load_recipe(old, overrides=["reward.outage=mask"]).recipe.reward.outage == "mask"


def test_the_command_line_may_use_the_old_name(old):
    loaded = load_recipe(old, overrides=["reward.on_unavailable=mask"])
    assert loaded.recipe.reward.outage == "mask" and loaded.origins["reward.outage"] == "--set"
    assert [note.where for note in loaded.warnings] == [f"{old}:6", "--set reward.on_unavailable=mask"]


def test_the_old_name_in_a_parent_is_overridden_by_the_new_one_in_a_child(old):
    child = old.with_name("child.toml")
    child.write_text('extends = "old.toml"\n[reward]\noutage = "wait"\n')
    assert load_recipe(child).recipe.reward.outage == "wait"


def test_both_names_in_one_file_are_an_error(old):
    old.write_text(old.read_text() + 'outage = "mask"\n')
    with pytest.raises(RecipeError, match="both are set") as caught:
        load_recipe(old)
    assert caught.value.where == f"{old}:6"


def test_a_run_that_was_made_with_the_old_name_goes_on_with_its_value(old):
    resolved = json.loads(json.dumps(load_recipe(old).resolved))
    reward, origins = resolved["recipe"]["reward"], resolved["origins"]
    reward["on_unavailable"] = reward.pop("outage")
    origins["reward.on_unavailable"] = origins.pop("reward.outage")
    del reward["outage_minutes"], origins["reward.outage_minutes"]
    assert recipe_from_resolved(resolved, where="run").reward.outage == "stop"
    again = reload_recipe(resolved, old)
    assert again.recipe.reward.outage == "stop" and again.origins["reward.outage"] == f"{old}:6"
    assert "on_unavailable" not in again.resolved["recipe"]["reward"]
    assert compare_recipes(resolved["recipe"], again, Path.cwd()) == []
    changed = reload_recipe(resolved, old, overrides=["reward.on_unavailable=mask"])
    (change,) = compare_recipes(resolved["recipe"], changed, Path.cwd())
    assert (change.what, change.old, change.new, change.kind) == ("reward.outage", "stop", "mask", "free")


def test_present_names_exist_and_old_names_do_not():
    known = all_keys()
    for before, now in RENAMED.items():
        assert dotted(now) in known and dotted(before) not in known
        assert explain(dotted(before)).key == dotted(now)
