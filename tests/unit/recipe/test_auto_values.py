"""Values that a recipe leaves open: chosen once, in order, with a reason that the run keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.dist import world
from vlmrl.errors import Problem, RecipeError
from vlmrl.recipe import auto_values as settling
from vlmrl.recipe.auto_values import Choice, choose, fill_open_keys, keep_choices, open_keys, require_filled
from vlmrl.recipe.changes import compare_recipes
from vlmrl.recipe.load import LoadedRecipe, load_recipe, recipe_from_resolved, reload_recipe
from vlmrl.setup import auto_choice as of_runs
from vlmrl.setup.auto_choice import choices_of, fill_for_run
from vlmrl.setup.memory_fit import HERE, Target
from vlmrl.setup.memory_sizes import Gpu

RECIPE = """[model]
path = "m"
[[data]]
path = "d"
[train]
steps = 7
"""
KEYS = {"train.max_seconds": lambda r: r.train.max_seconds is None, "eval.patience": lambda r: r.eval.patience is None}


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """A recipe in a world where two keys may be left open, the second chosen from the first."""
    monkeypatch.setattr(settling, "OPEN", KEYS)
    monkeypatch.setattr(of_runs, "OPEN", KEYS)
    (tmp_path / "r.toml").write_text(RECIPE)
    return tmp_path / "r.toml"


def seconds(recipe) -> Choice:
    return Choice("train.max_seconds", 60 * recipe.train.steps, "a minute a step", Problem("slow", level="warning"))


def patience(recipe) -> Choice:
    return Choice("eval.patience", recipe.train.max_seconds // 100, "from train.max_seconds: see r.toml:3")


CHOOSERS = {"train.max_seconds": seconds, "eval.patience": patience}


def filled(loaded: LoadedRecipe) -> LoadedRecipe:
    return fill_open_keys(loaded, choose(loaded.recipe, CHOOSERS))


def test_open_keys_are_chosen_in_order_and_recorded_with_their_reasons(file):
    loaded = load_recipe(file)
    assert open_keys(loaded.recipe) == ["train.max_seconds", "eval.patience"]
    found = filled(loaded)
    assert (found.recipe.train.max_seconds, found.recipe.eval.patience) == (420, 4)  # 60 * 7; 420 // 100
    assert found.origins["train.max_seconds"] == "auto: a minute a step"
    assert found.origins["train.steps"] == loaded.origins["train.steps"] == f"{file}:6"
    assert found.resolved["origins"] == found.origins and open_keys(found.recipe) == []
    assert recipe_from_resolved(json.loads(json.dumps(found.resolved)), where="x") == found.recipe
    assert loaded.recipe.train.max_seconds is None  # the loaded recipe itself is as it was


def test_what_somebody_wrote_is_not_chosen(file):
    found = filled(load_recipe(file, overrides=["train.max_seconds=500"]))
    assert (found.recipe.train.max_seconds, found.recipe.eval.patience) == (500, 5)
    assert found.origins["train.max_seconds"] == "--set"


def test_a_run_must_not_begin_with_an_open_value(file):
    with pytest.raises(RecipeError, match=r"`train.max_seconds`, `eval.patience` must be chosen"):
        require_filled(load_recipe(file).recipe)
    require_filled(filled(load_recipe(file)).recipe)


def test_a_run_that_goes_on_keeps_what_was_chosen_with_its_reason(file):
    before = json.loads(json.dumps(filled(load_recipe(file)).resolved))
    again = reload_recipe(before, file, overrides=["train.steps=9"])
    assert again.recipe.train.max_seconds == 420 and again.origins["train.max_seconds"] == "auto: a minute a step"
    # A reason that ends like a place is still no place where somebody wrote the value.
    assert not again.is_set(("train", "max_seconds")) and not again.is_set(("eval", "patience"))
    edited = keep_choices(load_recipe(file, overrides=["train.steps=9"]), before)
    assert edited.recipe.train.max_seconds == 420 and edited.origins["train.max_seconds"] == "auto: a minute a step"
    assert [c.what for c in compare_recipes(before["recipe"], edited, file.parent)] == ["train.steps"]


def test_a_run_of_before_keeps_its_default(file):
    before = json.loads(json.dumps(load_recipe(file, overrides=["train.max_seconds=33"]).resolved))
    before["origins"]["train.max_seconds"] = "default"
    kept = keep_choices(load_recipe(file), before)
    assert (kept.recipe.train.max_seconds, kept.origins["train.max_seconds"]) == (33, "default")
    assert open_keys(kept.recipe) == ["eval.patience"]  # that run had none: it is chosen now


def test_a_default_that_has_changed_since_is_kept_unless_somebody_writes_the_key(file):
    before = json.loads(json.dumps(filled(load_recipe(file)).resolved))
    before["recipe"]["rollout"]["kv_cache_gib"] = 4.0  # was the default once
    before["recipe"]["optim"]["lr"] = 2e-6
    before["origins"]["optim.lr"] = f"{file}:9"  # the recipe said it then, and does not now
    again = keep_choices(load_recipe(file), before)
    assert (again.recipe.rollout.kv_cache_gib, again.origins["rollout.kv_cache_gib"]) == (4.0, "default")
    assert [c.what for c in compare_recipes(before["recipe"], again, file.parent)] == ["optim.lr"]
    asked = keep_choices(load_recipe(file, overrides=["rollout.kv_cache_gib=3.0"]), before)
    assert asked.recipe.rollout.kv_cache_gib == 3.0


def test_a_value_that_is_opened_on_purpose_is_chosen_anew(tmp_path, monkeypatch):
    keys = {"eval.metric": lambda r: r.eval.metric == "auto"}
    monkeypatch.setattr(settling, "OPEN", keys)
    (tmp_path / "r.toml").write_text(RECIPE + '[eval]\nmetric = "auto"\n')
    before = fill_open_keys(load_recipe(tmp_path / "r.toml"), [Choice("eval.metric", "brier", "here")]).resolved
    assert keep_choices(load_recipe(tmp_path / "r.toml"), before).recipe.eval.metric == "brier"
    asked = keep_choices(load_recipe(tmp_path / "r.toml", overrides=["eval.metric=auto"]), before)
    assert asked.recipe.eval.metric == "auto"
    assert reload_recipe(before, tmp_path / "r.toml", overrides=["eval.metric=auto"]).recipe.eval.metric == "auto"


def test_a_launcher_chooses_for_all_its_processes(file, monkeypatch, tmp_path):
    monkeypatch.setattr(of_runs, "choosers", lambda *arguments: CHOOSERS)
    loaded, warnings = fill_for_run(load_recipe(file), tmp_path)
    assert [w.message for w in warnings] == ["slow"] and loaded.recipe.eval.patience == 4
    told = choices_of(loaded)
    assert [c["key"] for c in told] == list(KEYS)
    monkeypatch.setenv(world.CHOICES_VARIABLE, json.dumps([dict(told[0], value=999), told[1]]))
    alone, _ = fill_for_run(load_recipe(file), tmp_path)  # no launcher started this process
    assert alone.recipe.train.max_seconds == 420
    monkeypatch.setattr(world, "launched", lambda: True)
    monkeypatch.setattr(of_runs, "choosers", lambda *arguments: pytest.fail("chosen a second time"))
    rank, warnings = fill_for_run(load_recipe(file), tmp_path)
    assert (rank.recipe.train.max_seconds, rank.recipe.eval.patience, warnings) == (999, 4, [])
    assert rank.origins == loaded.origins


@pytest.mark.parametrize(
    ("gpu", "overrides", "dtype", "reason"),
    [
        (True, [], "bfloat16", "a GPU is used"),
        (False, [], "float32", "no GPU is used"),
        (False, ["optim.name=adamw_bf16_kahan"], "bfloat16", "optim.name = adamw_bf16_kahan holds bfloat16 weights"),
    ],
)
def test_the_type_of_arithmetic_follows_the_device_and_a_run_keeps_it(tmp_path, gpu, overrides, dtype, reason):
    (tmp_path / "r.toml").write_text(RECIPE)
    elsewhere = Target(1, Gpu("H100", 80 << 30))
    fixed = ["model.device=cpu", "rollout.engine=torch", *overrides]
    loaded, _ = fill_for_run(load_recipe(tmp_path / "r.toml", overrides=fixed), tmp_path, elsewhere if gpu else HERE)
    assert (loaded.recipe.model.dtype, loaded.origins["model.dtype"]) == (dtype, f"auto: {reason}")
    again = keep_choices(load_recipe(tmp_path / "r.toml", overrides=fixed), json.loads(json.dumps(loaded.resolved)))
    assert again.recipe.model.dtype == dtype
    written = load_recipe(tmp_path / "r.toml", overrides=[*fixed, "model.dtype=bfloat16"])
    assert fill_for_run(written, tmp_path)[0].recipe.model.dtype == "bfloat16"
