"""Loading: parents, overrides, origins, paths, and what a run keeps of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmrl.errors import ProblemsError, RecipeError
from vlmrl.recipe.changes import compare_recipes
from vlmrl.recipe.load import Override, leaves, load_recipe, parse_override, recipe_from_resolved, reload_recipe
from vlmrl.recipe.toml_lines import dotted

PARENT = """\
[model]
path = "base-model"

[reward]
name = "taxonomy"
weights = {format = 0.2, answer = 0.8}

[rollout]
stop = ["a", "b"]
prompts_per_step = 4

[train]
steps = 7
"""
CHILD = """\
extends = "base/parent.toml"

[[data]]
path = "d"

[reward.weights]
answer = 1.0

[rollout]
stop = ["c"]
"""


@pytest.fixture
def child(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "parent.toml").write_text(PARENT)
    (tmp_path / "child.toml").write_text(CHILD)
    return tmp_path / "child.toml"


def test_a_child_overrides_single_keys_of_its_parent(child):
    recipe = load_recipe(child).recipe
    assert (recipe.model.path, recipe.reward.name) == ("base-model", "taxonomy")
    assert (recipe.rollout.prompts_per_step, recipe.train.steps) == (4, 7)


def test_lists_and_tables_with_names_of_ones_own_replace_the_parents(child):
    recipe = load_recipe(child).recipe
    assert recipe.rollout.stop == ["c"]
    assert recipe.reward.weights == {"answer": 1.0}


def test_what_a_child_replaced_counts_as_not_written(child):
    loaded = load_recipe(child)
    assert not loaded.is_set(("reward", "weights", "format"))
    assert loaded.is_set(("reward", "weights", "answer"))


def test_every_origin_names_the_file_and_line_that_won(child):
    origins = load_recipe(child, overrides=["train.steps=9", "optim.lr=1e-4"]).origins
    parent = child.parent / "base" / "parent.toml"
    assert origins["model.path"] == f"{parent}:2"
    assert origins["reward.weights.answer"] == f"{child}:7"
    assert origins["rollout.stop"] == f"{child}:10"
    assert origins["rollout.prompts_per_step"] == f"{parent}:10"
    assert origins["data.0.path"] == f"{child}:4"
    assert (origins["train.steps"], origins["optim.lr"], origins["optim.beta1"]) == ("--set", "--set", "default")
    assert "reward.weights.format" not in origins


def test_with_an_adapter_the_default_learning_rate_is_another_and_says_why(child):
    loaded = load_recipe(child, overrides=["lora.rank=8"])
    assert (loaded.recipe.optim.lr, loaded.origins["optim.lr"]) == (1e-5, "default with [lora]")
    assert recipe_from_resolved(loaded.resolved, where="x").optim.lr == 1e-5
    given_ = load_recipe(child, overrides=["lora.rank=8", "optim.lr=2e-6"])
    assert (given_.recipe.optim.lr, given_.origins["optim.lr"]) == (2e-6, "--set")
    assert (load_recipe(child).recipe.optim.lr, load_recipe(child).origins["lora"]) == (1e-6, "default")


def test_origins_cover_every_leaf_and_nothing_else(child):
    loaded = load_recipe(child)
    assert set(loaded.origins) == {dotted(key) for key, _ in leaves(loaded.recipe.model_dump(mode="json"))}
    assert loaded.resolved["origins"] == loaded.origins


def test_the_resolved_recipe_is_json_and_reads_back_equal(child):
    loaded = load_recipe(child, overrides=["reward.args.levels=['a','b']"])
    text = json.dumps(loaded.resolved, allow_nan=False)
    assert recipe_from_resolved(json.loads(text), where="x") == loaded.recipe


def test_a_resolved_recipe_of_another_format_is_refused(child):
    with pytest.raises(RecipeError, match="schema 99"):
        recipe_from_resolved({"schema": 99}, where="resolved.json")
    broken = json.loads(json.dumps(load_recipe(child).resolved))
    broken["recipe"]["train"]["steps"] = "many"
    with pytest.raises(ProblemsError, match=r"train.steps"):
        recipe_from_resolved(broken, where="resolved.json")


def write(folder: Path, **texts: str) -> Path:
    """Files `<name>.toml`; returns the first."""
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    return folder / f"{next(iter(texts))}.toml"


MODEL_AND_DATA = '[model]\npath = "m"\n[[data]]\npath = "d"\n'


def test_parents_have_parents_and_later_ones_override_earlier_ones(tmp_path):
    """seed: own; lr: second parent; steps: first parent; warm-up: the grandparent that both share, merged once."""
    child = write(
        tmp_path,
        child='extends = ["a.toml", "b.toml"]\n[train]\nseed = 4\n' + MODEL_AND_DATA,
        a='extends = "root.toml"\n[train]\nsteps = 5\nseed = 3\n[optim]\nlr = 2e-6\n',
        b='extends = "root.toml"\n[optim]\nlr = 3e-6\n',
        root="[train]\nsteps = 1\nseed = 1\n[optim]\nlr = 1e-6\nwarmup_steps = 9\n",
    )
    loaded = load_recipe(child)
    recipe = loaded.recipe
    assert (recipe.train.seed, recipe.train.steps, recipe.optim.lr, recipe.optim.warmup_steps) == (4, 5, 3e-6, 9)
    assert [path.name for path in loaded.parents] == ["root.toml", "a.toml", "b.toml"]
    assert loaded.origins["train.steps"] == f"{tmp_path / 'a.toml'}:3"
    assert loaded.origins["optim.lr"] == f"{tmp_path / 'b.toml'}:3"
    assert loaded.origins["optim.warmup_steps"] == f"{tmp_path / 'root.toml'}:6"


def test_a_circle_of_parents_is_an_error_at_the_line_that_closes_it(tmp_path):
    child = write(tmp_path, child='extends = "a.toml"\n' + MODEL_AND_DATA, a='\nextends = "child.toml"\n')
    with pytest.raises(RecipeError, match=r"extends itself, through child\.toml") as caught:
        load_recipe(child)
    assert caught.value.where == f"{tmp_path / 'a.toml'}:2"
    chain = {f"r{i}": f'extends = "r{i + 1}.toml"\n' for i in range(20)}
    with pytest.raises(RecipeError, match="more than 15 files"):
        load_recipe(write(tmp_path, **chain, r20=MODEL_AND_DATA))
    with pytest.raises(RecipeError, match="or a list of such paths"):
        load_recipe(write(tmp_path, odd='extends = ["a.toml", 3]\n', a="[train]\nsteps = 1\n"))


def test_a_problem_in_the_parent_is_shown_at_the_parents_line(child):
    parent = child.parent / "base" / "parent.toml"
    parent.write_text(PARENT.replace("steps = 7", "stepz = 7"))
    with pytest.raises(ProblemsError) as caught:
        load_recipe(child)
    assert [p.where for p in caught.value.problems] == [f"{parent}:13"]


def test_the_text_kept_is_the_file_as_given(child):
    assert load_recipe(child).text == CHILD


def test_paths_beside_the_recipe_are_found_from_anywhere(child, monkeypatch, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (child.parent / "d").mkdir()
    (child.parent / "base" / "base-model").mkdir()
    monkeypatch.chdir(elsewhere)
    recipe = load_recipe(child).recipe
    assert recipe.data[0].path == str(child.parent / "d")
    assert recipe.model.path == str(child.parent / "base" / "base-model")  # beside the file that names it
    (elsewhere / "d").mkdir()
    loaded = load_recipe(child)  # what is beside the recipe comes first, and it is said that there is another
    assert loaded.recipe.data[0].path == str(child.parent / "d")
    (warning,) = loaded.warnings
    assert f"in two places: {child.parent / 'd'} is used, not d" in warning.message and warning.level == "warning"
    assert warning.where == f"{child}:4"
    by_hand = load_recipe(child, overrides=["data.0.path=d"])  # a --set is relative to the current directory
    assert by_hand.recipe.data[0].path == "d" and len(by_hand.warnings) == 1
    (child.parent / "d").rmdir()
    assert (load_recipe(child).recipe.data[0].path, load_recipe(child).warnings) == ("d", ())


def test_a_plain_name_of_a_split_or_a_reward_is_no_folder_of_that_name(child, monkeypatch, tmp_path_factory):
    for name in ("validation", "exact"):
        (child.parent / name).mkdir()
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    recipe = load_recipe(child, overrides=["data.0.validation=validation", "reward.name=exact"]).recipe
    assert (recipe.data[0].validation, recipe.reward.name) == ("validation", "exact")


def test_a_run_that_goes_on_elsewhere_finds_the_files_of_where_it_was_started(child, monkeypatch, tmp_path_factory):
    start, elsewhere = tmp_path_factory.mktemp("start"), tmp_path_factory.mktemp("elsewhere")
    for folder in (start, elsewhere):
        (folder / "d").mkdir()
    monkeypatch.chdir(start)
    before = load_recipe(child).resolved
    assert before["recipe"]["data"][0]["path"] == "d"
    monkeypatch.chdir(elsewhere)
    again = reload_recipe(before, child, cwd=start)
    assert again.recipe.data[0].path == str(start / "d")
    assert compare_recipes(before["recipe"], again, start) == []
    asked = reload_recipe(before, child, overrides=["data.0.path=d"], cwd=start)
    assert asked.recipe.data[0].path == "d"


def test_a_reward_beside_the_recipe_keeps_its_function(child, monkeypatch, tmp_path_factory):
    (child.parent / "mine.py").write_text("def score(response): return 0.0\n")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    loaded = load_recipe(child, overrides=["reward.name=mine.py:score"])
    assert loaded.recipe.reward.name == f"{child.parent / 'mine.py'}:score"


def test_the_kind_that_is_run_must_be_the_recipes(child):
    assert load_recipe(child, kind="rl").recipe.kind == "rl"
    with pytest.raises(ProblemsError, match=r"for `vlmrl train` .* not for `vlmrl sft`"):
        load_recipe(child, kind="sft")


def test_a_missing_recipe_names_the_nearest(child, monkeypatch):
    monkeypatch.chdir(child.parent)
    with pytest.raises(RecipeError) as caught:
        load_recipe("chlid.toml")
    assert caught.value.hint == "did you mean child.toml?"


def test_a_folder_is_not_a_recipe(child):
    with pytest.raises(RecipeError, match="is a folder") as caught:
        load_recipe(child.parent)
    assert "child.toml" in str(caught.value.hint)


def test_overrides_apply_in_order_and_make_tables_and_list_elements(child):
    sets = [
        "train.steps=1",
        "train.steps=2",
        "data.1.path=e",
        'data.1.columns.prompt="q"',
        "model.path=x/y",
        "eval.goal=min",
    ]
    recipe = load_recipe(child, overrides=sets).recipe
    assert (recipe.train.steps, recipe.model.path, recipe.eval.goal) == (2, "x/y", "min")
    assert (recipe.data[1].path, recipe.data[1].columns) == ("e", {"prompt": "q"})


def test_an_override_of_a_whole_list_forgets_its_old_lines(child):
    loaded = load_recipe(child, overrides=['rollout.stop=["z"]'])
    assert (loaded.recipe.rollout.stop, loaded.origins["rollout.stop"]) == (["z"], "--set")


@given(
    st.one_of(
        st.integers(-(2**62), 2**62),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.text("ab \"'\\[{=é"),
    )
)
def test_any_value_survives_set(value):
    text = str(value).lower() if isinstance(value, bool) else json.dumps(value, ensure_ascii=False)
    parsed = parse_override(f"reward.args.x={text}")
    assert isinstance(parsed, Override)
    assert (parsed.value, type(parsed.value)) == (value, type(value))


@given(
    st.from_regex(r"[A-Za-z][A-Za-z0-9_./:-]{0,20}", fullmatch=True).filter(
        lambda t: t not in ("true", "false", "inf", "nan")
    )
)
def test_a_bare_word_is_a_string(word):
    parsed = parse_override(f"model.path={word}")
    assert isinstance(parsed, Override)
    assert parsed.value == word


def test_a_date_on_the_command_line_is_a_string():
    parsed = parse_override("paper.source=2024-01-01")
    assert isinstance(parsed, Override)
    assert parsed.value == "2024-01-01"


def test_reading_a_recipe_imports_neither_torch_nor_anything_heavy(child):
    code = (
        "import sys\nfrom vlmrl.recipe.load import load_recipe\n"
        "from vlmrl.recipe.checks import check_recipe, Catalogs\n"
        f"check_recipe(load_recipe({str(child)!r}), Catalogs())\n"
        "heavy = {'torch', 'transformers', 'datasets', 'numpy', 'pandas', 'rich', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
