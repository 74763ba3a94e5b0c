"""Every command that shows a run names what of it is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from report_builders import make_run

from vlmrl.diagnose.run import diagnose
from vlmrl.evaluate.compare import compare, open_side
from vlmrl.report.page import write_report
from vlmrl.reward_check.scoring import open_saved
from vlmrl.store import layout
from vlmrl.store.runs import Run
from vlmrl.store.verify import damage_of


def add_lines(run: Run) -> None:
    with open(run.dir / layout.METRICS, "a") as file:
        file.write('garbage\n[1, 2]\n{"step": "x", "attempt": 1, "kind": "train"}\n')


def cut_rollouts(run: Run) -> None:
    path = layout.rollout_path(run.dir, 1)
    pq.write_table(pq.read_table(path).slice(0, 3), path)


def drop_seconds(run: Run) -> None:
    path = layout.rollout_path(run.dir, 0)
    pq.write_table(pq.read_table(path).drop_columns(["generate_seconds"]), path)


def spoil_summary(run: Run) -> None:
    (layout.eval_dir(run.dir, "test") / layout.EVAL_SUMMARY).write_text('{"metrics": [], "step": "x"}')


DAMAGE: dict[str, tuple[Callable[[Run], None], int, str]] = {
    "lines": (add_lines, 3, "a line of metrics is damaged"),
    "rollouts": (
        cut_rollouts,
        1,
        "rollouts/000002.parquet: step 2: metrics say 8 samples, but the rollouts have 3",
    ),
    "columns": (drop_seconds, 1, "rollouts/000001.parquet: the rollouts lack the column generate_seconds"),
    "summary": (spoil_summary, 1, "eval/test/summary.json: this file is not the summary of an evaluation"),
}


@pytest.mark.slow
def test_damage_is_said_by_whoever_shows_the_run(tmp_path: Path):
    run, other = make_run(tmp_path, steps=3), make_run(tmp_path, steps=3)
    ways = {
        "damage": lambda: damage_of(run.dir),
        "diagnose": lambda: diagnose(run).notes,
        "compare": lambda: compare(open_side(tmp_path, run.id), open_side(tmp_path, other.id))["notes"],
        "reward-check": lambda: open_saved(run.id, tmp_path).notes,
        "report": lambda: write_report([run], tmp_path / "r.html").get(run.id, []),
    }

    def said() -> dict[str, dict[str, int]]:
        """How often each way says each damage."""
        notes = {way: look() for way, look in ways.items()}
        return {
            name: {way: sum(sentence in note for note in notes[way]) for way in ways}
            for name, (_, _, sentence) in DAMAGE.items()
        }

    assert damage_of(run.dir) == [] and said() == dict.fromkeys(DAMAGE, dict.fromkeys(ways, 0))
    for change, _, _ in DAMAGE.values():
        change(run)
    assert said() == {name: dict.fromkeys(ways, number) for name, (_, number, _) in DAMAGE.items()}


@pytest.mark.slow
def test_of_one_rollout_file_only_its_own_damage_is_said(tmp_path: Path):
    run = make_run(tmp_path, steps=3)
    add_lines(run)
    cut_rollouts(run)
    notes = [open_saved(str(layout.rollout_path(run.dir, step)), tmp_path).notes for step in (0, 1)]
    assert [[note for note in each if "metrics" in note] for each in notes] == [[], [DAMAGE["rollouts"][2]]]
