"""What of a run is missing or damaged, as sentences for people: whoever shows a run says it, nothing is left out."""

from __future__ import annotations

from pathlib import Path

from vlmrl.errors import Problem
from vlmrl.store.verify import verify_run

MOST_LINES = 20


def damage_of(run_dir: Path) -> list[str]:
    """Return one sentence for each file of a run that is missing, cut or not what it should be.

    Every file is looked at, and only as much of it read as that takes.
    """
    return [_sentence(problem, run_dir) for problem in verify_run(run_dir, quick=True).errors]


def shortened(lines: list[str], run_id: str) -> list[str]:
    """Return at most MOST_LINES of them, and where the rest can be seen."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], f"... and {len(lines) - MOST_LINES} more: vlmrl runs verify {run_id}"]


def _sentence(problem: Problem, run_dir: Path) -> str:
    where = problem.where or ""
    inside = where.removeprefix(f"{run_dir}/") if where != str(run_dir) else ""
    return f"{inside}: {problem.message}" if inside else problem.message
