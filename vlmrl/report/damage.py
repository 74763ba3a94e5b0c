"""What of a run a report could not read: said on the page and on the terminal, never left out in silence."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vlmrl.errors import Problem
from vlmrl.store.runs import Run
from vlmrl.store.verify import verify_run

MOST_LINES = 20


def find_damage(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return, by run id, one sentence for each file that is missing, cut or not what it should be.

    Runs without damage are left out. Every file is looked at, and only as much of it read as that takes.
    """
    found = {run.id: [_told(p, run.dir) for p in verify_run(run.dir, quick=True).errors] for run in runs}
    return {run_id: lines for run_id, lines in found.items() if lines}


def shortened(lines: list[str], run_id: str) -> list[str]:
    """At most MOST_LINES of them, and where the rest can be seen."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more: vlmrl runs verify {run_id}"]


def _told(problem: Problem, run_dir: Path) -> str:
    where = problem.where or ""
    inside = where.removeprefix(f"{run_dir}/") if where != str(run_dir) else ""
    return f"{inside}: {problem.message}" if inside else problem.message
