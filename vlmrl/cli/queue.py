"""`vlmrl train` with `--seeds` or `--grid`: the queue's runs, and the table at its end."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from vlmrl.cli.output import emit, say, show_table
from vlmrl.errors import LaunchError

if TYPE_CHECKING:
    from vlmrl.launch.queue import Queue


@dataclass(frozen=True)
class Sweep:
    """The options that make one command many runs."""

    seeds: str | None
    grid: Sequence[str]
    gpus_per_run: int
    group: str | None

    @property
    def asked(self) -> bool:
        return self.seeds is not None or bool(self.grid)


def run_sweep(
    recipe: Path | None, overrides: Sequence[str], sweep: Sweep, gpus: str | None, runs: Path | None, dry_run: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Run what is not done of the queue, show all of it, leave with its exit code."""
    from vlmrl.cli.sft import load_checked
    from vlmrl.launch.gpu_assignment import place
    from vlmrl.launch.queue import Queue, group_of, make_slots, plan_members
    from vlmrl.recipe.load import load_recipe
    from vlmrl.store.layout import runs_root
    from vlmrl.store.manifest import check_tag

    if recipe is None:
        raise LaunchError("--seeds and --grid need a recipe", hint="the same command again goes on with its queue")
    root = runs_root(runs)
    loaded = load_checked(recipe, list(overrides), "rl", root)
    identity = "\n".join([loaded.text, *sorted(overrides)])
    members = plan_members(loaded.path.stem, identity, sweep.seeds, sweep.grid)
    for member in members:
        load_recipe(recipe, overrides=[*overrides, *member.overrides[1::2]], kind="rl")
    group = sweep.group or group_of(loaded.path.stem, identity)
    check_tag(group)
    log = loaded.recipe.log
    grouped = [f"log.group={json.dumps(group)}"] if log.sinks and log.group is None else []
    queue = Queue(
        command=[sys.executable, "-m", "vlmrl", "train"],
        recipe=[str(recipe), *(word for o in [*overrides, *grouped] for word in ("--set", o))],
        options=["--gpus", str(sweep.gpus_per_run), "--runs", str(root)],
        members=members, slots=make_slots(place(gpus or str(sweep.gpus_per_run)), sweep.gpus_per_run),
        root=root, group=group, say=say,
    )  # fmt: skip
    if dry_run:
        for member in members:
            print(
                shlex.join(["vlmrl", "train", *queue.recipe, *member.overrides, "--name", member.name, *queue.options])
            )
        raise typer.Exit
    say(f"{len(members)} runs, {len(queue.slots)} at a time, tag {group}")
    code = queue.run()
    lines = results(queue)
    emit({"group": group, "runs": lines}, as_json)
    if not as_json:
        keys = [key for key, _ in members[0].values]
        columns = ("run", *keys, "status", "steps", "best", "at step", "last reward")
        show_table("", columns, [[_cell(line[c]) for c in columns] for line in lines])
    if code == 130:
        say("stopped; the same command goes on with the queue")
    raise typer.Exit(code)


def results(queue: Queue) -> list[dict[str, Any]]:
    """One object a member: its values, and how far its run has come."""
    from vlmrl.store.metrics import counted, read_tail

    found, lines = queue.found(), []
    for member in queue.members:
        run = found.get(member.name)
        tail = read_tail(run.dir) if run else None
        best = (run.raw.get("best") if run else None) or {}
        lines.append({
            "run": member.name, **dict(member.values), "status": run.status if run else "waiting",
            "steps": counted(tail["step"]) if tail else 0, "best": best.get("value"), "at step": best.get("step"),
            "last reward": tail.get("reward/mean") if tail else None,
        })  # fmt: skip
    return lines


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
