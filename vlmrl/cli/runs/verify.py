"""`vlmrl runs verify`: read and check every file of a run."""

from __future__ import annotations

from dataclasses import asdict

import typer

from vlmrl.cli import options
from vlmrl.cli.output import emit, tell
from vlmrl.errors import ProblemsError


def verify(run: options.RunRef, runs: options.Runs = None, as_json: options.Json = False) -> None:
    """Read and check every file of a run.

    It checks schemas, hashes, rollouts against metrics, and images. The exit code is 2 if it finds an error.

    Example: vlmrl runs verify last
    """
    from vlmrl.data.run_images import run_images
    from vlmrl.errors import format_error
    from vlmrl.store.layout import runs_root
    from vlmrl.store.listing import find
    from vlmrl.store.verify import verify_run

    run_dir = find(runs_root(runs), run)
    verdict = verify_run(run_dir, run_images(run_dir))
    result = {
        "run": run_dir.name,
        "ok": not verdict.errors,
        "counts": verdict.counts,
        "problems": [asdict(p) for p in verdict.problems],
    }
    emit(result, as_json)
    if not as_json:
        for problem in verdict.warnings:
            tell(format_error(problem.message, problem.where, problem.hint, "warning"))
        checked = ", ".join(f"{what} {n}" for what, n in verdict.counts.items())
        state = "has no errors" if not verdict.errors else f"has {len(verdict.errors)} error(s)"
        tell(f"{run_dir.name} {state} (read: {checked})")
    if verdict.errors:
        if as_json:
            raise typer.Exit(2)
        raise ProblemsError(verdict.errors)
