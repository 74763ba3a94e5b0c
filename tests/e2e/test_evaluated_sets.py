"""Runs that evaluate several sets under several settings: names, selection, epochs, labels, resume."""

from __future__ import annotations

import pytest
from small_runs import Ears, begin, go_on, make_place, train

from vlmrl.errors import DataError
from vlmrl.evaluate.over_training import over_checkpoints
from vlmrl.evaluate.records import read_evaluation
from vlmrl.store.evaluated_rows import read_summary
from vlmrl.train.loop import is_due

SETTINGS = """
rollout = {prompts_per_step = 5, samples_per_prompt = 3, max_new_tokens = 12, temperature = 0.9}
train = {steps = 4, rows_per_step = 7, tokens_per_row = 400}
optim = {lr = 1e-3}
checkpoint = {every_steps = 2, keep_last = 9}
eval.sets = ["validation", "test"]
eval.every_steps = 2
eval.max_rows = 4
eval.allow_test_split = true
eval.metric = "warm/mean@3"
eval.settings.greedy = {}
eval.settings.warm = {temperature = 1.0, samples = 3, max_new_tokens = 6}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_folder):
    return make_place(tmp_path_factory.mktemp("place"), tiny_folder, SETTINGS, reward=REWARD)


REWARD = """
def score(x):
    right = float(x.response.count("e") % 2 == x.sample % 2)
    return {"accuracy": right, "length": min(1.0, x.num_tokens / 12)}
"""


@pytest.fixture(scope="module")
def run(place, tmp_path_factory):
    return train(place, tmp_path_factory.mktemp("runs"))


def test_every_set_is_evaluated_under_every_setting_at_every_due_step(run):
    names = sorted(folder.name for folder in (run.dir / "eval").iterdir())
    steps = ("000000", "000002", "000004")
    assert names == sorted(
        f"{split}-digits-{setting}-step-{step}"
        for split in ("validation", "test")
        for setting in ("greedy", "warm")
        for step in steps
    )
    warm = read_evaluation(run.dir / "eval" / "test-digits-warm-step-000002")
    assert (warm.summary["rows"], warm.summary["prompts"], len(warm.rows)) == (12, 4, 12)
    assert max(row["num_tokens"] for row in warm.rows) <= 6
    assert len(read_evaluation(run.dir / "eval" / "test-digits-greedy-step-000002").rows) == 4


def test_metrics_carry_set_and_setting_and_the_selecting_ones_stand_alone_too(run):
    line = run.metrics("validation")[-1]
    for name in ("validation", "test"):
        assert {f"eval/{name}/greedy/accuracy", f"eval/{name}/warm/pass@2_low"} <= line.keys()
        assert f"eval/{name}/greedy/pass@2" not in line
    assert line["eval/metric"] == line["eval/validation/warm/mean@3"]
    assert line["eval/accuracy"] == line["eval/validation/warm/accuracy"]
    assert "eval/pass@2" not in line


def test_the_first_set_selects_and_the_test_split_never_does(run):
    lines = run.metrics("validation")
    values = {line["step"]: line["eval/validation/warm/mean@3"] for line in lines}
    assert run.manifest.best.value == max(values.values()) == values[run.manifest.best.step]
    assert run.manifest.best.metric == "warm/mean@3"
    meta = {f.name: read_summary(f)["meta"] for f in (run.dir / "eval").glob("*-step-000002")}
    assert meta["test-digits-warm-step-000002"]["role"] == "test"
    assert meta["validation-digits-greedy-step-000002"]["role"] == "validation"
    assert meta["test-digits-warm-step-000002"]["sampling"] == {
        "greedy": False, "temperature": 1.0, "samples": 3, "max_new_tokens": 6,
    }  # fmt: skip
    assert "evaluated on the test split during training" in run.manifest.labels
    entries = {(e["evaluation"], e["metric"]): e for e in over_checkpoints(run)}
    test = entries["test-digits-warm", "accuracy"]
    assert "chosen on these test rows themselves" in test["best"]["label"]
    assert test["selected"]["by"] == "validation"


def test_the_test_split_needs_permission(place, tmp_path):
    with pytest.raises(DataError, match="validates on its test split"):
        begin(place, tmp_path, "eval.allow_test_split=false")


def test_a_set_that_no_source_has(place, tmp_path):
    with pytest.raises(DataError, match=r"`eval.sets` names `dev`, and no source has such a split"):
        begin(place, tmp_path, 'eval.sets=["validation", "dev"]')


def test_test_splits_alone_select_nothing(place, tmp_path):
    ears = Ears()
    run, status = begin(place, tmp_path, 'eval.sets=["test"]', "train.steps=1", "eval.metric=accuracy", ears=ears)
    assert status == "done" and run.manifest.best is None
    assert any("no set selects" in text for text in ears.heard)


def test_epochs(place, tmp_path):
    overrides = ('eval.sets=["validation"]', "eval.every_epochs=0.25", "eval.metric=accuracy")
    run, _ = begin(place, tmp_path, *overrides, "data.0.max_rows=11", "train.epochs=1")
    # 11 rows, 5 per step: a quarter is 2.75 rows, so every step draws the end of one or two quarters.
    assert [line["step"] for line in run.metrics("validation")] == [0, 1, 2, 3]
    assert [line["eval/epoch"] for line in run.metrics("validation")] == pytest.approx([0, 5 / 11, 10 / 11, 15 / 11])


def test_due_steps_do_not_drift(place):
    from vlmrl.recipe.load import load_recipe

    recipe = load_recipe(place / "rl.toml", overrides=["eval.every_epochs=1", "rollout.prompts_per_step=4"]).recipe
    # 10 rows, 4 per step: epochs end with rows 10, 20, 30, 40 in steps 3, 5, 8, 10.
    assert [step for step in range(1, 12) if is_due(recipe, 10, step)] == [3, 5, 8, 10]
    often = load_recipe(place / "rl.toml", overrides=["eval.every_epochs=0.1", "rollout.prompts_per_step=4"]).recipe
    assert [step for step in range(1, 4) if is_due(often, 10, step)] == [1, 2, 3]


def test_a_resumed_run_evaluates_the_same(place, run, tmp_path):
    half, status = begin(place, tmp_path, stop_at=2)
    assert status == "interrupted"
    whole, status = go_on(half)
    assert status == "done"
    for folder in (run.dir / "eval").iterdir():
        mine, theirs = read_evaluation(whole.dir / "eval" / folder.name), read_evaluation(folder)
        assert (mine.rows, mine.summary["metrics"]) == (theirs.rows, theirs.summary["metrics"])
