"""`vlmrl recipe`, `check` and `try` as a person types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import refused
from typer.testing import CliRunner

from vlmrl.cli.app import app
from vlmrl.cli.try_ import _bounds
from vlmrl.errors import VlmrlError
from vlmrl.recipe.files import shipped_folder

runner = CliRunner()

SOUND = '[model]\npath = "some/model"\n[[data]]\npath = "rows.jsonl"\n[reward]\nname = "exact_match"\n'


def run(*words: str):
    return runner.invoke(app, list(words))


def test_show_prints_toml_and_json():
    shown = run("recipe", "show", "digits_im", "--set", "train.steps=3", "--origin")
    assert "steps = 3" in shown.stdout and "# --set" in shown.stdout
    told = json.loads(run("recipe", "show", "digits_im", "--json").stdout)
    assert told["recipe"]["data"][0]["task"] == "digits"
    assert told["origins"]["optim.beta1"] == "default"


def test_show_prints_the_text_of_a_base_recipe_with_its_comments(tmp_path, monkeypatch):
    shown = run("recipe", "show", "base/maye_eval").stdout
    assert shown == (shipped_folder() / "base" / "maye_eval.toml").read_text()
    monkeypatch.chdir(tmp_path)
    Path("part.toml").write_text("# \u202ered\n[train]\nsteps = 1\n")
    assert "\u202e" not in run("recipe", "show", "part.toml").stdout
    # Overrides need a whole recipe.
    assert isinstance(run("recipe", "show", "part.toml", "--set", "train.steps=2").exception, VlmrlError)


def test_explain_prints_help_range_and_uses():
    shown = run("recipe", "explain", "rollout.prompts_per_step").stdout
    assert "Number of different prompts per step." in shown
    assert "> 0" in shown and "recipes/base/" in shown
    assert json.loads(run("recipe", "explain", "clip_high", "--json").stdout)["key"] == "algo.clip_high"


def test_lists_are_json_when_asked():
    recipes = json.loads(run("recipe", "list", "--json").stdout)["recipes"]
    assert "digits_im" in [r["name"] for r in recipes]
    names = json.loads(run("recipe", "list", "--tasks", "--algos", "--rewards", "--json").stdout)
    assert set(names) == {"tasks", "algos", "rewards", "variants", "profiles", "differences"}
    assert names["profiles"]["bird"] == ["default", "taxonrl"] and "digits" not in names["profiles"]
    assert names["variants"]["bird"] == ["baseline", "im_basic", "im_concrete", "im"]
    assert "table" in names["tasks"] and "grpo" in names["algos"] and "taxonomy" in names["rewards"]


def test_schema_and_diff_are_json():
    assert json.loads(run("recipe", "schema").stdout)["properties"]["train"]
    differences = json.loads(run("recipe", "diff", "digits_im", "digits_baseline", "--json").stdout)["differences"]
    assert "reward.name" in [d["key"] for d in differences]


def test_list_names_recipes_by_a_word_bases_last():
    found = json.loads(run("recipe", "list", "bird", "--json").stdout)["recipes"]
    assert len(found) == 9 and all("bird" in r["name"] for r in found)
    names = [r["name"] for r in json.loads(run("recipe", "list", "--json").stdout)["recipes"]]
    bases = [name.startswith("base/") for name in names]
    assert bases == sorted(bases)


def test_recipe_check_takes_many_and_leaves_what_is_not_made_to_other_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = run("recipe", "check", "fungi_im", "gorilla_traces", "--json")
    found = {r["recipe"]: r for r in json.loads(told.stdout)["recipes"]}
    assert told.exit_code == 0 and found["fungi_im"]["ok"] and found["gorilla_traces"]["ok"]
    (missing,) = found["gorilla_traces"]["problems"]
    make = "vlmrl prep gorilla hub:maxvonk/gorilla-pairs-v4-800px-cv-im --name gorilla_v4_cv_im"
    assert missing["level"] == "warning" and missing["hint"] == f"make it first: `{make}`"
    (tmp_path / "r.toml").write_text(SOUND + '[algo]\nname = "grpa"\n')
    result = run("recipe", "check", "fungi_im", "r.toml")
    assert result.exit_code == 2
    assert (
        "fungi_im: no errors" in result.stdout and "r.toml: has errors" in result.stdout and "`grpo`" in result.stdout
    )


@pytest.mark.parametrize(
    ("recipe", "make"),
    [
        ("maye_geometry3k_qwen2_vl", "geometry3k hub:hiyouga/geometry3k"),
        ("maye_mm_math_qwen2_vl_published", "mm_math maye/datasets/mm_math"),  # its path is in the recipe it extends
        ("math_3b_opd", "geometry3k hub:hiyouga/geometry3k"),
        ("gui_sft", "gui --synthetic 2000 --side 112 --kinds spot --out data/gui"),
        ("smoke", "digits"),  # ", then: ..." follows
        ("omniglot_im", "pairs --out data/omniglot"),  # no command follows "First:"
    ],
)
def test_missing_data_are_made_by_the_command_that_the_recipe_says_first(tmp_path, monkeypatch, recipe, make):
    monkeypatch.chdir(tmp_path)
    (checked,) = json.loads(run("recipe", "check", recipe, "--json").stdout)["recipes"]
    assert f"make it first: `vlmrl prep {make}`" in [problem["hint"] for problem in checked["problems"]]


CHECKED = [
    ("fungi_im", [], ("im_concrete", False, "taxonomy", "default"), "reward taxonomy (profile default)"),
    ("fungi_im", ["data.0.variant=im"], ("im_concrete", False, "taxonomy", "default"), "variant im_concrete, reward"),
    (
        "fungi_im",
        ["data.0.variant=baseline", "reward.profile=taxonrl"],
        ("baseline", False, "taxonrl", "taxonrl"),
        "task fungi, variant baseline, reward taxonrl (profile taxonrl)",
    ),
    ("fungi_im", ["reward.name=exact_match"], ("im_concrete", False, "exact_match", None), "reward exact_match\n"),
    ("digits_im", [], (None, False, None, "default"), "task digits, reward of the task (profile default)"),
    ("r.toml", [], ("im_concrete", True, "taxonomy", "default"), "im_concrete (baseline if the data lack its truth), "),
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "overrides", "found", "words"), CHECKED)
def test_recipe_check_says_task_variant_reward_and_profile(tmp_path, monkeypatch, recipe, overrides, found, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text('[model]\npath = "m"\n[[data]]\npath = "data/fungi"\ntask = "fungi"\n')
    sets = [word for one in overrides for word in ("--set", one)]
    result = run("recipe", "check", recipe, *sets, "--json")
    (entry,) = json.loads(result.stdout)["recipes"][0]["data"]
    assert tuple(entry[key] for key in ("variant", "by_default", "reward", "profile")) == found
    assert words in run("recipe", "check", recipe, *sets).stdout


@pytest.mark.parametrize("words", [("recipe", "check"), ("check",)])
def test_a_recipe_cannot_steer_the_terminal(tmp_path, words):
    (tmp_path / "r.toml").write_text('"\\u001b]0;title\\u0007" = 1\n')
    done = run(*words, str(tmp_path / "r.toml"))
    assert done.exit_code == 2 and "\\u001b]0;title" in done.output and "\x1b" not in done.output


def test_recipe_check_resolves_nothing_of_a_wrong_recipe():
    told = run("recipe", "check", "fungi_im", "--set", "reward.profile=taxnrl", "--json")
    (recipe,) = json.loads(told.stdout)["recipes"]
    assert not recipe["ok"] and recipe["data"] == []


def test_a_prompt_or_a_reward_that_is_missing_is_an_error_of_recipe_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["--set", "data.0.prompt=/elsewhere/fungi.jinja", "--set", "reward.name=/elsewhere/lfw.py:score"]
    told = run("recipe", "check", "fungi_im", *words, "--json")
    levels = {p["where"]: p["level"] for p in json.loads(told.stdout)["recipes"][0]["problems"]}
    assert told.exit_code == 2 and [level for where, level in levels.items() if "--set" in where] == ["error", "error"]


def test_import_prints_a_recipe_and_says_what_did_not_map(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text("num_generations: 4\nlearning_rate: 2e-6\nfp16: true\nmax_steps: 7\n")
    shown = run("recipe", "import", "grpo.yaml")
    assert shown.exit_code == 0 and "lr = 2e-06" in shown.stdout and "# learning_rate" in shown.stdout
    assert "not mapped (there:" in shown.stderr and "fp16" in shown.stderr and "to do:" in shown.stderr
    assert run("recipe", "import", "grpo.yaml", "--out", "r.toml").stdout == ""
    assert run("recipe", "show", "r.toml").exit_code == 0
    assert isinstance(run("recipe", "import", "grpo.yaml", "--out", "r.toml").exception, VlmrlError)
    told = json.loads(run("recipe", "import", "grpo.yaml", "--json").stdout)
    assert set(told) == {"system", "mapped", "changed", "left_out", "as_here", "todo", "notes", "recipe", "out"}


def test_an_import_is_checked_when_that_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "num_generations: 8\nbeta: 0.0\nmodel_name_or_path: m/m\nreward_funcs: reward.py:score\n"
    (tmp_path / "grpo.yaml").write_text(text)
    wrong = run("recipe", "import", "grpo.yaml", "--check", "--json")
    assert wrong.exit_code == 2
    assert any("reward.py" in p["message"] for p in json.loads(wrong.stdout)["problems"] if p["level"] == "error")
    (tmp_path / "reward.py").write_text("def score(completions): ...\n")
    assert run("recipe", "import", "grpo.yaml", "--check", "--out", "r.toml").exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["grpo.yaml", "r.toml", "reward.py"]


def test_an_unknown_recipe_is_a_users_mistake():
    result = run("recipe", "show", "digits_imm")
    assert isinstance(result.exception, VlmrlError)
    assert result.exception.hint == "did you mean digits_im?"


def test_check_lists_everything_and_leaves_with_2(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(SOUND + "[train]\nstepz = 3\n[rollout]\ntop_p = 7\n")
    result = run("check", "r.toml", "--json")
    told = json.loads(result.stdout)
    assert (result.exit_code, told["ok"], len(told["problems"])) == (2, False, 2)
    assert [p["where"] for p in told["problems"]] == ["r.toml:8", "r.toml:10"]
    shown = run("check", "r.toml")
    assert shown.exit_code == 2
    assert "error: unknown key `train.stepz`" in shown.stdout and "2 errors" in shown.stdout
    assert shown.stderr == ""


def test_check_goes_on_to_the_machine_when_the_data_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(SOUND)
    told = json.loads(run("check", "r.toml", "--json").stdout)
    messages = [p["message"] for p in told["problems"]]
    assert any("rows.jsonl" in m for m in messages) and any("some/model" in m for m in messages)
    assert len(messages) == 2


def test_check_of_a_run_without_a_checkpoint_says_so(tmp_path, monkeypatch):
    from vlmrl.store.runs import create_run

    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text(SOUND)
    with create_run("runs", kind="try", recipe_name="r", name="tried"):
        pass
    told = json.loads(run("check", "r.toml", "--set", "model.path=tried", "--json").stdout)
    messages = [p["message"] for p in told["problems"] if p["where"] == "--set model.path=tried"]
    assert len(messages) == 1 and "has no checkpoint" in messages[0]


def test_check_of_a_word_that_is_no_run_names_the_folder_of_the_runs_and_not_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = json.loads(run("check", "digits_im", "--set", "model.path=sft", "--runs", "elsewhere", "--json").stdout)
    (message,) = [p["message"] for p in found["problems"] if p["where"] == "--set model.path=sft"]
    assert message == "there is no run and no model folder `sft`: runs are searched in elsewhere"


def test_try_refuses_half_a_filter_and_what_is_no_range_before_any_work():
    assert "--out: where to write the rows is missing" in str(refused("try", "digits_im", "--filter", "0.1:0.9"))
    assert "--filter: which rows to write is missing" in str(refused("try", "digits_im", "--out", "x"))
    for text in ("high", "0.1", "0.9:0.1", "a:b", "-0.1:0.5", "0:1.5", "nan:nan", ":"):
        error = refused("try", "digits_im", "--filter", text, "--out", "x")
        assert "is not two numbers from 0 to 1" in error.message, text
    assert (_bounds("0.1:0.9", Path("x")), _bounds("0:1", Path("x"))) == ((0.1, 0.9), (0.0, 1.0))


@pytest.mark.slow
def test_recipe_show_loads_few_modules_and_no_large_one():
    """Its time is that of its imports: with 321 modules about 0.4 s of CPU. The count is the same on every machine."""
    code = (
        "import sys\n"
        "from vlmrl.cli.app import main\n"
        "try:\n    main()\n"
        "finally:\n    print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "recipe", "show", "digits_im"]
    loaded = set(subprocess.run(command, check=True, capture_output=True, text=True).stderr.split())
    assert len(loaded) < 350
    assert not loaded & {"torch", "numpy", "PIL", "pyarrow", "transformers", "rich", "scipy", "jinja2", "httpx"}


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("eval a --samples 4", "--n 4 --sample 1.0"),
        ("generate a --temperature 1", "--sample 1.0"),
        ("runs diff a b", "`vlmrl compare RUN RUN`"),
        ("runs plot a", "`vlmrl report RUN`"),
        ("diagnose a", "`vlmrl runs diagnose`"),
        ("data eval a", "`vlmrl eval`"),
        ("check digits_im trainer.total_epochs=3", "a key of the recipe is set with --set KEY=VALUE"),
    ],
)
def test_a_word_of_another_tool_or_place_is_answered_with_the_word_here(words: str, hint: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2 and result.stderr.endswith(f"\n\nhint: {hint}\n"), result.stderr


@pytest.mark.parametrize("words", ["train digits_im --samples 4", "runs nothing", "data doctor a b=1"])
def test_no_hint_names_what_the_command_does_not_have(words: str) -> None:
    result = run(*words.split())
    assert result.exit_code == 2 and "hint:" not in result.stderr


@pytest.mark.parametrize("words", ["train --resume last", "eval last", "check"])
def test_a_set_without_a_value_is_no_recipe_by_its_next_word(words: str) -> None:
    with pytest.raises(VlmrlError, match="`--set` needs a key and a value") as error:
        runner.invoke(app, [*words.split(), "--set", "optim.lr", "5e-4"], catch_exceptions=False)
    assert error.value.where == "--set optim.lr"


@pytest.mark.parametrize(
    ("name", "hint"), [("a b.yaml", "`vlmrl recipe import 'a b.yaml'"), ("rows.jsonl", "`vlmrl data show rows.jsonl`")]
)
def test_a_file_of_another_kind_is_told_where_it_belongs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, hint: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text("trainer: {}\n")
    with pytest.raises(VlmrlError, match="is not a recipe") as error:
        runner.invoke(app, ["recipe", "show", name], catch_exceptions=False)
    assert hint in str(error.value.hint)
    with pytest.raises(VlmrlError, match="there is no recipe b") as missing:
        runner.invoke(app, ["recipe", "show", "b"], catch_exceptions=False)
    assert "`vlmrl runs show`" in str(missing.value.hint)
