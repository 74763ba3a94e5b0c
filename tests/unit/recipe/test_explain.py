from __future__ import annotations

import pytest

from vlmrl.errors import RecipeError
from vlmrl.recipe.explain import all_keys, diff_recipes, explain, first_comment, json_schema, list_recipes, toml_lines
from vlmrl.recipe.files import parse_toml
from vlmrl.recipe.load import load_recipe


def test_a_key_is_explained_with_type_default_and_range():
    found = explain("rollout.temperature")
    assert (found.type, found.default, found.range, found.required) == ("number", 1.0, ">= 0.001 and <= 1000", False)
    assert found.help.startswith("Sampling temperature")


@pytest.mark.parametrize("key", all_keys())
def test_every_key_has_help_and_a_type(key):
    found = explain(key)
    assert len(found.help) > 10
    assert found.type not in ("", "any value")


def test_ranges_are_found_inside_optional_types():
    assert explain("algo.clip_low").range == ">= 1e-09 and < 1"
    assert explain("train.max_seconds").range == "> 0 and <= 1,000,000,000"
    assert explain("reward.timeout_seconds").range == ">= 0.001 and <= 3,600"


def test_a_word_or_a_list_is_told_as_both():
    found = explain("lora.targets")
    assert (found.type, found.choices, found.default) == ('"all-linear" or list of strings', (), "all-linear")
    assert explain("lora.rank").required and explain("lora").keys[0] == "rank"
    found = explain("model.gradient_checkpointing")
    assert found.type == 'true or false or "auto" or "vision" or number' and found.choices == ()
    assert (found.range, found.default) == ("> 0 and < 1", "auto")


def test_choices_are_listed():
    assert explain("model.dtype").choices == ("auto", "float32", "bfloat16")
    assert explain("model.freeze").choices == ("vision", "connector", "language", "embeddings")


def test_the_table_may_be_left_out_when_one_table_has_the_key():
    assert explain("clip_high").key == "algo.clip_high"
    with pytest.raises(RecipeError, match="several tables") as caught:
        explain("every_steps")
    assert caught.value.hint == "give the full name: eval.every_steps, checkpoint.every_steps"


def test_a_table_lists_its_keys():
    assert explain("checkpoint").keys == ("every_steps", "keep_last", "keep_best", "asynchronous")
    assert explain("data.0.path").key == "data.path"


def test_a_key_of_a_free_table_is_explained_by_the_table():
    assert explain("reward.weights.format").key == "reward.weights"


def test_where_shipped_recipes_set_a_key_is_shown():
    uses = explain("data.task").uses
    assert any(use.where.startswith("recipes/digits_im.toml:") and use.value == "digits" for use in uses)


@pytest.mark.parametrize(
    ("key", "hint"),
    [("algo.cliphigh", "algo.clip_high"), ("num_generations", "rollout.samples_per_prompt"), ("", "tables:")],
)
def test_an_unknown_key_names_the_nearest(key, hint):
    with pytest.raises(RecipeError) as caught:
        explain(key)
    assert hint in str(caught.value.hint)


def test_the_json_schema_knows_extends_and_refuses_unknown_keys():
    schema = json_schema()
    assert schema["properties"]["extends"]["type"] == ["string", "array"]
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize("origin", [False, True])
def test_a_shown_recipe_loads_to_the_same_values(tmp_path, origin):
    odd = [
        'reward.args."a b"=[1, 2]',
        'rollout.stop=["\\"", "\\n"]',
        "paper.numbers.x=1.5",
        "data.0.name=d",
        'data.0.system="a \\\\ b"',
    ]
    loaded = load_recipe("digits_im", overrides=odd)
    shown = tmp_path / "shown.toml"
    shown.write_text("\n".join(toml_lines(loaded, origin=origin)))
    parse_toml(shown.read_text())
    assert load_recipe(shown).recipe == loaded.recipe


def test_a_difference_names_key_and_both_values():
    rows = diff_recipes(load_recipe("digits_im"), load_recipe("digits_im", overrides=["train.steps=3"]))
    assert [(r["key"], r["right"]) for r in rows] == [("train.steps", 3)]


def test_the_first_comment_is_one_paragraph():
    assert first_comment("# one\n# two\n\n# three\n[model]\n") == "one two"
    assert first_comment("[model]\n# no\n") == ""


def test_local_recipes_are_listed_and_broken_ones_say_why(tmp_path):
    (tmp_path / "mine.toml").write_text("# Mine.\n[model]\n")
    (tmp_path / "bad.toml").write_text("x = \n")
    (tmp_path / "pyproject.toml").write_text("")
    found = {r.name: r for r in list_recipes(tmp_path)}
    assert found["mine.toml"].comment == "Mine."
    assert "not valid TOML" in found["bad.toml"].error
    assert "pyproject.toml" not in found
    assert found["base/tiny"].kind == "base"
