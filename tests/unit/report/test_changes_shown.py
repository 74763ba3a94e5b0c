"""Changes of a run as its report shows them: coloured only where they are clear, steps counted as on the terminal."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
from report_builders import evaluation_row, make_run

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.report.curves import RunCurves, health_charts
from vlmrl.report.page import render_report
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import training_name
from vlmrl.store.runs import Run, create_run

EVALUATION = {"split": "validation", "source": "digits"}


def opening(run: Run) -> tuple[str, str]:
    """(class, text) of the sentence that says whether the run learned."""
    [found] = re.findall(r'<div class="opening">\s*<p class="(.*?)"><b>(.*?)</b>', render_report([run]))
    return found


def validated(run: Run, scores: dict[int, list[float]], of: dict[str, Any] = EVALUATION, **fields: Any) -> Run:
    """The run with the rows of its validations, each row with an image of its own, and row -> value of `fields`."""
    for step, values in scores.items():
        rows = [
            evaluation_row(f"p{i}", s, images=[{"sha256": f"{i:064x}", "width": 4, "height": 3, "kind": "image"}])
            | {name: value(i) for name, value in fields.items()}
            for i, s in enumerate(values)
        ]
        meta = {"during": "training", "step": step, "greedy": True, **of}
        folder = layout.eval_dir(run.dir, training_name(of["split"], of["source"], step, of.get("setting", "")))
        write_evaluation(folder, Evaluation(rows, summarise(rows)), meta)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "colour", "begins"),
    [
        ([0.1] * 8 + [0.9] * 8, "", "It is not clear whether it learned: validation reward -0.050 [-"),
        ([0.1] * 15 + [0.9], "down", "It became worse: validation reward -0.400 [-"),
        ([0.9] * 16, "up", "It learned: validation reward +0.350 [+"),  # 7 of 16 rows gained 0.8
    ],
)
def test_the_page_opens_with_whether_the_run_learned(tmp_path: Path, last, colour, begins):
    run = validated(make_run(tmp_path), {0: [0.1] * 7 + [0.9] * 9, 4: last})
    found, text = opening(run)
    assert (found, text[: len(begins)]) == (colour, begins)
    assert text.endswith(", paired on 16 responses, step 0 to 4.")


@pytest.mark.parametrize("sources", [["digits"], ["birds", "digits"]])
def test_the_page_opens_with_the_validations_that_choose_checkpoints(tmp_path: Path, sources: list[str]):
    """They have one set of rows and one setting; the mean over the sources counts."""
    settings = {"greedy": {}, "pass8": {"temperature": 1.0, "samples": 8}}
    recipe = {"model": {"path": "m"}, "data": [{"path": "d"}], "reward": {"name": "math"}}
    recipe |= {"kind": "rl", "eval": {"settings": settings, "metric": "pass8/reward"}}
    resolved = {"schema": 1, "recipe": recipe, "origins": {}}
    with create_run(tmp_path, kind="rl", recipe_name="r", resolved=resolved) as run:
        run.log(0, "train", {"optim/grad_norm": 1.0})
        for step in (0, 4):
            run.log(step, "validation", {"eval/metric": 0.5})
    better, worse = {0: [0.1] * 16, 4: [0.9] * 16}, {0: [0.9] * 16, 4: [0.1] * 16}
    for source, split, setting in itertools.product(sources, ("validation", "test"), settings):
        of = {"split": split, "source": source, "role": split, "setting": setting}
        validated(run, better if (split, setting) == ("validation", "pass8") else worse, of)
    colour, text = opening(run)
    begin = "birds " if len(sources) > 1 else ""
    assert (colour, text.partition(" +")[0]) == ("up", f"It learned: validation {begin}pass8 reward"), text
    assert text.count("pass8 reward +0.800") == len(sources) and "greedy" not in text
    assert text.endswith(f", paired on {16 * len(sources)} responses, step 0 to 4.")


@pytest.mark.slow
def test_a_higher_score_of_answers_that_are_all_alike_is_no_success(tmp_path: Path):
    fields = {"truth": lambda i: {"answer": i % 5}, "text": lambda i: "<answer>2</answer>"}
    rows = validated(make_run(tmp_path), {0: [0.1] * 16, 4: [0.9] * 16}, **fields)
    found, text = opening(rows)
    assert found == ""
    assert text.startswith("It learned to score more with one answer to nearly every prompt: validation reward +0.800")


@pytest.mark.slow
def test_without_rows_to_compare_it_is_not_known_whether_it_learned(tmp_path: Path):
    expected = "It is not known whether it learned: the validations have no rows that can be paired."
    assert opening(make_run(tmp_path)) == ("", expected)


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([6.484, 1.5, 0.61], "The validation loss fell from 6.48 to 0.61, step 0 to 2; "),
        (
            [6.95, 0.849, 0.93, 0.972],
            "The validation loss fell from 6.95 to 0.849 at step 1, its best, and then rose to 0.972, step 0 to 3; ",
        ),
        ([0.5, 0.75], "The validation loss rose from 0.5 to 0.75, step 0 to 1; "),
        ([0.5, 0.5], "The validation loss stayed at 0.5, step 0 to 1; "),
        ([0.5], "It is not known whether it learned: there is only one validation, with loss 0.5."),
        ([], "It is not known whether it learned: there is no validation."),
    ],
)
def test_a_run_that_validates_by_its_loss_opens_with_it(tmp_path: Path, losses, expected):
    with create_run(tmp_path, kind="sft", recipe_name="r") as run:
        run.log(0, "train", {"loss/cross_entropy": 1.0, "optim/grad_norm": 1.0})
        for step, loss in enumerate(losses):
            run.log(step, "validation", {"eval/loss": loss, "eval/metric": loss})
    rest = "there are no losses of single rows, so no paired interval." if len(losses) > 1 else ""
    assert opening(run) == ("", expected + rest)


@pytest.mark.slow
def test_a_run_without_an_update_is_no_green_success(tmp_path: Path):
    run = make_run(tmp_path, steps=3, updates=False)
    assert opening(run) == ("down", "Nothing was learned: none of the 3 steps updated the model.")
    text = render_report([run])
    assert '<span class="pill idle">done, no update</span>' in text and 'class="pill done"' not in text
    assert re.search(r"<p>(error|warning): ", text)  # a cause that `runs diagnose` found


def test_the_learning_rate_of_a_step_without_an_update_is_no_dip(tmp_path: Path):
    """Older versions wrote 0 for such a step; a rate of 0 with an update is one."""
    lines = [
        {"step": 0, "optim/lr": 1e-3, "optim/grad_norm": 1.0}, {"step": 1, "optim/lr": 0.0},
        {"step": 2, "optim/lr": 0.0, "optim/grad_norm": 1.0},
    ]  # fmt: skip
    (chart,) = [c for c in health_charts([RunCurves("run", 0, train=lines)]) if c.name == "optim/lr"]
    assert re.findall(r"step (\d+):", chart.svg) == ["1", "3"]
