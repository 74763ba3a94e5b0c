"""Which rows `vlmrl eval` takes of a run's data, and what they are called: no model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from begun_runs import entry, run_of
from small_runs import copy_digits

from vlmrl.errors import DataError, ProblemsError, RecipeError, StoreError
from vlmrl.evaluate.eval import EvalSettings, plan
from vlmrl.evaluate.eval_rows import ChosenRecipe, EvalRows, choose_recipe, only_training_rows, rows_to_evaluate
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, training_folder, write_evaluation
from vlmrl.launch.request import EvalRequest
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.setup.model_origin import origin_of as first_origin
from vlmrl.store import layout
from vlmrl.store.checkpoints import file_facts
from vlmrl.store.evaluated_rows import read_summary, role_label, role_of, training_name
from vlmrl.store.manifest import update_manifest
from vlmrl.store.runs import Run
from vlmrl.tasks.source import open_validation
from vlmrl.train.resume import ResumeRequest, plan_resume, reopen_run

REWARD = "def score(x):\n    return 1.0\n"
OWN_TASK = """
from vlmrl import Task

def task(info):
    return Task(name="t", summary="s", template="{{ prompt }}", profiles={"default": ("reward.py:score", {})})
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with tables, a folder of splits, and a reward."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    for name, rows in {"train": range(9), "val": range(20, 26), "fresh": range(40, 43)}.items():
        table(tmp_path / f"{name}.jsonl", rows)
    for split, rows in {"train": range(50, 58), "validation": range(60, 64), "test": range(70, 75)}.items():
        table(tmp_path / "all" / f"{split}.jsonl", rows)
    for split in ("train", "validation"):
        table(tmp_path / "no_test" / f"{split}.jsonl", range(80, 83) if split == "train" else range(90, 92))
    return tmp_path


def table(file: Path, rows: Sequence[int]) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"prompt": f"say {i}", "answer": str(i)}) + "\n" for i in rows))


def origin_of(run: Run) -> ModelOrigin:
    folder = layout.checkpoint_dir(run.dir, 4)
    if not folder.exists():
        folder.mkdir(parents=True)
        (folder / "weights").write_bytes(b"")
        meta = {"schema": 1, "dtype": "float32", "policy": {"temperature": 1.0, "banned_ids": []}}
        meta |= {"step": 4, "files": {"weights": file_facts(folder / "weights")}}
        (folder / layout.META).write_text(json.dumps(meta))
        (folder / layout.COMPLETE).touch()
    return ModelOrigin(run.id, folder, {"run": run.id, "checkpoint": folder.name})


def evaluated(run: Run, split: str | None = None, **options) -> list[EvalRows]:
    chosen = choose_recipe(origin_of(run), Path("runs"), data=options.pop("data", None))
    return rows_to_evaluate(chosen.recipe, chosen.seen, split, **options)


def facts(rows: Sequence[EvalRows]) -> list[tuple[str, str, str, int]]:
    """(source, how its rows are called, role, how many) of each."""
    return [(r.source.name, r.source.split, r.role, r.count) for r in rows]


# The rule


def test_a_table_with_a_validation_file_is_evaluated_on_the_rows_that_training_validated_on(place: Path):
    run = run_of(entry("train.jsonl", 'validation = "val.jsonl"'))
    (rows,) = evaluated(run)
    assert facts([rows]) == [("train", "validation", "validation", 6)]
    recipe = load_recipe("mine.toml").recipe
    validated = open_validation(recipe.data[0], recipe.reward)
    assert validated is not None
    assert [r.prompt_id for r in rows.source.rows] == [r.prompt_id for r in validated.rows]
    assert "the file val.jsonl" in rows.described
    assert not only_training_rows(run.dir)
    assert facts(evaluated(run, "validation")) == facts([rows])


def test_as_many_of_them_as_training_looked_at_unless_more_are_asked_for(place: Path):
    run = run_of(entry("train.jsonl", 'validation = "val.jsonl"'), "eval.max_rows = 4")
    assert [r.count for r in evaluated(run)] == [4]
    assert [r.count for r in evaluated(run, max_rows=5)] == [5]
    assert [r.count for r in evaluated(run, "validation")] == [6]


def test_a_table_without_any_other_rows_gives_training_rows_and_says_so(place: Path):
    run = run_of(entry("train.jsonl"))
    (rows,) = evaluated(run)
    assert facts([rows]) == [("train", "train", "training", 9)]
    assert only_training_rows(run.dir)
    with pytest.raises(DataError, match="no split `validation`"):
        evaluated(run, "validation")


@pytest.mark.slow
def test_a_folder_with_splits_is_evaluated_on_its_test_split_else_on_its_validation_split(place: Path):
    assert facts(evaluated(run_of(entry("all")))) == [("all", "test", "test", 5)]
    assert facts(evaluated(run_of(entry("no_test")))) == [("no_test", "validation", "validation", 2)]
    run = run_of(entry("all"))
    assert facts(evaluated(run, "train")) == [("all", "train", "training", 8)]
    assert facts(evaluated(run, "validation")) == [("all", "validation", "validation", 4)]


@pytest.mark.slow
def test_each_of_several_sources_by_itself(place: Path):
    data = entry("all") + entry("train.jsonl", 'validation = "val.jsonl"') + entry("fresh.jsonl")
    run = run_of(data)
    assert facts(evaluated(run)) == [
        ("all", "test", "test", 5),
        ("train", "validation", "validation", 6),
        ("fresh", "train", "training", 3),
    ]
    assert not only_training_rows(run.dir)
    with pytest.raises(DataError, match=r"no split `test` in train\.jsonl"):
        evaluated(run, "test")
    assert facts(evaluated(run, "test", source="all")) == [("all", "test", "test", 5)]
    with pytest.raises(DataError, match="there are 3") as error:
        evaluated(run, "val.jsonl")
    assert "--source" in str(error.value.hint)
    with pytest.raises(DataError, match="no source `none`"):
        evaluated(run, source="none")


def test_a_split_may_be_a_file_and_is_known_by_its_content(place: Path):
    run = run_of(entry("train.jsonl", 'validation = "val.jsonl"'))
    assert facts(evaluated(run, "fresh.jsonl")) == [("train", "fresh", "held out", 3)]
    assert facts(evaluated(run, "val.jsonl")) == [("train", "val", "validation", 6)]
    Path("copy.jsonl").write_bytes(Path("train.jsonl").read_bytes())
    assert facts(evaluated(run, "copy.jsonl")) == [("train", "copy", "training", 9)]
    with pytest.raises(DataError, match=r"no dataset at gone\.jsonl"):
        evaluated(run, "gone.jsonl")


def test_other_data_is_held_out_unless_the_run_was_trained_on_it(place: Path):
    run = run_of(entry("train.jsonl"))
    assert facts(evaluated(run, data="fresh.jsonl")) == [("fresh", "train", "held out", 3)]
    assert facts(evaluated(run, data="train.jsonl")) == [("train", "train", "training", 9)]
    assert facts(evaluated(run, data="all")) == [("all", "test", "test", 5)]


def test_rows_that_training_leaves_alone_are_held_out(place: Path):
    """With validation off nothing was chosen by them."""
    run = run_of(entry("train.jsonl", 'validation = "val.jsonl"'), "eval = {enabled = false, max_rows = 2}")
    assert facts(evaluated(run)) == [("train", "validation", "held out", 6)]


def test_a_test_split_that_chose_the_checkpoint_is_no_test(place: Path):
    run = run_of(entry("all", 'validation = "test"'), "eval.allow_test_split = true")
    assert facts(evaluated(run)) == [("all", "test", "validation", 5)]


@pytest.mark.slow
def test_a_supervised_run_on_a_split_of_its_own_and_the_run_that_goes_on_from_it(place: Path):
    data = str(copy_digits(place / "digits"))
    sft = run_of(entry(data, 'task = "digits"\nsplit = "start"'), kind="sft")
    assert [r.role for r in evaluated(sft)] == ["test"]
    assert [r.role for r in evaluated(sft, "start")] == ["training"]
    assert [r.role for r in evaluated(sft, "train")] == ["held out"]
    child = run_of(entry(data, 'task = "digits"'))
    assert [r.role for r in evaluated(child, "start")] == ["held out"]
    update_manifest(child.dir, lambda m: replace(m, parent={"run": sft.id, "checkpoint": "step-000004"}))
    assert [r.role for r in evaluated(child, "start")] == ["training"], "its first weights have seen them"


@pytest.mark.parametrize("data", [entry("no_test"), entry("train.jsonl", 'validation = "val.jsonl"')])
def test_rows_that_chose_no_weights_are_held_out(place: Path, data: str):
    run = run_of(data)
    (rows,) = evaluated(run)
    assert rows.role == "validation"
    child = run_of(data, "eval.enabled = false")
    (rows,) = evaluated(child)
    assert rows.role == "held out"
    for why, role in {"the last": "held out", "the best by reward (0.5)": "validation"}.items():
        parent = {"run": run.id, "checkpoint": "step-000004", "why": why}
        update_manifest(child.dir, lambda m, parent=parent: replace(m, parent=parent))
        (rows,) = evaluated(child)
        assert rows.role == role


def test_a_resume_on_other_data_has_still_seen_the_old(place: Path):
    run = run_of(entry("train.jsonl"))
    update_manifest(run.dir, lambda m: replace(m, status="interrupted"))
    ready = plan_resume(Path("runs"), ResumeRequest(run.id, "rl", None, ("data.0.path=fresh.jsonl",), True))
    reopened, _, _ = reopen_run(Path("runs"), ready, ["vlmrl"])
    with reopened:
        pass
    assert facts(evaluated(run)) == [("fresh", "train", "training", 3)]
    assert facts(evaluated(run, "train.jsonl")) == [("fresh", "train", "training", 9)]
    assert facts(evaluated(run, "val.jsonl")) == [("fresh", "val", "held out", 6)]


def test_a_model_that_is_no_run_is_judged_by_the_recipe_it_is_given(place: Path):
    run = run_of(entry("train.jsonl"))
    other = ModelOrigin("nobody/nothing")
    chosen = choose_recipe(other, Path("runs"), recipe="mine.toml")
    assert facts(rows_to_evaluate(chosen.recipe, chosen.seen)) == [("train", "train", "training", 9)]
    named = choose_recipe(other, Path("runs"), recipe=run.id)
    assert named.recipe == chosen.recipe and named.run_dir is None
    alone = choose_recipe(other, Path("runs"), recipe="mine.toml", data="fresh.jsonl")
    assert facts(rows_to_evaluate(alone.recipe, alone.seen)) == [("fresh", "train", "held out", 3)]
    with pytest.raises(RecipeError, match="there is no recipe"):
        choose_recipe(other, Path("runs"), recipe="nothing")


SCHEME = """
[eval]
every_epochs = 1
max_new_tokens = 99
[eval.settings.pass8]
temperature = 1.0
samples = 8
"""


def test_a_task_is_named_for_all_sources_and_goes_to_the_ranks(place: Path):
    run = run_of(entry("no_test"))
    chosen = choose_recipe(origin_of(run), Path("runs"), task="counting")
    assert [data.task for data in chosen.recipe.data] == ["counting"]
    assert [data.task for data in choose_recipe(origin_of(run), Path("runs")).recipe.data] == ["table"]
    words = EvalRequest(model="last", task="own.py:task").rank_words()
    assert words[words.index("--task") + 1] == "own.py:task"


def test_a_file_without_data_overrides_the_runs_own_recipe_key_by_key(place: Path):
    settings = "[train]\nseed = 7\n[eval]\nevery_steps = 3\nmax_rows = 4"
    run = run_of(entry("train.jsonl", 'validation = "val.jsonl"'), settings)
    Path("schemes").mkdir()
    Path("schemes/scheme.toml").write_text(SCHEME)
    Path("schemes/train.jsonl").write_text('{"prompt": "another", "answer": "1"}\n')  # not the run's file
    own = choose_recipe(origin_of(run), Path("runs")).recipe
    chosen = choose_recipe(origin_of(run), Path("runs"), recipe="schemes/scheme.toml", overrides=["eval.max_rows=3"])
    recipe = chosen.recipe
    assert (recipe.data, recipe.model, recipe.reward, recipe.train) == (own.data, own.model, own.reward, own.train)
    assert (recipe.eval.every_epochs, recipe.eval.every_steps, recipe.eval.max_new_tokens) == (1.0, 0, 99)
    assert recipe.eval.settings["pass8"].samples == 8 and recipe.eval.max_rows == 3
    assert facts(rows_to_evaluate(recipe, chosen.seen)) == [("train", "validation", "validation", 3)]
    other = choose_recipe(ModelOrigin("a/model"), Path("runs"), recipe="schemes/scheme.toml", data="fresh.jsonl").recipe
    assert (other.data[0].path, other.model.path, other.eval.max_new_tokens) == ("fresh.jsonl", "a/model", 99)
    with pytest.raises(ProblemsError, match="data"):
        choose_recipe(ModelOrigin("a/model"), Path("runs"), recipe="schemes/scheme.toml")


def test_a_merged_model_is_evaluated_as_the_run_that_it_was_made_of(place: Path):
    run = run_of(entry("train.jsonl", 'validation = "val.jsonl"'))
    Path("merged").mkdir()
    Path("merged/merge.json").write_text(json.dumps({"run": run.id}))
    chosen = choose_recipe(ModelOrigin("merged"), Path("runs"))
    assert facts(rows_to_evaluate(chosen.recipe, chosen.seen)) == [("train", "validation", "validation", 6)]
    assert chosen.run_dir is None, "its evaluation is kept in a run of its own"
    for broken in ('{"run": "../runs"}', '{"run": 3}', "[]", "{"):
        Path("merged/merge.json").write_text(broken)
        with pytest.raises(RecipeError, match="no data on which"):
            choose_recipe(ModelOrigin("merged"), Path("runs"))


def test_a_merged_model_whose_run_was_moved_names_the_run(place: Path):
    run = run_of(entry("train.jsonl"))
    Path("merged").mkdir()
    Path("merged/merge.json").write_text(json.dumps({"run": run.id}))
    Path("runs").rename("moved")
    with pytest.raises(RecipeError, match=f"it was made from run {run.id}, which is not in runs") as caught:
        choose_recipe(ModelOrigin("merged"), Path("runs"))
    assert "--runs DIR" in str(caught.value.hint)
    assert choose_recipe(ModelOrigin("merged"), Path("moved")).recipe.data[0].path == "train.jsonl"


def chosen_elsewhere(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> ChosenRecipe:
    """The recipe of a run of this folder, as a command in another folder chooses it."""
    runs = Path("runs").absolute()
    (place / "elsewhere").mkdir()
    monkeypatch.chdir(place / "elsewhere")
    return choose_recipe(replace(origin_of(run), checkpoint=layout.checkpoint_dir(runs / run.id, 4)), runs)


def test_files_of_a_run_are_found_from_another_folder(place: Path, monkeypatch: pytest.MonkeyPatch):
    chosen = chosen_elsewhere(run_of(entry("train.jsonl", 'validation = "val.jsonl"')), place, monkeypatch)
    assert facts(rows_to_evaluate(chosen.recipe, chosen.seen)) == [("train", "validation", "validation", 6)]


def test_a_plain_name_is_no_file_of_the_folder_that_the_run_was_started_in(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    run = run_of(entry("all", 'validation = "validation"\nreward = "exact_match"'))
    for name in ("validation", "exact_match", "table"):
        (place / name).mkdir()
    chosen = chosen_elsewhere(run, place, monkeypatch).recipe
    data = chosen.data[0]
    assert (data.reward, data.validation, data.task) == ("exact_match", "validation", "table")
    assert data.path == str(place / "all") and chosen.reward.name == f"{place / 'reward.py'}:score"


def test_a_task_of_ones_own_is_found_from_another_folder(place: Path, monkeypatch: pytest.MonkeyPatch):
    (place / "t.py").write_text(OWN_TASK)
    run = run_of('[[data]]\npath = "train.jsonl"\ntask = "t.py:task"\n')
    chosen = chosen_elsewhere(run, place, monkeypatch)
    assert chosen.recipe.data[0].task == f"{place / 't.py'}:task"


def test_the_first_weights_of_a_run_elsewhere_are_found(place: Path):
    run = run_of(entry("train.jsonl"))
    folder = origin_of(run).checkpoint
    assert folder is not None
    parent = {"run": run.id, "checkpoint": folder.name, "why": "the best"}
    run.dir.parent.rename("moved")  # `runs` would be searched anyway
    folder, away = Path("moved").absolute() / folder.relative_to(run.dir.parent), Path("away")
    named, by_runs, beside = (
        (str(Path("moved", run.id)), away, away),
        (run.id, Path("moved"), away),
        (run.id, away, "moved"),
    )
    for path, root, home in (named, by_runs, beside):
        child = SimpleNamespace(manifest=SimpleNamespace(first_weights=parent), dir=Path(home, "child"))
        origin = first_origin(child, path, root)  # type: ignore[arg-type]
        assert origin.checkpoint is not None and origin.checkpoint.absolute() == folder


# Names: nothing of training's own is overwritten


def planned(run: Run, split: str | None = None, **settings) -> list[str]:
    chosen = choose_recipe(origin_of(run), Path("runs"))
    rows = rows_to_evaluate(chosen.recipe, chosen.seen, split)
    made = plan(chosen.recipe, origin_of(run), rows, run.dir, EvalSettings(**settings))
    assert all(p.meta["role"] == p.rows.role for p in made)
    return [p.name for p in made]


def write(folder: Path, **meta) -> None:
    row = {
        "prompt_id": "p",
        "sample": 0,
        "seed": 0,
        "source": "s",
        "task": "t",
        "truth": {},
        "text": "",
        "finish": "stop",
        "num_tokens": 1,
        "score": 1.0,
        "parts": {},
        "note": "",
        "error": None,
        "images": [],
        "outcome": {},
    }
    write_evaluation(folder, Evaluation([row], summarise([row])), meta)


@pytest.mark.slow
def test_an_evaluation_never_has_the_name_of_trainings_own(place: Path):
    run = run_of(entry("all") + entry("train.jsonl", 'validation = "val.jsonl"'))
    assert planned(run) == ["test-all-step-000004", "eval-validation-train-step-000004"]
    assert planned(run, temperature=1.0, samples=3)[0] == "test-all-step-000004-T1-n3"
    write(training_folder(run.dir, "validation", "train", 4), during="training")
    for name in (training_name("validation", "train", 4), "mine-step-000100"):
        with pytest.raises(StoreError, match="for its own evaluations"):
            planned(run, name=name, force=True)
    write(layout.eval_dir(run.dir, "test-all-step-000004"), during="training")
    with pytest.raises(StoreError, match="was made by training"):
        planned(run, force=True)


AT_75082C1 = {
    "format_tags": "182392e22b07e7214fbe96dc0b081835bbba4163574232e59a41e26829554c70",
}
"""What runs of that commit recorded for built-in rewards."""


def test_an_evaluation_from_before_versions_is_made_again_where_nothing_changed(place: Path):
    run = run_of(entry("all", 'reward = "format_tags"'))
    chosen = choose_recipe(origin_of(run), Path("runs"))
    (made,) = plan(chosen.recipe, origin_of(run), rows_to_evaluate(chosen.recipe, chosen.seen), run.dir, EvalSettings())
    reward, (old_prompt,) = made.meta["reward"], made.meta["prompt_earlier"]
    assert reward["version"] == 1 and "sha256" not in reward
    old = {k: v for k, v in made.meta.items() if k != "prompt_earlier"} | {"prompt_sha256": old_prompt}
    old["reward"] = {"name": reward["name"], "weights": reward["weights"], "sha256": AT_75082C1[reward["name"]]}
    folder = layout.eval_dir(run.dir, made.name)
    write(folder, **old)
    assert planned(run) == [made.name]
    write(folder, **made.meta)
    assert planned(run) == [made.name]
    others = {
        "another reward: format_tags version 2": {"reward": {**reward, "version": 2}},
        "another reward: format_tags source 444444444444": {"reward": {**old["reward"], "sha256": "4" * 64}},
        "tags = ..mine..": {"reward_args": {"tags": ["mine"]}},
        "weights format 0.5": {"reward": {**reward, "weights": {"format": 0.5}}},
        "another prompt_sha256": {"prompt_sha256": "4" * 64},
    }
    for told, changed in others.items():
        write(folder, **{**old, **changed})
        with pytest.raises(StoreError, match=told):
            planned(run)


def test_training_does_not_replace_what_a_person_evaluated(place: Path):
    run = run_of(entry("all"))
    own = layout.eval_dir(run.dir, training_name("test", "all", 4))
    assert training_folder(run.dir, "test", "all", 4) == own
    write(own, split="test", source="all")
    apart = training_folder(run.dir, "test", "all", 4)
    assert apart != own
    write(apart, during="training")
    assert training_folder(run.dir, "test", "all", 4) == apart
    assert "during" not in read_summary(own)["meta"]


@pytest.mark.parametrize(
    ("meta", "role"),
    [
        ({"split": "test"}, "test"),
        ({"split": "train"}, "training"),
        ({"split": "validation"}, "validation"),
        ({"split": "dev"}, "held out"),
        ({"step": 4, "during": "training"}, "validation"),
        ({}, "held out"),
        ({"split": "train", "role": "held out"}, "held out"),
        ({"split": "test", "role": "nonsense"}, "test"),
    ],
)
def test_evaluations_of_older_versions_are_labelled_too(meta: dict, role: str):
    assert role_of(meta) == role
    assert bool(role_label(meta)) == (role in ("validation", "training"))
