"""Lists of rewards in a recipe: read, shown, replaced by a later file, compared on resume; mistakes in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vlmrl.errors import Problem, ProblemsError
from vlmrl.recipe.changes import compare_recipes
from vlmrl.recipe.checks import check_recipe
from vlmrl.recipe.explain import explain, toml_lines
from vlmrl.recipe.load import load_recipe, reload_recipe
from vlmrl.setup.catalogs import catalogs, resolve_tasks

FIRST = '[model]\npath = "model"\n'
LISTED = """
[[data]]
path = "a.jsonl"
name = "own"
[[data.rewards]]
name = "exact_match"
label = "grade"
args = { key = "answer" }
[[data.rewards]]
name = "mine.py:short"
gate = "grade.answer"
weight = 0.5
[[data]]
path = "b.jsonl"
name = "default"
[[data]]
path = "c.jsonl"
name = "single"
reward = "language"
[[rewards]]
name = "number_match"
[rewards.args]
key = "x"
"""
MINE = "def short(completions, most=3):\n    return [float(len(c) < most) for c in completions]\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "recipe.toml").write_text(FIRST + LISTED)
    return tmp_path


def problems(place: Path, text: str, *overrides: str) -> list[Problem]:
    """The problems of a recipe, except for its model and its data, which do not exist."""
    (place / "other.toml").write_text(FIRST + text)
    found = check_recipe(load_recipe(place / "other.toml", overrides=overrides), catalogs())
    return [p for p in found if "path" not in p.message]


def test_each_source_has_its_own_list_or_that_of_the_recipe(place):
    recipe = load_recipe(place / "recipe.toml").recipe
    assert [[one.name for one in data.all_rewards] for data in recipe.data] == [
        ["exact_match", "mine.py:short"],
        ["number_match"],
        [],
    ]
    assert [e["reward"] for e in resolve_tasks(recipe)] == ["grade + short", "number_match", "language"]
    assert recipe.data[0].model_copy(update={"path": "d.jsonl"}).all_rewards == recipe.data[0].rewards
    assert recipe.data[1].model_copy(update={"path": "d.jsonl"}).all_rewards == recipe.rewards
    assert problems(place, LISTED) == []


def test_a_recipe_with_lists_is_shown_as_it_loads(place):
    loaded = load_recipe(place / "recipe.toml")
    for origin in (False, True):
        (place / "shown.toml").write_text("\n".join(toml_lines(loaded, origin=origin)))
        assert load_recipe(place / "shown.toml").recipe == loaded.recipe
    assert loaded.origins["data.0.rewards.1.gate"].endswith("recipe.toml:13")
    again = reload_recipe(json.loads(json.dumps(loaded.resolved)), place / "resolved.json")
    assert again.recipe == loaded.recipe and again.recipe.data[1].all_rewards == loaded.recipe.rewards


def test_help_of_a_short_name_is_that_of_a_single_reward():
    assert explain("style").key == "reward.style" and explain("gate").key == "rewards.gate"
    assert explain("rewards").type == "list of tables" and "label" in explain("data.rewards").keys


def test_a_later_file_replaces_one_reward_by_a_list_and_a_list_by_one(place):
    (place / "base.toml").write_text(FIRST + '[reward]\nname = "language"\nworkers = 2\nargs = { script = "han" }\n')
    (place / "child.toml").write_text('extends = "base.toml"\n' + LISTED)
    child = load_recipe(place / "child.toml").recipe
    assert child.reward.name is None and child.reward.args == {} and child.reward.workers == 2
    (place / "third.toml").write_text('extends = "recipe.toml"\n[reward]\nname = "language"\n')
    third = load_recipe(place / "third.toml").recipe
    assert third.rewards == [] and third.reward.name == "language" and len(third.data[0].rewards) == 2


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("rewards.0.weight=2.0", {"rewards.0.weight": (1.0, 2.0, "asked")}),
        ("data.0.rewards.1.gate=grade.format", {"data.0.rewards.1.gate": ("grade.answer", "grade.format", "asked")}),
        ("data.0.rewards.1.timeout_seconds=3.0", {"data.0.rewards.1.timeout_seconds": (None, 3.0, "free")}),
    ],
)
def test_changes_on_resume_are_those_of_a_reward(place, override, change):
    old = json.loads(json.dumps(load_recipe(place / "recipe.toml").resolved))
    loaded = reload_recipe(old, place / "recipe.toml", overrides=[override])
    assert {c.what: (c.old, c.new, c.kind) for c in compare_recipes(old["recipe"], loaded, place)} == change
    more = reload_recipe(old, place / "recipe.toml", overrides=["data.1.rewards.0.name=language"])
    kinds = {c.what: c.kind for c in compare_recipes(old["recipe"], more, place)}
    assert kinds["data.1.rewards.0.name"] == "asked" and "data.1.rewards" not in kinds


def test_a_recipe_from_before_lists_has_none(place):
    (place / "old.toml").write_text(FIRST + '[[data]]\npath = "a.jsonl"\n[reward]\nname = "language"\n')
    loaded = load_recipe(place / "old.toml")
    old = json.loads(json.dumps(loaded.resolved))
    del old["recipe"]["rewards"], old["recipe"]["data"][0]["rewards"]
    assert compare_recipes(old["recipe"], loaded, place) == []


ONE = '[[data]]\npath = "a.jsonl"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE + 'reward = "language"\n[[data.rewards]]\nname = "ending"\n', "source 0 has both `data.reward`"),
        (
            ONE + '[reward]\nname = "language"\n[[rewards]]\nname = "ending"\n',
            "both `reward.name` (language) and a list",
        ),
        (
            ONE + '[reward]\nweights = { a = 1.0 }\n[[rewards]]\nname = "ending"\n',
            "`reward.weights` belongs to a single",
        ),
        (ONE + '[reward]\nprofile = "x"\n[[rewards]]\nname = "ending"\n', "`reward.profile` belongs to a single"),
        (ONE + '[[rewards]]\nname = "ending"\n[[rewards]]\nname = "ending"\n', "are both called `ending`"),
        (ONE + '[[rewards]]\nname = "ending"\nlabel = "a b"\n', "cannot be the label"),
        (ONE + '[[rewards]]\nname = "ending"\ngate = "ending"\n', "go round in a circle: ending -> ending"),
        (ONE + '[[rewards]]\nname = "ending"\ngate = "grade.x"\n', "no reward is called `grade`"),
        (ONE + '[[rewards]]\nname = "endng"\n', "unknown reward `endng` in `rewards.0.name`"),
        (ONE + '[[rewards]]\nname = "ending"\nweight = 0.0\n', "every weight in `rewards` is 0"),
        (ONE + '[[rewards]]\nname = "mine.py:short"\nargs = { mst = 1 }\n', "`short` has no argument `mst`"),
        (ONE + '[[rewards]]\nname = "mine.py:shrt"\n', "has no function `shrt`"),
        (ONE + '[[rewards]]\nname = "other.py:short"\n', "names a reward file that does not exist"),
        (ONE + '[[rewards]]\nname = "task"\n', "the task `table` has no reward of its own"),
        (ONE + '[[rewards]]\nname = "ending"\nprofile = "x"\n', "is for the task's own reward"),
        (ONE + 'task = "digits"\n[[rewards]]\nname = "task"\nprofile = "x"\n', "has no reward profile `x`"),
        (ONE + '[reward]\naccuracy = "b.c"\n[[rewards]]\nname = "ending"\n', "no reward is called `b`"),
    ],
)
def test_mistakes_in_lists_are_named_with_their_place(place, text, message):
    found = problems(place, text)
    (problem,) = [p for p in found if message in p.message]
    assert problem.level == "error" and "other.toml:" in str(problem.where)
    assert [p.level for p in found].count("error") == 1


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("weight = nan", "must be a finite number"),
        ("weight = inf", "must be a finite number"),
        ('weight = "1"', "rewards.0.weight"),
        ("wieght = 1.0", "did you mean `weight`?"),
        ("label = 3", "rewards.0.label"),
        ("args = { a = { b = { c = 1 } } }", "too deep"),
    ],
)
def test_values_that_a_table_cannot_have(place, table, message):
    (place / "other.toml").write_text(f'{FIRST}{ONE}[[rewards]]\nname = "ending"\n{table}\n')
    with pytest.raises(ProblemsError) as error:
        load_recipe(place / "other.toml")
    assert message in str(error.value)
    nested = f'{FIRST}{ONE}[[data.rewards]]\nname = "ending"\nargs = {{ a = {{ b = 1 }} }}\n'
    (place / "other.toml").write_text(nested)
    assert load_recipe(place / "other.toml").recipe.data[0].rewards[0].args == {"a": {"b": 1}}
