"""`vlmrl train` with `--seeds` or `--grid`: run the queue, and print a table of its runs."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from vlmrl.cli.output import emit, say, show_table, show_warnings

if TYPE_CHECKING:
    from vlmrl.launch.request import TrainRequest
    from vlmrl.launch.sweep import Sweep


def run_sweep(request: TrainRequest, sweep: Sweep) -> NoReturn:
    """Run all unfinished runs of the queue, print a table of all its runs, and exit with the queue's exit code."""
    from vlmrl.launch.sweep import plan_queue, results
    from vlmrl.store.layout import runs_root

    sweep.check(request)
    queue, warnings = plan_queue(request, sweep, runs_root(request.runs), say)
    show_warnings(warnings)
    if request.dry_run:
        for member in queue.members:
            words = [*queue.recipe, *member.overrides, "--name", member.name, *queue.options]
            print(shlex.join(["vlmrl", "train", *words]))
        raise typer.Exit
    say(f"{len(queue.members)} runs, {len(queue.slots)} at a time, tag {queue.group}")
    code = queue.run()
    lines = results(queue)
    emit({"group": queue.group, "runs": lines}, request.as_json)
    if not request.as_json:
        keys = [key for key, _ in queue.members[0].values]
        columns = ("run", *keys, "status", "steps", "best", "at step", "last reward")
        show_table("", columns, [[_cell(line[c]) for c in columns] for line in lines])
    if code == 130:
        say("stopped; the same command continues the queue")
    raise typer.Exit(code)


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
