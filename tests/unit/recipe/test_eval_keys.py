"""Keys of `[eval]` about sets, epochs and named settings: loading, contradictions, help, and changes on resume."""

from pathlib import Path

import pytest

from vlmrl.errors import ProblemsError
from vlmrl.recipe.changes import compare_recipes
from vlmrl.recipe.checks import Catalogs, check_recipe
from vlmrl.recipe.explain import explain, toml_lines
from vlmrl.recipe.load import load_recipe, reload_recipe

RECIPE = """
[model]
path = "model"
[[data]]
path = "rows.jsonl"
"""
PASS8 = """
[eval.settings.pass8]
temperature = 1.0
samples = 8
[eval.settings.greedy]
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x", "answer": "1"}\n')
    (tmp_path / "other.jsonl").write_text('{"prompt": "y", "answer": "1"}\n')
    return tmp_path


def load(folder, text, *overrides):
    (folder / "r.toml").write_text(RECIPE + text)
    return load_recipe("r.toml", overrides=list(overrides))


def problems(folder, text, *overrides):
    found = check_recipe(load(folder, text, *overrides), Catalogs())
    return [(p.level, p.message) for p in found if "eval" in p.message or "stop_above" in p.message]


def test_without_the_keys_there_is_one_greedy_setting(folder):
    settings = load(folder, "").recipe.eval
    assert [*settings.named_settings] == [""] and settings.selecting == ("", "reward")
    only = settings.named_settings[""]
    assert (only.temperature, only.samples, settings.token_limit(only, 64)) == (0.0, 1, 64)


def test_settings_keep_their_order_and_the_first_selects(folder):
    settings = load(folder, PASS8).recipe.eval
    assert [*settings.settings] == ["pass8", "greedy"] and settings.selecting == ("pass8", "reward")
    assert load(folder, PASS8, "eval.metric=greedy/accuracy").recipe.eval.selecting == ("greedy", "accuracy")
    # No setting is called `part`: the whole text is the metric.
    assert load(folder, PASS8, "eval.metric=part/format").recipe.eval.selecting == ("pass8", "part/format")


def test_token_limits_of_a_setting(folder):
    recipe = load(folder, PASS8, "eval.max_new_tokens=100", "eval.settings.pass8.max_new_tokens=300").recipe
    assert [recipe.eval.token_limit(s, 64) for s in recipe.eval.settings.values()] == [300, 100]
    assert recipe.eval.longest(64) == 300


def test_epochs_replace_steps_and_steps_replace_epochs(folder):
    recipe = load(folder, "[eval]\nevery_epochs = 0.5\n").recipe
    assert (recipe.eval.every_steps, recipe.eval.every_epochs) == (0, 0.5) and recipe.eval.validates_between
    later = load(folder, "[eval]\nevery_epochs = 0.5\n", "eval.every_steps=3").recipe
    assert (later.eval.every_steps, later.eval.every_epochs) == (3, None)
    with pytest.raises(ProblemsError, match=r"`eval.every_steps` and `eval.every_epochs` are both set"):
        load(folder, "[eval]\nevery_epochs = 0.5\nevery_steps = 3\n")


def test_a_run_loads_its_settings_again(folder):
    loaded = load(folder, "[eval]\nevery_epochs = 2\n" + PASS8)
    again = reload_recipe(loaded.resolved, Path("resolved.json"))
    assert again.recipe.eval == loaded.recipe.eval
    text = "\n".join(toml_lines(loaded, origin=False))
    assert "[eval.settings.pass8]\ntemperature = 1.0\nsamples = 8" in text


def test_a_child_recipe_changes_single_keys_of_a_setting(folder):
    (folder / "parent.toml").write_text(RECIPE + PASS8)
    (folder / "child.toml").write_text('extends = "parent.toml"\n[eval.settings.pass8]\nsamples = 16\n')
    setting = load_recipe("child.toml").recipe.eval.settings["pass8"]
    assert (setting.temperature, setting.samples) == (1.0, 16)


def test_a_change_of_a_setting_is_asked_and_a_change_of_epochs_is_free(folder):
    before = load(folder, "[eval]\nevery_epochs = 2\n" + PASS8)
    after = load(folder, "[eval]\nevery_epochs = 1\n" + PASS8, "eval.settings.pass8.samples=4", 'eval.sets=["train"]')
    changes = compare_recipes(before.resolved["recipe"], after, Path())
    rules = {c.what: c.kind for c in changes}
    assert rules == {"eval.every_epochs": "free", "eval.settings.pass8.samples": "asked", "eval.sets": "asked"}


def test_old_runs_without_the_keys_have_no_changes(folder):
    loaded = load(folder, "")
    old = {**loaded.resolved["recipe"], "eval": {"every_steps": 10}}
    assert compare_recipes(old, loaded, Path()) == []


def test_help_of_a_setting(folder):
    assert explain("eval.settings.mine.samples").help.startswith("Responses per prompt")
    assert explain("eval.settings").keys == ("temperature", "top_p", "top_k", "samples", "max_new_tokens")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[eval.settings.a]\nsamples = 4\n", "takes 4 samples at temperature 0"),
        ('[eval]\nmetric = "pass@8"\n' + PASS8.replace("= 8", "= 4"), "takes 4 samples per prompt"),
        ('[eval]\nmetric = "pass@8"\n', "validation takes 1 sample per prompt"),
        ('[eval]\nsets = ["test"]\n', "evaluates the test split `test`"),
        ('[eval]\nsets = ["dev", "dev"]\n', "`dev` twice"),
        ('[eval]\nsets = ["train"]\n', "training draws from that split"),
        ('[eval]\nsets = ["gone.jsonl"]\n', "gone.jsonl, which does not exist"),
        ('[eval]\nsets = ["test"]\nallow_test_split = true\npatience = 3\n', "test splits alone"),
        ("[eval.settings.accuracy]\n", "metrics have names that begin with `accuracy/`"),
        ("[eval.settings.a-step-000010]\n", "belong to the steps of a run"),
        ('[[data]]\npath = "other.jsonl"\n[eval]\nsets = ["other.jsonl"]\n', "and there are several"),
    ],
)
def test_impossible_combinations_are_errors(folder, text, words):
    errors = [message for level, message in problems(folder, text) if level == "error"]
    assert len(errors) == 1 and words in errors[0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[eval.settings.pass8]\ntemperature = 1.0\nsamples = 4\n", "too few for k = 8"),
        ("[eval.settings.cold]\ntop_p = 0.5\n", "its top_p and top_k do nothing"),
    ],
)
def test_odd_combinations_are_warnings(folder, text, words):
    ((level, message),) = problems(folder, text)
    assert level == "warning" and words in message


def test_good_recipes_have_no_problem(folder):
    text = '[eval]\nsets = ["dev", "other.jsonl", "test"]\nallow_test_split = true\nmetric = "pass8/pass@8"\n'
    assert problems(folder, text + PASS8) == []
