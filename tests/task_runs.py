"""A task through the commands, as a user calls them: data, check, training, evaluation, probe, report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from command_line import this_process
from small_runs import recipe_text

from vlmrl.store.runs import Run, open_run


def prepared(cwd: Path, task: str, *options: object) -> Any:
    """Make the folder `data`, and return the command's JSON."""
    done = this_process("prep", task, *options, "--out", "data", "--json", cwd=cwd)
    assert done.code == 0, done.err
    return done.json


def trained(cwd: Path, model: Path, recipe: str) -> Run:
    """Check the recipe and train with it; the run's name is `own`."""
    (cwd / "recipe.toml").write_text(recipe_text(model, recipe))
    checked = this_process("check", "recipe.toml", cwd=cwd)
    assert checked.code == 0, checked.err
    assert this_process("train", "recipe.toml", "--name", "own", "--json", cwd=cwd).json["status"] == "done"
    return open_run(cwd / "runs", "own")


def measured(cwd: Path, *options: object) -> dict[str, Any]:
    """Evaluate the run, and return the metrics."""
    (evaluation,) = this_process("eval", "own", *options, "--json", cwd=cwd).json["evaluations"]
    return evaluation["metrics"]


def probed(cwd: Path) -> dict[str, Any]:
    """Probe the run's reward, and write its report. Return the facts about the probe."""
    checked = this_process("reward-check", "own", "--probe", "--json", cwd=cwd).json
    assert checked["stored"]["equal"]
    assert this_process("report", "own", cwd=cwd).code == 0
    (probe,) = checked["probes"].values()
    return probe


def assert_answers_score_the_same(cwd: Path, name: str = "own") -> None:
    """Score the responses of a run's evaluations again: the result is equal to the digit."""
    run = open_run(cwd / "runs", name)
    for rows in run.dir.glob("eval/*/rows.parquet"):
        checked = this_process("reward-check", rows, "--html", "answers.html", "--json", cwd=cwd).json
        assert checked["evaluations"] == [rows.parent.name]
        assert checked["stored"]["equal"] and not checked["notes"]
        assert "image not found" not in (cwd / "answers.html").read_text("utf-8")


def assert_no_hole(probe: dict[str, Any], trick: str) -> None:
    """Assert that no trick is flagged, that this one is tried, and that right answers earn much."""
    assert probe["flagged"] == 0 and trick in {one["name"] for one in probe["probes"]}
    assert probe["honest"]["informed"] > 0.8
