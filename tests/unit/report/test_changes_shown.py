"""Changes of a run as its report shows them: coloured only where they are clear, steps counted as on the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from report_builders import evaluation_row, make_run

from vlmrl.evaluate.metrics import summarise
from vlmrl.evaluate.records import Evaluation, write_evaluation
from vlmrl.report.curves import RunCurves, health_charts
from vlmrl.report.page import render_report
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import training_name
from vlmrl.store.runs import Run


def colours(run: Run) -> list[str]:
    """Classes of the changes in the headlines of a report."""
    return re.findall(r'· <span class="([^"]*)">', render_report([run]))


def validated(run: Run, scores: dict[int, list[float]]) -> Run:
    """The run with the rows of its validations, each row with an image of its own."""
    for step, values in scores.items():
        rows = [
            evaluation_row(f"p{i}", s, images=[{"sha256": f"{i:064x}", "width": 4, "height": 3, "kind": "image"}])
            for i, s in enumerate(values)
        ]
        meta = {"split": "validation", "source": "digits", "during": "training", "step": step, "greedy": True}
        folder = layout.eval_dir(run.dir, training_name("validation", "digits", step))
        write_evaluation(folder, Evaluation(rows, summarise(rows)), meta)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last", "expected"),
    [([0.1] * 8 + [0.9] * 8, ""), ([0.1] * 15 + [0.9], "down"), ([0.9] * 16, "up")],
)
def test_a_change_has_a_colour_only_where_its_paired_interval_excludes_zero(tmp_path: Path, last, expected):
    run = validated(make_run(tmp_path), {0: [0.1] * 7 + [0.9] * 9, 4: last})
    assert colours(run)[:2] == [expected, expected]


@pytest.mark.slow
def test_a_change_without_rows_to_compare_has_no_colour(tmp_path: Path):
    assert set(colours(make_run(tmp_path))) == {""}


def test_the_learning_rate_of_a_step_without_an_update_is_no_dip(tmp_path: Path):
    """Older versions wrote 0 for such a step; a rate of 0 with an update is one."""
    lines = [
        {"step": 0, "optim/lr": 1e-3, "optim/grad_norm": 1.0}, {"step": 1, "optim/lr": 0.0},
        {"step": 2, "optim/lr": 0.0, "optim/grad_norm": 1.0},
    ]  # fmt: skip
    (chart,) = [c for c in health_charts([RunCurves("run", 0, train=lines)]) if c.name == "optim/lr"]
    assert re.findall(r"step (\d+):", chart.svg) == ["1", "3"]
