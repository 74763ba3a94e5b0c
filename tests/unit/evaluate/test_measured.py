"""Measures of a task in records, summaries, on the screen: all responses, the valid ones, the ceiling, the absent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from report_builders import evaluation_row, group, make_run

from vlmrl.cli import eval as eval_command
from vlmrl.cli.eval import show_measures
from vlmrl.errors import RecipeError
from vlmrl.evaluate.measures import (
    absent_words,
    add_measures,
    chosen_measures,
    measure_lines,
    measured_names,
    measures_record,
)
from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.recipe.schema import Recipe
from vlmrl.report.page import render_report
from vlmrl.store import layout
from vlmrl.tasks.base import Measures, Task
from vlmrl.types import RewardInput

NUMBERS: list[dict[str, float | None]] = [
    {"near": 0.8, "near/valid": 0.8, "near/ceiling": 0.9},
    {"near": 0.0, "near/valid": None, "near/ceiling": 0.7},
]


class Stub:
    """Measurer with numbers known beforehand."""

    absent: Mapping[str, str] = {"far": "no weights in `x`", "wide": "no weights in `x`"}

    def __init__(self) -> None:
        self.problems: list[str] = ["of an earlier chunk"]

    def measure(self, inputs: Sequence[RewardInput]) -> Sequence[Mapping[str, float | None]]:
        self.problems.append("it hung")
        assert [x.response for x in inputs] == ["answer a.0", "answer a.1"]
        return NUMBERS

    def close(self) -> None: ...


TASK = Task("t", "", "", measures=Measures(("near", "far", "wide", "deep"), ("near",), {"far": ""}, lambda s: Stub()))


def summary() -> dict[str, Any]:
    records = [evaluation_row(f"p{i}", 0.5, images=[]) for i in range(2)]
    for record, numbers in zip(records, NUMBERS, strict=True):
        record["outcome"] = {**record["outcome"], **numbers}
    whole = summarise(records)
    return whole | {"measures": measures_record(TASK, Stub(), whole["metrics"])}


def test_the_numbers_of_a_measurer_become_outcomes():
    records, measurer = [evaluation_row("a", 1.0, sample=k) for k in range(2)], Stub()
    assert add_measures(records, [group("a", [1.0, 0.0])], measurer) == ["it hung"]
    assert [r["near"] for r in records] == [0.8, 0.0] and records[1]["outcome"]["near/valid"] is None
    assert "label" in records[0]["outcome"]


def test_a_measure_has_a_mean_over_all_over_the_valid_and_a_ceiling():
    whole = summary()
    (line,) = measure_lines(whole)
    assert line.valid is not None and line.ceiling is not None
    assert (line.every["value"], line.every["n"]) == (pytest.approx(0.4), 2)
    assert (line.valid["value"], line.valid["n"]) == (0.8, 1)
    assert line.ceiling["value"] == pytest.approx(0.8) and line.share == pytest.approx(0.5)
    assert measured_names(whole) == {"near", "near/valid", "near/ceiling"} and measured_names({}) == set()
    whole["metrics"]["near"]["better"] = "lower"
    assert measure_lines(whole)[0].share is None


def test_what_is_absent_is_named_with_its_reason():
    assert absent_words(summary()) == [
        "absent: far, wide: no weights in `x`",
        "not asked for: deep (eval.measures, eval.weights)",
    ]
    assert absent_words({"metrics": {}}) == []


def test_the_screen_has_all_of_it(capsys):
    show_measures(summary())
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("\t") for line in lines[:2]] == [
        ["measure", "all responses", "n", "the valid ones", "n", "ceiling", "share"],
        ["near", lines[1].split("\t")[1], "2", "0.800 -", "1", "0.800", "0.500"],
    ]
    assert lines[1].split("\t")[1].startswith("0.400 [0.") and "absent: far, wide: no weights in `x`" in lines


def test_the_report_has_all_of_it(tmp_path: Path):
    run = make_run(tmp_path, steps=1)
    records = [evaluation_row("p", 0.5)]
    whole = summary()
    write_evaluation(layout.eval_dir(run.dir, "test-t"), Evaluation(records, whole), {"split": "test", "source": "t"})
    page = render_report([run])
    part = page[page.index("<h4>Measures") :]
    assert "absent: far, wide: no weights in `x`" in part and "near/ceiling" not in page
    cells = part[part.index('<td class="v">near</td>') :][:400]
    assert all(text in cells for text in ("0.400", "0.800", ">0.500<", '<td class="n">2</td>', '<td class="n">1</td>'))


def test_a_task_without_measures_takes_none(recipe_and_source):
    recipe, source = recipe_and_source
    assert chosen_measures(recipe, source) == ()
    asked = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"measures": ["near"]})})
    with pytest.raises(RecipeError, match="has no measures"):
        chosen_measures(asked, source)
    assert chosen_measures(asked, replace(source, task=TASK)) == ("near",)


@pytest.fixture
def recipe_and_source():
    recipe = Recipe.model_validate({"model": {"path": "m"}, "data": [{"path": "d"}]})
    return recipe, make_dataclass("Source", ["task"])(Task("plain", "", ""))


@pytest.mark.parametrize("as_json", [False, True])
def test_responses_without_a_score_are_told_beside_the_json_too(tmp_path, monkeypatch, capsys, as_json) -> None:
    summary = {"rows": 1200, "reward_errors": 512, "reward_unavailable": 3, "name": "test", "metrics": {}}
    monkeypatch.setattr(eval_command, "result_fields", lambda *_: summary)
    monkeypatch.setattr(eval_command, "show_evaluations", lambda *_: None)
    eval_command._show([tmp_path], [Evaluation([], {})], None, as_json)
    told = " ".join(capsys.readouterr().err.split())
    assert "failed for 512 of 1,200 responses of test" in told and "was unavailable for 3 of 1,200" in told
