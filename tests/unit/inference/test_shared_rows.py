"""Rows of another file that training had: found by their images and prompts, and what is not known is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from begun_runs import entry
from begun_runs import run_of as begin
from tinyworld import image

from vlmrl.cli.eval import _heading, rows_line
from vlmrl.evaluate import shared_rows
from vlmrl.evaluate.blind_probe import label_of_both
from vlmrl.evaluate.eval_rows import EvalRows, choose_recipe, rows_to_evaluate
from vlmrl.evaluate.generate import rows_to_answer
from vlmrl.evaluate.shared_rows import with_shared
from vlmrl.setup.model_origin import ModelOrigin
from vlmrl.store import layout
from vlmrl.store.evaluated_rows import UNCERTAIN, role_label
from vlmrl.store.kept_recipe import resolved_files
from vlmrl.store.manifest import update_manifest
from vlmrl.store.runs import Run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: rows with responses (0 to 7), others without, and the same pictures under other questions."""
    monkeypatch.chdir(tmp_path)
    Path("reward.py").write_text("def score(x):\n    return 1.0\n")
    table("start.jsonl", [text_row(i, response=f"it is {i}") for i in range(8)])
    table("both.jsonl", [text_row(i) for i in range(4, 10)])
    table("fresh.jsonl", [text_row(i) for i in range(20, 23)])
    for i in range(6):
        image(i, 40, 56).save(f"{i}.png")
    table("seen.jsonl", [{"image": f"{i}.png", "prompt": "Which?", "answer": "a"} for i in range(4)])
    table("near.jsonl", [{"image": f"{i}.png", "prompt": "How many?", "answer": "1"} for i in range(3, 6)])
    return tmp_path


def text_row(i: int, **more: str) -> dict[str, Any]:
    return {"prompt": f"say {i}", "answer": str(i), **more}


def table(name: str, rows: Sequence[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_of(path: str, more: str = "", kind: str = "sft") -> Run:
    return begin(entry(path, more), kind=kind)


def evaluated(run: Run, split: str, path: str | None = None) -> EvalRows:
    origin = ModelOrigin(path or run.id, None if path else layout.checkpoint_dir(run.dir, 4))
    chosen = choose_recipe(origin, Path("runs"))
    (rows,) = with_shared(rows_to_evaluate(chosen.recipe, chosen.seen, split), chosen.seen.run_dir)
    return rows


def test_rows_of_another_file_that_training_had_are_counted(place: Path) -> None:
    run = run_of("start.jsonl")
    both = evaluated(run, "both.jsonl")
    assert both.role == "training" and both.shared.startswith("rows of which 4 of 6 are also in training")
    fresh = evaluated(run, "fresh.jsonl")
    assert (fresh.role, fresh.shared) == ("held out", "")
    other = run_of("both.jsonl", kind="rl")
    assert evaluated(other, "start.jsonl").shared.startswith("rows of which 4 of 8 are also in training")


def test_a_rank_takes_what_its_launcher_has_seen_and_reads_no_training_row(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of("start.jsonl")
    both = evaluated(run, "both.jsonl")
    monkeypatch.setattr(shared_rows, "trained_rows", lambda *_: pytest.fail("the rows of training are read again"))
    monkeypatch.setattr(shared_rows, "launched", lambda: True)
    again = evaluated(run, "both.jsonl")
    assert (again.role, again.shared) == (both.role, both.shared) and "4 of 6" in again.shared


def test_rows_that_a_run_held_out_are_not_among_those_it_had(place: Path) -> None:
    run = run_of("start.jsonl", "validation = 0.5")
    table("again.jsonl", [text_row(i) for i in range(8)])
    assert evaluated(run, "again.jsonl").shared.startswith("rows of which 4 of 8 are also in training")


def test_rows_with_an_image_that_training_had_stay_held_out_and_say_it(place: Path) -> None:
    near = evaluated(run_of("seen.jsonl"), "near.jsonl")
    assert (near.role, near.shared) == ("held out", "rows of which 1 of 3 have an image that is also in training")


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_run_that_began_with_the_weights_of_another_knows_its_rows(place: Path, is_merged: bool) -> None:
    first, second = run_of("start.jsonl"), run_of("fresh.jsonl", kind="rl")
    if is_merged:
        Path("merged").mkdir()
        (Path("merged") / layout.MERGE_RECORD).write_text(json.dumps({"run": first.id}))
        (Path("merged") / "config.json").write_text("{}")
        assert evaluated(first, "both.jsonl", path="merged").role == "training"
        resolved = resolved_files(second.dir)[-1]
        resolved.write_text(resolved.read_text().replace("nobody/nothing", "merged"))
    else:
        update_manifest(second.dir, lambda m: replace(m, parent={"run": first.id, "checkpoint": "step-000004"}))
    assert evaluated(second, "both.jsonl").role == "training"
    shutil.rmtree(first.dir)
    assert evaluated(second, "both.jsonl").shared == UNCERTAIN


def test_what_cannot_be_compared_is_not_called_held_out(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("start.jsonl")
    rows = Path("start.jsonl").read_text()
    table("start.jsonl", [text_row(50)])  # other rows under the old name are none that training had
    assert evaluated(run, "both.jsonl").shared == UNCERTAIN
    Path("start.jsonl").write_text(rows)
    assert evaluated(run, "fresh.jsonl").shared == ""
    monkeypatch.setattr(shared_rows, "SECONDS", -1.0)
    assert evaluated(run, "fresh.jsonl").shared == UNCERTAIN


def test_no_code_that_a_run_names_is_run(place: Path) -> None:
    run = run_of("start.jsonl")
    Path("reward.py").write_text("raise SystemExit('the code of the run was run')\n")
    runs = [(run.dir, run.manifest)]
    trained = shared_rows.trained_rows(runs, shared_rows.entries_of_runs(runs))
    assert len(trained.rows) == 8 and trained.is_complete


def test_a_comparison_says_what_each_side_had(place: Path) -> None:
    a, b = {"role": "training", "shared": "rows of which 4 of 6 are also in training"}, {"role": "held out"}
    assert role_label(a) == a["shared"] and role_label(b) == ""
    assert label_of_both([a, b]) == "rows of which 4 of 6 are also in training for A and held out rows for B"
    assert label_of_both([a, a]) == a["shared"] and label_of_both([b, b]) == ""


def test_rows_to_answer_are_known_like_rows_to_evaluate(place: Path) -> None:
    run = run_of("start.jsonl")
    chosen = choose_recipe(ModelOrigin(run.id, layout.checkpoint_dir(run.dir, 4)), Path("runs"))
    (rows,) = rows_to_answer(chosen.recipe, chosen.seen, "both.jsonl", None, None)
    assert rows_line(rows).startswith("warning: start: 6 rows, the file both.jsonl (rows of which 4 of 6 are also in")
    assert rows.file == "both.jsonl"
    (rows,) = rows_to_answer(chosen.recipe, chosen.seen, "fresh.jsonl", 1, None)
    assert rows_line(rows) == "start: 1 rows, the file fresh.jsonl"
    (rows,) = rows_to_answer(chosen.recipe, chosen.seen, None, None, None)
    assert rows_line(rows) == "warning: start: 8 rows, all of start.jsonl (training rows)" and rows.file == ""


@pytest.mark.parametrize(("file", "place"), [({"file": "data/test.parquet"}, "data/test.parquet"), ({}, "train/test")])
def test_a_file_is_named_by_its_path_and_not_as_a_split(file: dict[str, str], place: str) -> None:
    meta = {"model": "m", "checkpoint": None, "source": "train", "split": "test", "greedy": True, **file}
    assert _heading({"meta": meta, "prompts": 2, "rows": 2, "images": 0}).startswith(f"m on {place}: 2 prompts, ")
