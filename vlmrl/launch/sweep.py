"""`vlmrl train` with `--seeds` or `--grid`: plan and check of the queue of runs, and progress of its members."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmrl.errors import LaunchError, Problem
from vlmrl.launch.gpu_assignment import place
from vlmrl.launch.queue import Queue, group_of, make_slots, plan_members
from vlmrl.launch.request import TrainRequest, option_words
from vlmrl.recipe.load import load_recipe
from vlmrl.setup.checked_recipe import load_checked
from vlmrl.store.manifest import check_tag
from vlmrl.store.metrics import counted, read_tail


@dataclass(frozen=True)
class Sweep:
    """Options of `vlmrl train` that start several runs.

    Args:
        seeds: `1,2,3`; None = the recipe's seed.
        grid: `key=value,value`, one text per key.
        gpus_per_run: number of GPUs of each run.
        group: tag of the runs; None = derived from the recipe.
    """

    seeds: str | None = None
    grid: tuple[str, ...] = ()
    gpus_per_run: int = 1
    group: str | None = None

    @property
    def has_runs(self) -> bool:
        """Return whether one of these options was given."""
        return self.seeds is not None or bool(self.grid)

    def check(self, request: TrainRequest) -> None:
        """Check that a recipe and no option of a single run is given. Raises: LaunchError if this is not so."""
        machines = request.machines
        one_run = request.resume, request.fork, request.name, machines.debug_rank
        if any(option is not None for option in one_run) or machines.nnodes > 1:
            raise LaunchError(
                "--seeds and --grid start new runs, choose their names, and use one machine",
                hint="leave out --resume, --from, --name, --nnodes and --debug-rank",
            )
        if request.recipe is None:
            raise LaunchError("--seeds and --grid need a recipe", hint="the same command again continues its queue")


def plan_queue(
    request: TrainRequest, sweep: Sweep, root: Path, say: Callable[[str], None]
) -> tuple[Queue, list[Problem]]:
    """Return the queue of a sweep, with the recipe of every member checked, and warnings. Nothing is started.

    Args:
        root: folder of the runs.
        say: function that prints a line.
    Raises: LaunchError, and the errors of the recipes.
    """
    assert request.recipe is not None
    recipe, overrides = request.recipe, request.overrides
    loaded, warnings = load_checked(recipe, overrides, "rl", root)
    identity = "\n".join([loaded.text, *sorted(overrides)])
    members = plan_members(loaded.path.stem, identity, sweep.seeds, sweep.grid)
    for member in members:
        load_recipe(recipe, overrides=[*overrides, *member.overrides[1::2]], kind="rl")
    group = sweep.group or group_of(loaded.path.stem, identity)
    check_tag(group)
    log = loaded.recipe.log
    log_group = [f"log.group={json.dumps(group)}"] if log.sinks and log.group is None else []
    placement = place(request.machines.gpus or str(sweep.gpus_per_run))
    queue = Queue(
        command=[sys.executable, "-m", "vlmrl", "train"],
        recipe=[str(recipe), *option_words({"--set": [*overrides, *log_group]})],
        options=["--gpus", str(sweep.gpus_per_run), "--runs", str(root)],
        members=members,
        slots=make_slots(placement, sweep.gpus_per_run),
        root=root,
        group=group,
        say=say,
    )
    return queue, warnings


def results(queue: Queue) -> list[dict[str, Any]]:
    """Return one table row per member: its values, and the progress of its run."""
    runs, lines = queue.found(), []
    for member in queue.members:
        run = runs.get(member.name)
        tail = read_tail(run.dir) if run else None
        best = (run.raw.get("best") if run else None) or {}
        lines.append(
            {
                "run": member.name,
                **dict(member.values),
                "status": run.status if run else "waiting",
                "steps": counted(tail["step"]) if tail else 0,
                "best": best.get("value"),
                "at step": best.get("step"),
                "last reward": tail.get("reward/mean") if tail else None,
            }
        )
    return lines
