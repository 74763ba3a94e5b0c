"""Counts of `runs diagnose`: updates between validations, responses that are right, those that are not cut off."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sick_runs import changed, look, make_run, plan

from vlmrl.rewards.base import RewardSpec
from vlmrl.store import layout

LATER = {"optim/updates": 68}
EQUAL = {"eval/metric": 0.4, "eval/reward": 0.4, "eval/truncated": 0.0, "eval/response_tokens": 17.25}


def user_reward(score) -> RewardSpec:
    return RewardSpec("mine", score, {}, {"answer": 1.0}, pure=True)


@pytest.mark.parametrize(("first", "is_told"), [(0, True), (2, True), (4, False)])
def test_only_the_updates_between_validations_say_that_nothing_changes(first, is_told, tmp_path):
    found = look(make_run(tmp_path, plan(validations={first: EQUAL, 6: EQUAL}, metrics=lambda step: LATER)))
    told = [c.evidence for c in found.causes if "change nothing" in c.what]
    words = f"2 greedy validations over {6 - first} steps with an update agree in every number"
    assert told == ([[words]] if is_told else [])


@pytest.mark.parametrize(
    ("value", "words"), [(0.0, "0 for all 216 responses, also for the "), (1.0, "1 for all 216 responses, although ")]
)
def test_equal_scores_are_compared_with_what_is_cut_off(value, words, tmp_path):
    spec = user_reward(lambda x: {"part": value, "answer": float("1" in x.response)})
    spec = replace(spec, weights={"part": 0.5, "answer": 0.5})
    found = look(make_run(tmp_path, plan(spec=spec, cut=lambda text: len(text) % 2 == 0)))
    (cause,) = (c for c in found.causes if c.what.startswith("the part `part`"))
    assert words in cause.what and cause.what.endswith("not cut off" if value == 0 else "of them are cut off")


def add_validation(run, step: int, texts: list[str]) -> None:
    folder = layout.eval_dir(run.dir, f"validation-digits-step-{step:06}")
    folder.mkdir(parents=True, exist_ok=True)
    truths = [f'{{"hour": {i}}}' for i in range(len(texts))]
    pq.write_table(pa.table({"text": texts, "truth": truths}), folder / layout.EVAL_ROWS)
    (folder / layout.EVAL_SUMMARY).write_text('{"meta": {"during": "training"}, "metrics": {}, "schema": 1}')


def test_one_answer_to_all_comes_before_a_limit_that_cuts_a_part_of_the_responses(tmp_path):
    run = make_run(tmp_path, plan(cut=lambda text: len(text) % 2 == 0))
    add_validation(run, 6, ["7"] * 9)
    names = [cause.name for cause in look(run).causes]
    assert names.index("one_answer") < names.index("cut_off")


@pytest.mark.parametrize(
    ("texts", "count"), [(["7"] * 9, "all 9"), (["7"] * 9 + ["8"], "9 of 10"), (["7"] * 8 + ["8"], ""), (["7"] * 4, "")]
)
def test_a_validation_whose_answers_are_nearly_all_one_text_is_named(texts, count, tmp_path):
    run = make_run(tmp_path, plan())
    add_validation(run, 0, [f"{i}" for i in range(9)])
    add_validation(run, 6, texts)
    told = [(c.level, c.what) for c in look(run).causes if c.name == "one_answer"]
    where, level = "of the validation validation-digits-step-000006", "error" if count == "all 9" else "warning"
    words = f"{count} answers {where} are one text, to {len(texts)} different truths"
    assert told == [(level, words)] * bool(count)


def test_the_best_validation_is_looked_at_beside_the_newest(tmp_path):
    run = make_run(tmp_path, plan(validations={3: {"eval/metric": 0.9}, 6: {"eval/metric": 0.5}}))
    add_validation(run, 3, ["7"] * 9)
    add_validation(run, 6, [f"{i}" for i in range(9)])
    found = changed(run, best={"step": 3, "metric": "reward", "value": 0.9})
    assert any("validation-digits-step-000003" in c.what for c in found.causes if c.name == "one_answer")


def test_what_is_right_follows_the_accuracy_that_the_recipe_names(tmp_path):
    """Every response earns its form, which is most of the score, and none is right."""
    spec = user_reward(lambda x: {"form": float("</think>" in x.response), "hour": 0.0})
    spec = replace(spec, weights={"form": 1.0, "hour": 0.01})
    run = make_run(tmp_path, plan(spec=spec, settings=['reward.accuracy="hour"']))
    assert "all_right" not in {c.name for c in look(run).causes}
    assert next(c for c in look(run).causes if c.name == "all_wrong").weight == 1.0
